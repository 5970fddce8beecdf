"""Charts of runs as PNG files, drawn by matplotlib."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from megatron_wrap.errors import ConfigError
from megatron_wrap.report.curves import Chart, thinned


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
