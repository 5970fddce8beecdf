"""`megatron-wrap families`: each family was measured, and agrees with transformers."""

from __future__ import annotations

import json

from megatron_wrap.cli.main import main
from megatron_wrap.config.hugging_face import FAMILIES, UNSUPPORTED


def test_every_family_was_measured_on_layouts_and_agrees(capsys):
    assert main(["families", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    rows = {row["model_type"]: row for row in content["families"]}
    assert list(rows) == list(FAMILIES.keys())
    for name, row in rows.items():
        assert row["difference"] is not None, f"{name}: run scripts/families.py"
        assert 0 < row["difference"] <= 1e-4
        assert {"one", "tp2-pp2", "cp2"} <= set(row["layouts"])
    assert content["refused"].keys() == UNSUPPORTED.keys()


def test_the_table_names_sizes_and_reasons(capsys):
    assert main(["families"]) == 0
    shown = capsys.readouterr().out
    assert "glm-4.5-air" in shown
    assert "hyper-connections" in shown
