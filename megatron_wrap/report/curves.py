"""Curves over the iterations of runs as inline SVG; labels are HTML and keep their size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_wrap.report.page import escaped

WIDTH, HEIGHT = 1000, 300
"""Of the SVG's coordinates; the script in page.py uses the same numbers."""
_MOST_POINTS = 800
_COLORS = 6


@dataclass(frozen=True)
class Series:
    """One curve."""

    name: str
    points: Sequence[tuple[float, float]]
    """(iteration, value), ascending; finite."""
    color: int = 0
    """Index of the run."""
    is_evaluation: bool = False
    """Whether the points are few and marked."""


@dataclass(frozen=True)
class Chart:
    """Curves with the same unit."""

    title: str
    series: Sequence[Series]
    unit: str = ""


@dataclass(frozen=True)
class Point:
    """Neighboring points as they are drawn: their mean and their range."""

    x: float
    mean: float
    low: float
    high: float


def thinned(points: Sequence[tuple[float, float]], most: int = _MOST_POINTS) -> list[Point]:
    """At most `most` points, each the mean of equally many neighbors (the last may average fewer)."""
    size = max(1, math.ceil(len(points) / most))
    means = []
    for begin in range(0, len(points), size):
        part = points[begin : begin + size]
        values = [value for _, value in part]
        mean_x = sum(x for x, _ in part) / len(part)
        means.append(Point(mean_x, sum(values) / len(values), min(values), max(values)))
    return means


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers between `low` and `high`."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def curves(chart: Chart) -> str:
    """A figure of the chart.

    Of a run with more than 800 points, the curve is the mean of neighbors and its band the range of their values.
    """
    drawn = [(series, thinned(series.points)) for series in chart.series]
    frame = _Frame.around(drawn)
    lines = [mark for order, (series, points) in enumerate(drawn) for mark in _marks(frame, series, points, order)]
    rows = ticks(frame.low, frame.high)
    grid = "".join(f'<path class="grid" d="M0 {frame.y(value):.1f}H{WIDTH}"/>' for value in rows)
    labels = "".join(
        f'<span style="top:{100 * frame.y(value) / HEIGHT:.2f}%">{short_number(value)}</span>' for value in rows
    )
    columns = "".join(f"<span>{frame.left + part * (frame.right - frame.left) / 4:,.0f}</span>" for part in range(5))
    sizes = {math.ceil(len(series.points) / _MOST_POINTS) for series in chart.series}
    note = f"<span>means of {max(sizes):,} steps, band: smallest to largest</span>" if max(sizes) > 1 else ""
    keys = "".join(_key(series, order, len(drawn) > 1) for order, series in enumerate(chart.series))
    unit = f" <span>{escaped(chart.unit)}</span>" if chart.unit else ""
    title = escaped(chart.title)
    return (
        f'<figure class="plot"><figcaption>{title}{unit}</figcaption><div class="area">{labels}'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" height="200" role="img" aria-label="{title}" '
        f'data-range="{frame.left:g} {frame.right:g} {frame.low!r} {frame.high!r}">{grid}{"".join(lines)}'
        f'<line class="cursor" hidden="" x1="0" x2="0" y1="0" y2="{HEIGHT}" vector-effect="non-scaling-stroke"/></svg>'
        f'</div><div class="axis">{columns}</div><p class="legend">{keys}{note}<span class="at"></span></p></figure>'
    )


def short_number(value: float) -> str:
    """A number of an axis, in about six characters."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


@dataclass(frozen=True)
class _Frame:
    """Ranges of both axes."""

    left: float
    right: float
    low: float
    high: float

    @classmethod
    def around(cls, drawn: Sequence[tuple[Series, Sequence[Point]]]) -> _Frame:
        points = [point for _, points in drawn for point in points]
        low, high = min(point.low for point in points), max(point.high for point in points)
        margin = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
        bottom = low - margin
        right = max(point.x for point in points)
        # iterations begin at 0, and a margin does not make positive numbers negative
        return cls(0.0, right or 1.0, max(0.0, bottom) if low >= 0 else bottom, high + margin)

    def x(self, iteration: float) -> float:
        return WIDTH * (iteration - self.left) / (self.right - self.left)

    def y(self, value: float) -> float:
        return HEIGHT * (1 - (value - self.low) / (self.high - self.low))


def _marks(frame: _Frame, series: Series, points: Sequence[Point], order: int) -> Iterator[str]:
    color = f"line{series.color % _COLORS}"
    if any(point.low < point.high for point in points):
        upper = [f"{frame.x(point.x):.1f} {frame.y(point.high):.2f}" for point in points]
        lower = [f"{frame.x(point.x):.1f} {frame.y(point.low):.2f}" for point in reversed(points)]
        yield f'<path class="band {color}" d="M{"L".join([*upper, *lower])}Z"/>'
    positions = [f"{frame.x(point.x):.1f} {frame.y(point.mean):.2f}" for point in points]
    style = f"{color} dashed" if series.is_evaluation else color
    yield f'<path class="{style}" data-name=".value{order}" d="M{"L".join(positions)}"/>'
    if series.is_evaluation or len(points) == 1:
        yield f'<path class="dots {color}" d="{"".join(f"M{position}h0" for position in positions)}"/>'


def _key(series: Series, order: int, is_named: bool) -> str:
    name = f'<span class="key line{series.color % _COLORS}"></span>{escaped(series.name)}' if is_named else ""
    return f'<span>{name}<b class="value{order}"></b></span>'
