"""Comparison of two runs (tolerances, relative differences, the effect of rounding), and the report of `check_parity`:
one row for each layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy

from megatron_wrap.metrics.number_format import counted

OBJECTIVE_TOLERANCE = 1e-5
"""Largest relative difference of an objective, for dense models in fp32."""
METRIC_TOLERANCE = 1e-4
"""Largest relative difference of a metric, which may be a small difference of large numbers."""
EXPERTS_TOLERANCE = 1e-4
"""Largest relative difference of an objective for MoE models; for a metric, ten times as much. Their order of summation
depends on the layout."""
GRADIENT_TOLERANCE = 1e-4
"""Largest norm of a gradient's difference divided by the norm of the gradient."""
GRADIENT_FLOOR = 1e-6
"""Share of the largest parameter gradient's norm below which a gradient's norm counts as a rounding error."""
DETERMINISM_TOLERANCE = 1e-6
"""Largest relative difference of two runs on one process; kernels of a GPU may sum in any order."""
ROUNDING = 1e-6
"""Relative size of the noise that is added to the model's outputs to measure how rounding changes an objective or a
metric. Layouts differ by less in fp32, about 1e-7 to 1e-6."""
ROUNDING_MARGIN = 10.0
"""Safety factor on the change that this noise causes, because it is one random sample, not a bound."""


def rounding_floor(noisy: float, value: float, tolerance: float) -> float:
    """Magnitude below which rounding may change a value by more than `tolerance` relative to it.

    Args:
        noisy: the value computed with noise of relative size `ROUNDING` on the model's outputs.
    """
    difference = abs(noisy - value)
    return ROUNDING_MARGIN * difference / tolerance if math.isfinite(difference) else 0.0


def relative(value: float, reference: float, floor: float = 0.0) -> float:
    """|value - reference| / max(|reference|, floor); inf if exactly one is nan, 0 if both are."""
    if math.isnan(value) or math.isnan(reference):
        return 0.0 if math.isnan(value) and math.isnan(reference) else math.inf
    return abs(value - reference) / max(abs(reference), floor, 1e-8)


def metric_differences(
    metrics: Sequence[dict[str, float]], reference: Sequence[dict[str, float]], floors: Sequence[dict[str, float]]
) -> dict[str, tuple[float, float, float]]:
    """Metric -> (relative difference, value, reference) in the step with the largest difference."""
    differences: dict[str, tuple[float, float, float]] = {}
    for values, expected_values, floor in zip(metrics, reference, floors, strict=True):
        for name, expected in expected_values.items():
            value = values.get(name, math.nan)
            difference = relative(value, expected, floor.get(name, 0.0))
            if name not in differences or difference > differences[name][0]:
                differences[name] = (difference, value, expected)
    return differences


def gradient_differences(gradients: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    """Name -> norm of the difference divided by the norm of the reference's gradient, which has a floor for tiny
    gradients."""
    floor = GRADIENT_FLOOR * max(float(numpy.linalg.norm(gradient)) for gradient in reference.values())
    differences = {}
    for name, expected in reference.items():
        if name not in gradients:
            differences[name] = math.inf
            continue
        difference = float(numpy.linalg.norm(gradients[name] - expected))
        share = difference / max(float(numpy.linalg.norm(expected)), floor, 1e-30)
        differences[name] = math.inf if math.isnan(share) else share
    return differences


def gradient_ratio(gradients: dict[str, Any], reference: dict[str, Any]) -> float:
    """The factor c that minimizes the norm of gradients - c * reference over all parameters (least squares)."""
    inner = sum(float(numpy.vdot(gradients[name], reference[name])) for name in reference if name in gradients)
    square = sum(float(numpy.vdot(gradient, gradient)) for gradient in reference.values())
    return inner / square if square else math.nan


@dataclass(frozen=True)
class LayoutVerdict:
    """One row of the report."""

    layout: str
    processes: int
    agrees: bool | None
    """Whether the layout agrees; None: it was skipped, and `note` has the reason."""
    objective_difference: float = math.nan
    """Largest relative difference of the objective over the steps."""
    metric_difference: float = math.nan
    gradient_difference: float = math.nan
    """Relative difference of the gradient of `worst_parameter`."""
    worst_parameter: str = ""
    worst_metric: str = ""
    """The metric with the largest disagreement, and both values; empty if all agree."""
    gradient_ratio: float = math.nan
    """Least-squares factor between this layout's gradient and the reference's, over all parameters; 1 if they agree."""
    router_loss_difference: float = math.nan
    """Largest difference of the router losses, which are not part of the objective; nan for a dense model."""
    note: str = ""


@dataclass(frozen=True)
class ParityReport:
    """All rows, and notes on the flow itself."""

    flow: str
    rows: list[LayoutVerdict]
    notes: list[str] = field(default_factory=list)
    platform: str = "cpu"

    @property
    def agrees(self) -> bool:
        """Whether every layout that ran agrees."""
        return all(row.agrees is not False for row in self.rows)

    def table(self) -> str:
        """The report as a table for the console."""
        where = "" if self.platform == "cpu" else f", on {self.platform}"
        lines = [f"parity of {self.flow} with one process{where}", ""]
        width = max([14, *(len(row.layout) for row in self.rows)])
        lines.append(f"{'layout':<{width}} {'ranks':>5}  {'objective':>9}  {'metrics':>9}  {'gradients':>9}")
        for row in self.rows:
            mark = {True: "agrees", False: "DISAGREES", None: "left out"}[row.agrees]
            numbers = [row.objective_difference, row.metric_difference, row.gradient_difference]
            shown = "  ".join(f"{'-' if math.isnan(number) else format(number, '.1e'):>9}" for number in numbers)
            routers = "" if math.isnan(row.router_loss_difference) else f"; routers' {row.router_loss_difference:.1e}"
            lines.append(f"{row.layout:<{width}} {row.processes:>5}  {shown}  {mark}{routers}")
            if row.agrees is False and row.worst_parameter:
                lines.append(f"{'':>{width}} worst: {row.worst_parameter}; gradient ratio {row.gradient_ratio:.6g}")
            if row.worst_metric:
                lines.append(f"{'':>{width}} metric {row.worst_metric}")
            if row.note:
                lines.append(f"{'':>{width}} {row.note}")
        lines += ["", *self.notes] if self.notes else []
        ran = [row for row in self.rows if row.agrees is not None]
        right = sum(bool(row.agrees) for row in ran)
        verdict = "" if self.agrees else ": the flow is NOT layout-invariant"
        lines.append(f"{right} of {counted(len(ran), 'layout')} {'agrees' if right == 1 else 'agree'}{verdict}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The report as plain values; nan and infinite numbers are None."""
        rows = [
            {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in row.items()
            }
            for row in map(asdict, self.rows)
        ]
        return {"flow": self.flow, "platform": self.platform, "agrees": self.agrees, "rows": rows, "notes": self.notes}
