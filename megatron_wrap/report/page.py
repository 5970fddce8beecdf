"""A self-contained HTML page: style sheet, tables, tiles, and items to page through. Escapes every text."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field

_STYLE = """
:root { color-scheme: light dark; --back: #fbfbfd; --panel: #ffffff; --ink: #1c2026; --soft: #5b6470; --line: #d9dde3;
  --bar: #5573c8; --mark: #0b6b3a; --marked: #d3f2df; --gone: #8a4b1a; --alarm: #b3261e; --notice: #8a5a00; }
@media (prefers-color-scheme: dark) { :root { --back: #14171c; --panel: #1c2128; --ink: #e5e9ef; --soft: #9aa4b1;
  --line: #343b45; --bar: #7d9bf0; --mark: #a7efc4; --marked: #12402a; --gone: #e0a877; --alarm: #ff8a80;
  --notice: #f2c14e; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 32px 0 10px; }
p { margin: 6px 0; } .soft { color: var(--soft); }
code { font: 0.9em ui-monospace, monospace; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(132px, 1fr)); gap: 10px; margin: 18px 0 0; }
.tile, .panel { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; }
.tile b { display: block; font-size: 1.3rem; font-variant-numeric: tabular-nums; } .tile span { color: var(--soft); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 6px 12px 6px 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; } .number { text-align: right; font-variant-numeric: tabular-nums; }
.panel + .panel { margin-top: 10px; } .charts .panel { margin: 0; min-width: 0; } td b { font-weight: 600; }
.alarm { color: var(--alarm); font-weight: 600; } .notice { color: var(--notice); font-weight: 600; }
svg { display: block; width: 100%; } .bar { fill: var(--bar); } .limit { stroke: var(--alarm); stroke-width: 2;
  vector-effect: non-scaling-stroke; } .axis { display: flex; justify-content: space-between; color: var(--soft);
  font-size: 0.85rem; font-variant-numeric: tabular-nums; }
.share { fill: var(--bar); } .share-mark { fill: var(--mark); } .share-gone { fill: var(--gone); }
.key { display: inline-block; width: 0.8em; height: 0.8em; border-radius: 2px; margin: 0 5px 0 0; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; }
.controls { display: flex; flex-wrap: wrap; gap: 8px; align-items: center; margin: 0 0 10px; }
button, select { font: inherit; color: inherit; background: var(--panel); border: 1px solid var(--line);
  border-radius: 6px; padding: 5px 12px; min-height: 38px; max-width: 100%; }
button:disabled { opacity: 0.4; } :focus-visible { outline: 2px solid var(--bar); outline-offset: 2px; }
.item { margin: 0 0 12px; } .item[hidden] { display: none; }
.item header { display: flex; flex-wrap: wrap; gap: 2px 14px; color: var(--soft); margin-bottom: 8px; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font: 13.5px/1.55 ui-monospace, monospace; margin: 0; }
.text + .text { border-top: 1px solid var(--line); margin-top: 10px; padding-top: 10px; }
@media (max-width: 720px) { .stack tr, .stack td { display: block; } .stack td { border: 0; padding: 2px 0; }
  .stack tr { border-bottom: 1px solid var(--line); padding: 8px 0; } .stack thead { display: none; } }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 360px), 1fr)); gap: 10px; }
.plot { margin: 0; } .plot figcaption { font-weight: 600; overflow-wrap: anywhere; }
.plot figcaption span { color: var(--soft); font-weight: 400; } .area { position: relative; margin: 10px 0 2px 58px; }
.area span { position: absolute; right: 100%; margin-right: 7px; transform: translateY(-50%); color: var(--soft);
  font-size: 0.85rem; font-variant-numeric: tabular-nums; white-space: nowrap; } .plot .axis { margin-left: 58px; }
