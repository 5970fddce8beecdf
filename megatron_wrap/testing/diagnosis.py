"""Diagnosis of a layout that disagrees: the mistake that most likely explains its numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy

from megatron_wrap.metrics.number_format import counted
from megatron_wrap.testing.layouts import LayoutCase
from megatron_wrap.testing.parity_run import CaseResult

SAME_FACTOR = 1e-3
"""Largest relative norm of the remainder with which a gradient counts as a multiple of another."""

PACKING_CAUSE = (
    "likely cause: a sum, mean or other operation over each row, but a packed micro-batch has all its sequences in one "
    "row; sum over the tokens of each sequence with self.sum_per_sequence(per_token, loss_inputs)"
)
_MEAN_OF_TOKENS = (
    "for a mean over tokens write `return float(loss_inputs['loss_mask'].sum())` in get_loss_weight, or delete "
    "get_loss_weight, because that is its default"
)


@dataclass(frozen=True)
class Deviation:
    """Findings about a layout that disagrees."""

    case: LayoutCase
    result: CaseResult
    reference: CaseResult
    gradient_ratio: float
    objective_agrees: bool
    gradients_agree: bool
    worst_metric: str
    """The metric with the largest difference; empty if all agree."""
    metric_ratio: float = math.nan
    """Value of `worst_metric` divided by the reference's."""


def likely_cause(deviation: Deviation, ratio_on_equal_samples: Callable[[], float]) -> str:
    """One sentence with the likely mistake and its fix; empty if no known pattern fits.

    Args:
        ratio_on_equal_samples: runs the layout on samples of equal length, and returns the factor between its gradient
            and the reference's, nan if there is none; called only if the result is needed.
    """
    ratio_on_equal_samples = functools.cache(ratio_on_equal_samples)
    for applies, message in _CAUSES:
        if applies(deviation, ratio_on_equal_samples):
            return message if isinstance(message, str) else message(deviation)
    return ""


def _cause_of_a_metric(deviation: Deviation) -> str:
    name, seen, case = deviation.worst_metric, deviation.result.seen, deviation.case
    if not name:
        return ""
    if name in seen.over_tp:
        return (
            f"likely cause: metric {name!r} differs between tensor-parallel ranks ({seen.over_tp[name]}), so it is "
            f"computed from a part of the vocabulary; {seen.vocabulary_calls or 'use megatron_wrap.ops'}"
        )
    kind = seen.metric_kinds.get(name, "")
    if name in seen.over_cp:
        return (
            f"likely cause: metric {name!r} is computed from each context-parallel rank's part of the sequence and "
            f"differs between ranks ({seen.over_cp[name]}); report this rank's share as a pair (sum, weight), which "
            "the framework sums"
        )
    if case.packing and kind in ("pair", "total"):
        return f"metric {name!r}: {PACKING_CAUSE}"
    if case.cp > 1 and kind in ("pair", "total"):
        return (
            f"likely cause: metric {name!r} is complete and equal on every context-parallel rank, so it is counted "
            "once for each; report this rank's share, self.sequence_mean of it"
        )
    if kind == "number" and case.cp > 1 and abs(deviation.metric_ratio * case.cp - 1) < SAME_FACTOR:
        return (
            f"likely cause: metric {name!r} is a bare number, but it is this rank's share; a bare number must be "
            "complete and equal on every context-parallel rank, so report a share as a pair (sum, weight) or a Total"
        )
    if kind == "number":
        return (
            f"likely cause: metric {name!r} is a bare number, so it is averaged over micro-batches with their loss "
            "weights, which are not the metric's weights; report a pair (sum, weight)"
        )
    return f"metric {name!r} depends on the layout, but the loss does not"


def _lost_gradients(deviation: Deviation) -> list[str]:
    """Names of parameters whose gradient is zero on this layout but not in the reference."""
    reference = deviation.reference.gradients
    return [
        name
        for name, gradient in deviation.result.gradients.items()
        if not gradient.any() and name in reference and reference[name].any()
    ]


def _factor(deviation: Deviation) -> str:
    """Description of the factor by which all gradients are multiplied; empty if it is no known factor."""
    case, ratio = deviation.case, deviation.gradient_ratio
    if abs(ratio - 1.0) <= SAME_FACTOR or not _is_multiple(deviation):
        return ""
    sizes = {
        "the context-parallel size": case.cp,
        "the tensor-parallel size": case.tp,
        "the data-parallel size": case.dp,
        "the change in the number of micro-batches": _cuts(deviation),
    }
    candidates = [named for name, size in sizes.items() for named in ((name, size), (f"1 / {name}", 1 / size))]
    return " or ".join(name for name, value in candidates if value != 1 and abs(ratio / value - 1) < SAME_FACTOR)


def _is_multiple(deviation: Deviation) -> bool:
    gradients, reference, ratio = deviation.result.gradients, deviation.reference.gradients, deviation.gradient_ratio
    rest = sum(float(numpy.square(gradients[name] - ratio * reference[name]).sum()) for name in reference)
    whole = sum(float(numpy.square(gradients[name]).sum()) for name in reference)
    return whole > 0 and rest <= SAME_FACTOR**2 * whole


def _cuts(deviation: Deviation) -> float:
    """Number of the layout's micro-batches divided by the reference's."""
    return deviation.result.num_microbatches / deviation.reference.num_microbatches


