"""Self-contained HTML pages from Jinja templates, one file without requests whose texts are escaped; curves over the
iterations of runs for their charts, also as PNG files."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_wrap.errors import ConfigError

TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class Item:
    """One item of a page on which the reader steps through items."""

    title: str
    details: Sequence[str]
    texts: Sequence[Sequence[tuple[str, str]]]
    """Texts of the item, each as parts (text, kind); a kind is `trained`, `other` or `cut`."""
    labels: Sequence[str] = ()
    """Keys by which the reader can filter items."""


def rendered(template: Path, **values: Any) -> str:
    """The HTML of a template that extends `page.html`.

    Args:
        values: variables of the template; `page.html` uses `title` and `subtitle`.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader([template.parent, TEMPLATES])
    options: dict[str, Any] = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=loader, undefined=StrictUndefined, finalize=_shown, **options)
    return environment.get_template(template.name).render(values)


def visible(text: str) -> str:
    """Text with control characters other than line feeds and tabs replaced by Unicode's pictures of them, and lone
    surrogates by question marks."""
    table = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
    return text.translate(table).encode("utf-8", "replace").decode("utf-8")


def _shown(value: Any) -> Any:
    return visible(value) if type(value) is str else value


_WIDTH, _HEIGHT = 1000, 300
"""Width and height of a chart's coordinates; `run.html` and `curves.js` use the same."""
_MOST_POINTS = 800


@dataclass(frozen=True)
class Series:
    """Values of one curve."""

    name: str
    points: Sequence[tuple[float, float]]
    """(iteration, value) of each point, ascending and finite."""
    color: int = 0
    """Index of the run, which selects the color."""
    is_evaluation: bool = False
    """Whether the curve shows evaluations, whose points are few and marked."""


@dataclass(frozen=True)
class Chart:
    """Curves with the same unit."""

    title: str
    series: Sequence[Series]
    unit: str = ""


@dataclass(frozen=True)
class Point:
    """Neighboring points that are drawn as one: their mean and their range."""

    x: float
    mean: float
    low: float
    high: float


def thinned(points: Sequence[tuple[float, float]], most: int = _MOST_POINTS) -> list[Point]:
    """At most `most` points, each the mean of equally many neighbors (the last may average fewer)."""
    size = max(1, math.ceil(len(points) / most))
    parts = [points[begin : begin + size] for begin in range(0, len(points), size)]
    means = []
    for part in parts:
        x, values = [x for x, _ in part], [value for _, value in part]
        means.append(Point(math.fsum(x) / len(x), math.fsum(values) / len(x), min(values), max(values)))
    return means


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers between `low` and `high`."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def figure(chart: Chart) -> dict[str, Any]:
    """The data of a chart for `run.html`. For a run with more than 800 points, the curve is the mean of neighbors, with
    the range of their values as a band.

    Returns:
        title, unit; range: iterations at the left and right end, values at the bottom and top; rows: (y, label) of the
        lines of the grid; columns: labels of the iterations; curves: name, color, is_evaluation, line and band, whose
        points are "x y"; steps_per_point: the largest of all curves.
    """
    drawn = [(series, thinned(series.points)) for series in chart.series]
    points = [point for _, of_series in drawn for point in of_series]
    low, high = min(point.low for point in points), max(point.high for point in points)
    margin = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
    # iterations begin at 0, and a margin does not make positive numbers negative
    bottom, top = max(0.0, low - margin) if low >= 0 else low - margin, high + margin
    right = max(point.x for point in points) or 1.0

    def y(value: float) -> float:
        return round(_HEIGHT * (top - value) / (top - bottom), 2)

    curves: list[dict[str, Any]] = []
    for series, of_series in drawn:
        x = [f"{_WIDTH * point.x / right:.1f}" for point in of_series]
        mean, upper, lower = (
            [f"{at} {y(value)}" for at, value in zip(x, values, strict=True)]
            for values in zip(*((point.mean, point.high, point.low) for point in of_series), strict=True)
        )
        band = [*upper, *reversed(lower)] if len(of_series) < len(series.points) else []
        curves.append({"name": series.name, "color": series.color, "line": mean, "band": band})
        curves[-1]["is_evaluation"] = series.is_evaluation
    return {
        "title": chart.title,
        "unit": chart.unit,
        "range": (0.0, right, bottom, top),
        "rows": [(y(value), short_number(value)) for value in ticks(bottom, top)],
        "columns": [f"{part * right / 4:,.0f}" for part in range(5)],
        "curves": curves,
        "steps_per_point": max(math.ceil(len(series.points) / _MOST_POINTS) for series in chart.series),
    }


def short_number(value: float) -> str:
    """A number of an axis as text of about six characters."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def write_png_files(charts: Sequence[Chart], folder: Path, prefix: str) -> list[Path]:
    """Write each chart as `folder/PREFIX-TITLE.png`, 1200 x 675 pixels; returns the paths.

    Raises:
        ConfigError: matplotlib is not installed. OSError: a file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--png: the package matplotlib is not installed; run `pip install matplotlib`, or leave --png out"
        ) from error
    written = []
    for chart in charts:
        figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for series in chart.series:
            points = thinned(series.points)
            color, x = f"C{series.color}", [point.x for point in points]
            style = "o--" if series.is_evaluation else "o-" if len(points) == 1 else "-"
            axes.plot(x, [point.mean for point in points], style, color=color, label=series.name, markersize=4)
            low, high = [point.low for point in points], [point.high for point in points]
            if low != high:
                axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
        axes.set_xlabel("iteration")
        axes.set_ylabel(f"{chart.title} ({chart.unit})" if chart.unit else chart.title)
        axes.grid(alpha=0.3)
        axes.legend()
        path = folder / f"{prefix}-{re.sub('[^A-Za-z0-9._]+', '_', chart.title)}.png"
        figure.savefig(path)
        written.append(path)
    return written
