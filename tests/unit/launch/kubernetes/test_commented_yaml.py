"""YAML with comments, read back by PyYAML."""

from __future__ import annotations

import pytest
import yaml

from megatron_wrap.launch.kubernetes.commented_yaml import Noted, commented_yaml

WORDS = ["word", "a/b:c", "on", "No", "null", "~", "1", "0x1f", "1e3", "2026-11-24", "é", "y"]
SIGNS = ["", " ", "a: b", "- a", "# a", "a #b", '"']
BLOCKS = ["a\nb", "a\nb\n", "a\n\n\n", "  a\n b\n", "a\n\tb: 'c'\n\n", "\na\n", "a\x07\nb"]


@pytest.mark.parametrize("text", [*WORDS, *SIGNS, *BLOCKS])
def test_texts_are_read_back(text):
    document = {"key": text, text: 1, "list": [text, {"nested": text, "other": [text]}]}
    assert yaml.safe_load(commented_yaml(document)) == document


def test_comments_stand_above_their_keys_and_missing_values_are_left_out():
    document = {
        "spec": {
            "limit": Noted(0, "the first failure"),
            "none": None,
            "rules": [{"action": Noted("Ignore", "an eviction"), "codes": [1, 2]}, {}],
            "torch": {},
        }
    }
    assert commented_yaml(document).splitlines() == [
        "spec:",
        "  # the first failure",
        "  limit: 0",
        "  rules:",
        "  # an eviction",
        "  - action: Ignore",
        "    codes:",
        "    - 1",
        "    - 2",
        "  - {}",
        "  torch: {}",
    ]
