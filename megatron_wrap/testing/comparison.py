"""Comparison of two runs: tolerances, relative differences, and the effect of rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy

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
