"""Charts as inline SVG, which stretches to the width of the page; labels are HTML and keep their size."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_wrap.report.page import escaped


def histogram(width: int, counts: Sequence[int], limit: int | None = None, unit: str = "tokens") -> str:
    """Bars of equal width, starting at 0.

    Args:
        width: range of a bin.
        counts: number of values in each bin.
        limit: a value to mark with a line if it is in the range.
        unit: of the values.
    """
    highest, end = max(counts, default=0) or 1, width * len(counts)
    bars = []
    for index, count in enumerate(counts):
        height = 100 * count / highest
        label = f"{index * width:,} to {(index + 1) * width - 1:,} {unit}: {count:,}"
        bars.append(
            f'<rect class="bar" x="{index + 0.05:.2f}" y="{100 - height:.2f}" width="0.9" height="{height:.2f}">'
            f"<title>{escaped(label)}</title></rect>"
        )
    line, note = "", ""
    if limit is not None and limit <= end:
        at = limit / width
        line = f'<line class="limit" x1="{at:.2f}" x2="{at:.2f}" y1="0" y2="100"/>'
        note = f'<span><span class="key" style="background:var(--alarm)"></span>{limit:,} {escaped(unit)}</span>'
    ticks = "".join(f"<span>{round(end * part / 4):,}</span>" for part in range(5))
    return (
        f'<svg viewBox="0 0 {max(1, len(counts))} 100" preserveAspectRatio="none" height="190" role="img" '
        f'aria-label="Histogram of {escaped(unit)}, highest bar {highest:,}">{"".join(bars)}{line}</svg>'
        f'<div class="axis">{ticks}</div><p class="legend soft"><span>highest bar: {highest:,}</span>{note}</p>'
    )


def shares(parts: Sequence[tuple[str, int, str]]) -> str:
    """One bar, divided in proportion.

    Args:
        parts: (name, number, style); the style is `share`, `share-mark` or `share-gone`.
    """
    total = sum(number for _, number, _ in parts) or 1
    rects, names, begin = [], [], 0.0
    colors = {"share": "--bar", "share-mark": "--mark", "share-gone": "--gone"}
    for name, number, style in parts:
        length = 100 * number / total
        label = escaped(f"{name}: {number:,} ({number / total:.1%})")
        rects.append(
            f'<rect class="{style}" x="{begin:.3f}" y="0" width="{length:.3f}" height="10">'
            f"<title>{label}</title></rect>"
        )
        names.append(f'<span><span class="key" style="background:var({colors[style]})"></span>{label}</span>')
        begin += length
    return (
        f'<svg viewBox="0 0 100 10" preserveAspectRatio="none" height="22" role="img" aria-label="Shares">'
        f'{"".join(rects)}</svg><p class="legend">{"".join(names)}</p>'
    )
