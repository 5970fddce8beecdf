"""How two runs are held against each other: tolerances, relative differences and what rounding does to a number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy

OBJECTIVE_TOLERANCE = 1e-5
"""Largest relative difference of an objective, dense models in fp32."""
METRIC_TOLERANCE = 1e-4
"""The same of a metric, which may be a small difference of large numbers."""
EXPERTS_TOLERANCE = 1e-4
"""The objective's, and ten times that a metric's, for models with experts, whose sums have another order in each
layout."""
GRADIENT_TOLERANCE = 1e-4
"""Largest norm of a gradient's difference over the norm of the gradient."""
GRADIENT_FLOOR = 1e-6
"""Share of the largest parameter gradient's norm below which a gradient counts as rounding."""
DETERMINISM_TOLERANCE = 1e-6
"""Largest relative difference of two runs on one process: kernels of a GPU may add up in any order."""
ROUNDING = 1e-6
"""Relative size of the noise on the model's outputs that shows how much rounding moves an objective or a metric; above
what layouts differ by in fp32, some 1e-7 to 1e-6."""
ROUNDING_MARGIN = 10.0
"""How often what that noise moves may still count as rounding: it is one draw, not a bound."""


def rounding_floor(moved: float, value: float, tolerance: float) -> float:
    """The size below which `tolerance` of a value is less than what rounding may move it by."""
    difference = abs(moved - value)
    return ROUNDING_MARGIN * difference / tolerance if math.isfinite(difference) else 0.0


def relative(value: float, reference: float, floor: float = 0.0) -> float:
    """|value - reference| / max(|reference|, floor); inf where exactly one is not a number, 0 where both are not."""
    if math.isnan(value) or math.isnan(reference):
        return 0.0 if math.isnan(value) and math.isnan(reference) else math.inf
    return abs(value - reference) / max(abs(reference), floor, 1e-8)


def metric_differences(
    found: Sequence[dict[str, float]], reference: Sequence[dict[str, float]], floors: Sequence[dict[str, float]]
) -> dict[str, tuple[float, float, float]]:
    """Metric -> (relative difference, found, reference) of the step in which it differs most."""
    differences: dict[str, tuple[float, float, float]] = {}
    for mine, theirs, floor in zip(found, reference, floors, strict=True):
        for name, expected in theirs.items():
            value = mine.get(name, math.nan)
            difference = relative(value, expected, floor.get(name, 0.0))
            if name not in differences or difference > differences[name][0]:
                differences[name] = (difference, value, expected)
    return differences


def gradient_differences(found: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    """Name -> norm of the difference over the norm of the reference's gradient, or over a floor for tiny ones."""
    floor = GRADIENT_FLOOR * max(float(numpy.linalg.norm(gradient)) for gradient in reference.values())
    differences = {}
    for name, expected in reference.items():
        if name not in found:
            differences[name] = math.inf
            continue
        difference = float(numpy.linalg.norm(found[name] - expected))
        share = difference / max(float(numpy.linalg.norm(expected)), floor, 1e-30)
        differences[name] = math.inf if math.isnan(share) else share
    return differences


def gradient_ratio(found: dict[str, Any], reference: dict[str, Any]) -> float:
    """The factor c for which c * reference is nearest to the found gradient, over all parameters."""
    inner = sum(float(numpy.vdot(found[name], reference[name])) for name in reference if name in found)
    square = sum(float(numpy.vdot(gradient, gradient)) for gradient in reference.values())
    return inner / square if square else math.nan
