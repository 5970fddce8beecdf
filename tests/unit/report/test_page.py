"""Pages of HTML: well-formed, escaped, and without requests."""

from __future__ import annotations

import re

from _html import checked

from megatron_wrap.report import charts
from megatron_wrap.report.page import Cell, Item, Page

HOSTILE = "<script>alert(1)</script> & \"quoted\" 'too' \x1b[31m \ud800"


def full_page() -> str:
    page = Page(HOSTILE, HOSTILE)
    page.heading(HOSTILE)
    page.paragraph(HOSTILE)
    page.tiles([(HOSTILE, HOSTILE)])
    page.table((HOSTILE, "n"), [[HOSTILE, Cell(HOSTILE, "number")], [Cell(f"{HOSTILE}\nsecond", "title"), "1"]])
    page.figure(charts.histogram(10, [1, 0, 3], limit=25, unit=HOSTILE))
    page.figure(charts.shares([(HOSTILE, 3, "share"), ("b", 1, "share-gone")]))
    item = Item(HOSTILE, [HOSTILE], [[(HOSTILE, "trained"), (HOSTILE, "other"), (HOSTILE, "cut")]], ["a", HOSTILE])
    page.items([item], [("", "all"), (HOSTILE, HOSTILE)])
    return page.html()


def test_every_text_is_escaped_and_control_characters_are_visible():
    html = full_page()
    checker = checked(html)
    assert [tag for tag, _ in checker.tags].count("script") == 1
    assert "\x1b" not in html
    assert "\u241b[31m" in checker.text
    html.encode("utf-8")
    assert checker.text.count("<script>alert(1)</script>") >= 12


def test_the_page_makes_no_requests():
    checker = checked(full_page())
    for tag, attributes in checker.tags:
        assert tag not in ("link", "img", "iframe", "object", "base")
        assert not {"src", "href", "srcset", "data", "action"} & attributes.keys()
    policies = [a["content"] for t, a in checker.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert len(policies) == 1
    assert policies[0].startswith("default-src 'none'")
    assert not re.search(r"url\(|@import|https?://", full_page())


def test_the_histogram_s_bars_have_the_counts_and_the_line_is_at_the_limit():
    checker = checked(charts.histogram(10, [2, 0, 4], limit=15))
    bars = [attributes for tag, attributes in checker.tags if tag == "rect"]
    assert [float(bar["height"]) for bar in bars] == [50, 0, 100]
    [line] = [attributes for tag, attributes in checker.tags if tag == "line"]
    assert float(line["x1"]) == 1.5
    assert "20 to 29 tokens: 4" in checker.text
    assert not [tag for tag, _ in checked(charts.histogram(10, [2], limit=11)).tags if tag == "line"]
    checked(charts.histogram(1, []))


def test_shares_fill_the_bar():
    rects = [a for tag, a in checked(charts.shares([("a", 3, "share"), ("b", 1, "share-mark")])).tags if tag == "rect"]
    assert [float(rect["width"]) for rect in rects] == [75, 25]
    assert [float(rect["x"]) for rect in rects] == [0, 75]
    checked(charts.shares([("a", 0, "share")]))