def _equal(value: float, other: float) -> bool:
    return abs(value / other - 1) <= SAME_FACTOR


def _divides_by_one(deviation: Deviation) -> bool:
    """Whether the weight of each micro-batch is 1, and the layout divides samples or sequences in another way."""
    case = deviation.case
    divides = _cuts(deviation) != 1 or case.cp > 1 or case.packing or case.token_budget
    return deviation.reference.weight_is_one and divides


_CAUSES: tuple[tuple[Callable[[Deviation, Callable[[], float]], bool], str | Callable[[Deviation], str]], ...] = (
    (
        lambda d, _: not all(map(math.isfinite, d.result.objectives)),
        "likely cause: nan on a process or in a micro-batch without a loss token; return sums (self.token_mean), not "
        "means over a part",
    ),
    # if both agree and no metric differs, only router losses differ, for which there is no rule
    (lambda d, _: d.objective_agrees and d.gradients_agree, _cause_of_a_metric),
    (
        lambda d, _: d.result.seen.draws_random,
        "likely cause: calculate_loss draws random numbers, which differ between layouts; draw them in "
        "collate_data_micro_batch, which is seeded equally, and return them as a loss input",
    ),
    (
        lambda d, _: d.case.cp > 1 and bool(d.result.undeclared_fields),
        lambda d: (
            f"likely cause: get_fields_and_seqdims does not list {', '.join(d.result.undeclared_fields)}, so context "
            "parallelism does not split it; list every field with a sequence dimension"
        ),
    ),
    (
        lambda d, _: d.case.tp > 1 and bool(d.result.seen.vocabulary_calls),
        lambda d: f"likely cause: {d.result.seen.vocabulary_calls}",
    ),
    (
        lambda d, _: _divides_by_one(d) and _is_multiple(d) and _equal(d.gradient_ratio, 1 / _cuts(d)),
        f"likely cause: calculate_loss returns a sum, and get_loss_weight returns 1 for each micro-batch, so the loss "
        f"depends on the number of samples in one; {_MEAN_OF_TOKENS}",
    ),
    (
        lambda d, _: _divides_by_one(d),
        "likely cause: a mean of means: calculate_loss divides by a number of tokens or samples of its part, and "
        "get_loss_weight returns 1 for each micro-batch; return the sum, "
        f"LossOutput(self.token_mean(per_token, mask)); {_MEAN_OF_TOKENS}",
    ),
    (
        lambda d, _: bool(_factor(d)),
        lambda d: (
            f"likely cause: every gradient is multiplied by {d.gradient_ratio:.4g} = {_factor(d)}, so the loss is "
            "summed more than once or divided twice; leave parallel sizes and the number of micro-batches to the "
            "framework"
        ),
    ),
    (
        lambda d, _: bool(_lost_gradients(d)),
        lambda d: (
            f"likely cause: {counted(len(_lost_gradients(d)), 'parameter')} with a gradient on one process and none on "
            f"this layout, such as {_lost_gradients(d)[0]}: a share of the loss is detached or missing on some ranks"
        ),
    ),
    (
        lambda d, _: d.objective_agrees,
        "likely cause: the objective is correct but its gradient is not: the backward of a sum over ranks is not its "
        "adjoint; use self.sum_on_cp_group and megatron_wrap.ops, not torch.distributed",
    ),
    # samples of equal length agree if it is a mean of means
    (lambda d, ratio: d.case.packing and not _equal(ratio(), 1), PACKING_CAUSE),
    (
        lambda d, _: d.case.tp > 1 and d.case.cp == d.case.dp == 1,
        "likely cause: a softmax, maximum or sum over this process's part of the vocabulary only; use "
        "megatron_wrap.ops, which works on vocabulary-parallel logits",
    ),
    (
        lambda d, _: d.case.extra_padding > 0 and d.case.processes == 1,
        "likely cause: padding is counted: positions after a sample's end enter the loss or the weight; multiply both "
        "by loss_mask (self.token_mean does)",
    ),
    (
        lambda d, _: d.case.dp > 1 and d.case.tp == d.case.cp == d.case.pp == 1,
        "likely cause: the loss depends on the number of data-parallel replicas: it contains a sum or mean over them "
        "(torch.distributed, average_loss_across_dp_ranks), or state that each replica keeps between micro-batches; "
        "leave sums over ranks to the framework, and keep no state in the loss",
    ),
    (
        lambda d, ratio: _cuts(d) != 1 and _equal(ratio(), _cuts(d)),
        "likely cause: divided twice: calculate_loss divides by a number of tokens or samples of its micro-batch, and "
        "the framework divides by get_loss_weight; return the sum, LossOutput(self.token_mean(per_token, mask))",
    ),
    (
        lambda _, ratio: _equal(ratio(), 1),
        "likely cause: a mean of means, because the layout agrees when all samples have the same length; return the "
        "sum in LossOutput and the number to divide by in get_loss_weight",
    ),
    (
        lambda d, _: d.case.cp > 1,
        "likely cause: a mean, or another operation that is not a sum, over this process's part of the sequence; "
        "return the sum, LossOutput(self.token_mean(per_token, mask)), or for an operation on whole sequences sum the "
        "parts with self.sum_on_cp_group first and reduce the result with self.sequence_mean",
    ),
)
"""(whether it applies, message) for each known mistake, the most specific first."""
