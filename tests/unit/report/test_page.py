"""Pages of HTML: well-formed, escaped, and without requests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from _html import Checker, checked

from megatron_wrap.report.page import Item, rendered

HOSTILE = "<script>alert(1)</script> & \"quoted\" 'too' \x1b[31m \ud800"
TEMPLATE = """{% extends "page.html" %}{% block body %}
{{ tiles([(text, text)]) }}{{ table([text, "n"], [[text, 1]], ["soft", "number"]) }}{{ folded(text, [text], [[text]]) }}
{{ paged([item], [("", "all"), (text, text)]) }}{% endblock %}"""


@pytest.fixture
def page(tmp_path: Path) -> str:
    (tmp_path / "all.html").write_text(TEMPLATE)
    item = Item(HOSTILE, [HOSTILE], [[(HOSTILE, "trained"), (HOSTILE, "other"), (HOSTILE, "cut")]], ["a", HOSTILE])
    return rendered(tmp_path / "all.html", title=HOSTILE, subtitle=HOSTILE, text=HOSTILE, item=item)


@pytest.fixture
def checker(page: str) -> Checker:
    return checked(page)


def test_every_text_is_escaped_and_control_characters_are_visible(page, checker):
    assert [tag for tag, _ in checker.tags].count("script") == 1
    assert "\x1b" not in page
    assert "\u241b[31m" in checker.text
    page.encode("utf-8")
    assert checker.text.count("<script>alert(1)</script>") >= 12


def test_the_page_makes_no_requests(page, checker):
    for tag, attributes in checker.tags:
        assert tag not in ("link", "img", "iframe", "object", "base")
        assert not {"src", "href", "srcset", "data", "action"} & attributes.keys()
    [policy] = [a["content"] for _, a in checker.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert not re.search(r"url\(|@import|https?://", page)
