"""From the numbers of a layout that disagrees to the mistake that most likely made them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy

from megatron_wrap.testing.layouts import LayoutCase
from megatron_wrap.testing.parity_run import CaseResult

SAME_FACTOR = 1e-3
"""A gradient is a multiple of another where what is left of it, over its norm, is smaller than this."""


@dataclass(frozen=True)
class Deviation:
    """What is known of a layout that disagrees."""

    case: LayoutCase
    found: CaseResult
    reference: CaseResult
    gradient_ratio: float
    objective_agrees: bool
    metric_difference: float


def likely_cause(deviation: Deviation, agrees_on_equal_samples: Callable[[], bool]) -> str:
    """One sentence: the pattern and the way out; empty where no known pattern fits."""
    case, found = deviation.case, deviation.found
    if not all(map(math.isfinite, found.objectives)):
        return (
            "likely cause: nan on a process whose part of the sequence has no loss token; give sums (self.token_mean), "
            "not means over a part"
        )
    if case.cp > 1 and found.undeclared_fields:
        return (
            f"likely cause: get_fields_and_seqdims does not name {', '.join(found.undeclared_fields)}, so context "
            "parallelism does not split what has a sequence dimension"
        )
    ratio = deviation.gradient_ratio
    if abs(ratio - 1.0) > SAME_FACTOR and _is_multiple(deviation):
        factor = _named_factor(ratio, deviation)
        if factor:
            return (
                f"likely cause: every gradient is multiplied by {ratio:.4g} = {factor}, counted more than once or "
                "divided twice; leave all parallel sizes and the number of micro-batches to the framework"
            )
    if deviation.objective_agrees and _gradients_differ(deviation):
        return (
            "likely cause: the objective is right and its gradient is not: a sum over ranks whose backward is not its "
            "adjoint; use self.sum_on_cp_group and megatron_wrap.ops, not torch.distributed"
        )
    if case.tp > 1 and case.cp == case.dp == 1:
        return (
            "likely cause: a softmax, maximum or sum over this process's part of the vocabulary only; use "
            "megatron_wrap.ops, which works on vocabulary-parallel logits"
        )
    if agrees_on_equal_samples():
        return (
            "likely cause: a mean of means: it agrees when all samples are equally long; return the sum in LossOutput "
            "and what to divide it by in get_loss_weight"
        )
    if case.cp > 1:
        return (
            "likely cause: a step over whole sequences on a part of each; sum the parts with self.sum_on_cp_group "
            "before a non-linear step, and share the result with self.sequence_mean"
        )
    return ""


def _gradients_differ(deviation: Deviation) -> bool:
    found, reference = deviation.found.gradients, deviation.reference.gradients
    difference = sum(float(numpy.square(found[name] - reference[name]).sum()) for name in reference)
    return difference > 1e-8 * sum(float(numpy.square(gradient).sum()) for gradient in reference.values())


def _is_multiple(deviation: Deviation) -> bool:
    found, reference, ratio = deviation.found.gradients, deviation.reference.gradients, deviation.gradient_ratio
    rest = sum(float(numpy.square(found[name] - ratio * reference[name]).sum()) for name in reference)
    whole = sum(float(numpy.square(found[name]).sum()) for name in reference)
    return whole > 0 and rest <= SAME_FACTOR**2 * whole


def _named_factor(ratio: float, deviation: Deviation) -> str:
    case = deviation.case
    cuts = deviation.found.num_microbatches / deviation.reference.num_microbatches
    candidates = {
        "the context-parallel size": case.cp,
        "1 / the context-parallel size": 1 / case.cp,
        "the tensor-parallel size": case.tp,
        "1 / the tensor-parallel size": 1 / case.tp,
        "the data-parallel size": case.dp,
        "1 / the data-parallel size": 1 / case.dp,
        "the change in the number of micro-batches": cuts,
        "1 / the change in the number of micro-batches": 1 / cuts,
    }
    fitting = [name for name, value in candidates.items() if value != 1 and abs(ratio / value - 1) < SAME_FACTOR]
    return " or ".join(fitting)
