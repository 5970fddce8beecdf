"""A self-contained HTML page: style sheet, tables, tiles, and items to page through. Escapes every text."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_TAGS = {"trained": ("<mark>", "</mark>"), "cut": ("<s>", "</s>"), "other": ("", "")}


@dataclass(frozen=True)
class Cell:
    """A cell of a table with a tone."""

    text: str
    """Line breaks are kept."""
    tone: str = ""
    """`number` (aligned to the right), `alarm`, `notice`, `soft`, or `title` (the first line is bold)."""


@dataclass(frozen=True)
class Item:
    """One item to page through."""

    title: str
    facts: Sequence[str]
    texts: Sequence[Sequence[tuple[str, str]]]
    """Each text as runs of (text, kind); a kind is `trained`, `other` or `cut`."""
    labels: Sequence[str] = ()
    """Keys by which the reader can filter items."""


@dataclass
class Page:
    """A page that is built from top to bottom; `html` is the finished file."""

    title: str
    subtitle: str = ""
    _parts: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._parts.append(f"<h2>{escaped(text)}</h2>")

    def paragraph(self, text: str) -> None:
        """Add a line of text."""
        self._parts.append(f'<p class="soft">{escaped(text)}</p>')

    def tiles(self, values: Sequence[tuple[str, str]]) -> None:
        """Add numbers with their names: (name, number)."""
        inner = "".join(f'<div class="tile"><b>{escaped(v)}</b><span>{escaped(n)}</span></div>' for n, v in values)
        self._parts.append(f'<div class="tiles">{inner}</div>')

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str | Cell]], is_stacked: bool = False) -> None:
        """Add a table. On narrow screens it scrolls, or its cells are stacked."""
        shown = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
        tones = [cell.tone if isinstance(cell, Cell) else "" for cell in rows[0]] if rows else []
        names = "".join(
            f'<th scope="col"{_tone(tone if tone == "number" else "")}>{escaped(name)}</th>'
            for name, tone in zip(head, tones or [""] * len(head), strict=True)
        )
        self._parts.append(
            f'<div class="panel {"stack" if is_stacked else "scroll"}"><table><thead><tr>{names}</tr></thead>'
            f"<tbody>{shown}</tbody></table></div>"
        )

    def folded(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str | Cell]]) -> None:
        """Add a table that is folded until the reader opens it."""
        self._parts.append(f"<details><summary>{escaped(title)}</summary>")
        self.table(head, rows)
        self._parts.append("</details>")

    def figure(self, markup: str) -> None:
        """Add markup from `charts`."""
        self._parts.append(f'<div class="panel">{markup}</div>')

    def figures(self, markups: Sequence[str]) -> None:
        """Add markup from `charts` or `curves`, side by side on wide screens."""
        inner = "".join(f'<div class="panel">{markup}</div>' for markup in markups)
        self._parts.append(f'<div class="charts">{inner}</div>')

    def items(self, items: Sequence[Item], choices: Sequence[tuple[str, str]]) -> None:
        """Add items; the page shows one at a time (without JavaScript all of them).

        Args:
            choices: (label, name) of each filter.
        """
        options = "".join(f'<option value="{escaped(key)}">{escaped(name)}</option>' for key, name in choices)
        self._parts.append(
            '<div class="controls" hidden><button id="back" type="button">Previous</button>'
            '<button id="next" type="button">Next</button><span id="position" aria-live="polite"></span>'
            f'<select id="choice" aria-label="Which samples">{options}</select></div>'
        )
        self._parts.extend(map(_item, items))

    def html(self) -> str:
        """The finished page."""
        body = "\n".join(self._parts)
        script = ""
        if "<article" in body:
            script += _asset("items.js")
        if '<figure class="plot"' in body:
            script += _asset("curves.js")
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
            f"<title>{escaped(self.title)}</title>\n<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n<main>\n"
            f'<h1>{escaped(self.title)}</h1>\n<p class="soft">{escaped(self.subtitle)}</p>\n{body}\n</main>\n'
            f"<script>\n{script}</script>\n</body>\n</html>\n"
        )


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def escaped(text: str) -> str:
    """Text for HTML, with control characters made visible."""
    return html.escape(visible(text))


def visible(text: str) -> str:
    """Text with control characters other than line feeds and tabs replaced by Unicode's pictures of them, and lone
    surrogates by question marks."""
    table = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
    return text.translate(table).encode("utf-8", "replace").decode("utf-8")


def _tone(tone: str) -> str:
    return f' class="{tone}"' if tone else ""


def _cell(cell: str | Cell) -> str:
    if isinstance(cell, str):
        cell = Cell(cell)
    lines = [escaped(line) for line in cell.text.split("\n")]
    if cell.tone == "title":
        lines[0] = f"<b>{lines[0]}</b>"
    return f"<td{_tone(cell.tone)}>{'<br>'.join(lines)}</td>"


def _item(item: Item) -> str:
    facts = "".join(f"<span>{escaped(fact)}</span>" for fact in item.facts)
    texts = "".join(f'<pre class="text">{"".join(_run(*run) for run in text)}</pre>' for text in item.texts)
    labels = escaped(" ".join(item.labels))
    return (
        f'<article class="panel item" data-labels="{labels}"><header><code>{escaped(item.title)}</code>{facts}</header>'
        f"{texts}</article>"
    )


def _run(text: str, kind: str) -> str:
    begin, end = _TAGS[kind]
    return f"{begin}{escaped(text)}{end}"