.plot path { fill: none; stroke-width: 1.8; vector-effect: non-scaling-stroke; stroke-linejoin: round; }
.plot .dots { stroke-width: 7; stroke-linecap: round; } .plot .dashed { stroke-dasharray: 4 4; }
.plot .band { stroke: none; opacity: 0.22; } .plot .grid { stroke: var(--line); stroke-width: 1; }
.plot svg { overflow: visible; } .plot .cursor[hidden] { display: none; }
.plot .cursor { stroke: var(--soft); stroke-width: 1; } .plot .legend { margin-left: 58px; font-size: 0.9rem; }
.line0 { --c: #5573c8; } .line1 { --c: #c2571a; } .line2 { --c: #2d8659; } .line3 { --c: #a03ca0; }
.line4 { --c: #8a7200; } .line5 { --c: #00838f; }
@media (prefers-color-scheme: dark) { .line0 { --c: #7d9bf0; } .line1 { --c: #f39a5b; } .line2 { --c: #68c795; }
  .line3 { --c: #d98ad9; } .line4 { --c: #d6bd45; } .line5 { --c: #5cc5cf; } }
path[class*=line] { stroke: var(--c); }
.band[class*=line] { fill: var(--c); } .key[class*=line] { background: var(--c); }
details { margin-top: 10px; } summary { cursor: pointer; padding: 6px 0; } details .panel { margin-top: 6px; }
mark { background: var(--marked); color: var(--mark); border-radius: 2px; } s { color: var(--gone); }
"""
_SCRIPT = """
const items = [...document.querySelectorAll('.item')], choice = document.querySelector('#choice');
const position = document.querySelector('#position'), back = document.querySelector('#back');
const next = document.querySelector('#next');
let shown = items, at = 0;
function show() {
  items.forEach(item => { item.hidden = item !== shown[at]; });
  position.textContent = shown.length ? `${at + 1} of ${shown.length}` : 'none';
  back.disabled = at <= 0; next.disabled = at >= shown.length - 1;
}
function choose() {
  shown = items.filter(item => !choice.value || item.dataset.labels.split(' ').includes(choice.value)); at = 0; show();
}
function move(step) { if (shown[at + step]) { at += step; show(); } }
if (items.length) {
  document.querySelector('.controls').hidden = false;
  back.onclick = () => move(-1); next.onclick = () => move(1); choice.onchange = choose;
  document.addEventListener('keydown', event => {
    if (event.target === choice || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === 'ArrowLeft') move(-1); else if (event.key === 'ArrowRight') move(1);
  });
  show();
}
"""
_CURSOR = """
const number = value => Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(3)
  : String(Number(value.toPrecision(5)));
document.querySelectorAll('.plot').forEach(plot => {
  const svg = plot.querySelector('svg'), cursor = plot.querySelector('.cursor');
  const [left, right, low, high] = svg.dataset.range.split(' ').map(Number);
  const lines = [...plot.querySelectorAll('path[data-name]')].map(path => ({
    shown: plot.querySelector(path.dataset.name),
    points: [...path.getAttribute('d').matchAll(/[ML]([\\d.]+) ([\\d.]+)/g)]
      .map(match => [+match[1], +match[2]]) }));
  const at = plot.querySelector('.at');
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect(), x = 1000 * (event.clientX - box.left) / box.width;
    let nearest = null;
    lines.forEach(line => {
      const near = line.points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a, line.points[0]);
      line.shown.textContent = ' ' + number(low + (1 - near[1] / 300) * (high - low)); nearest ??= near[0];
    });
    if (nearest === null) return;
    cursor.setAttribute('x1', nearest); cursor.setAttribute('x2', nearest); cursor.removeAttribute('hidden');
    at.textContent = 'at ' + Math.round(left + nearest / 1000 * (right - left)).toLocaleString();
  });
  svg.addEventListener('pointerleave', () => {
    cursor.setAttribute('hidden', ''); at.textContent = ''; lines.forEach(line => { line.shown.textContent = ''; });
  });
});
"""
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
        script = _SCRIPT * ("<article" in body) + _CURSOR * ('<figure class="plot"' in body)
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
            f"<title>{escaped(self.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
            f'<h1>{escaped(self.title)}</h1>\n<p class="soft">{escaped(self.subtitle)}</p>\n{body}\n</main>\n'
            f"<script>{script}</script>\n</body>\n</html>\n"
        )


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
