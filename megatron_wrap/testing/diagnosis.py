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
    gradients_agree: bool
    worst_metric: str
    """The metric that disagrees most, empty where all agree."""
    metric_ratio: float = math.nan
    """Its value over the reference's."""


def likely_cause(deviation: Deviation, agrees_on_equal_samples: Callable[[], bool]) -> str:
    """One sentence: the pattern and what to do; empty where no known pattern fits.

    Args:
        agrees_on_equal_samples: runs the layout on samples of one length; called only where the answer decides.
    """
    for applies, message in _CAUSES:
        if applies(deviation, agrees_on_equal_samples):
            return message if isinstance(message, str) else message(deviation)
    return ""


def _cause_of_a_metric(deviation: Deviation) -> str:
    name, seen, case = deviation.worst_metric, deviation.found.seen, deviation.case
    if not name:
        return ""
    if name in seen.over_tp:
        return (
            f"likely cause: metric {name!r} differs between tensor-parallel ranks ({seen.over_tp[name]}), so it comes "
            "from a part of the vocabulary; use megatron_wrap.ops"
        )
    kind = seen.metric_kinds.get(name, "")
    if name in seen.over_cp:
        return (
            f"likely cause: metric {name!r} is right for each rank's part of the sequence, but differs between ranks "
            f"({seen.over_cp[name]}); report a pair (sum, weight) of this rank's share, which the framework adds up"
        )
    if case.cp > 1 and kind in ("pair", "total"):
        return (
            f"likely cause: metric {name!r} counts on each context-parallel rank what is complete and equal on all of "
            "them; give this rank's share, self.sequence_mean of it"
        )
    if kind == "number" and case.cp > 1 and abs(deviation.metric_ratio * case.cp - 1) < SAME_FACTOR:
        return (
            f"likely cause: metric {name!r} is a bare number, but a share; a bare number is complete and equal on "
            "every context-parallel rank, a share goes into a pair (sum, weight) or a Total"
        )
    if kind == "number":
        return (
            f"likely cause: metric {name!r} is a bare number, so its mean over micro-batches is weighted by their loss "
            "weight, which is not what it is a mean over; report a pair (sum, weight)"
        )
    return f"metric {name!r} depends on the layout, the loss does not"


def _lost_gradients(deviation: Deviation) -> list[str]:
    """Parameters whose gradient is zero here and not in the reference."""
    reference = deviation.reference.gradients
    return [
        name
        for name, gradient in deviation.found.gradients.items()
        if not gradient.any() and name in reference and reference[name].any()
    ]


def _factor(deviation: Deviation) -> str:
    """What every gradient is multiplied by, in words; empty where it is not one known factor."""
    ratio = deviation.gradient_ratio
    if abs(ratio - 1.0) <= SAME_FACTOR or not _is_multiple(deviation):
        return ""
    return _named_factor(ratio, deviation)


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


_CAUSES: tuple[tuple[Callable[[Deviation, Callable[[], bool]], bool], str | Callable[[Deviation], str]], ...] = (
    (
        lambda d, _: not all(map(math.isfinite, d.found.objectives)),
        "likely cause: nan on a process whose part of the sequence has no loss token; give sums (self.token_mean), "
        "not means over a part",
    ),
    # both agree and no metric deviates: the losses of the experts' routers alone, which no rule names
    (lambda d, _: d.objective_agrees and d.gradients_agree, _cause_of_a_metric),
    (
        lambda d, _: d.found.seen.draws_random,
        "likely cause: calculate_loss draws random numbers, and every layout draws others; draw them in "
        "collate_data_micro_batch, which is seeded alike, and hand them on as a loss input",
    ),
    (
        lambda d, _: d.case.cp > 1 and bool(d.found.undeclared_fields),
        lambda d: (
            f"likely cause: get_fields_and_seqdims does not name {', '.join(d.found.undeclared_fields)}, so context "
            "parallelism does not split what has a sequence dimension"
        ),
    ),
    (
        lambda d, _: bool(_factor(d)),
        lambda d: (
            f"likely cause: every gradient is multiplied by {d.gradient_ratio:.4g} = {_factor(d)}, counted more than "
            "once or divided twice; leave all parallel sizes and the number of micro-batches to the framework"
        ),
    ),
    (
        lambda d, _: bool(_lost_gradients(d)),
        lambda d: (
            f"likely cause: {len(_lost_gradients(d))} parameters with a gradient on one process get none here, such "
            f"as {_lost_gradients(d)[0]}: a share of the loss is detached, or left out on some ranks"
        ),
    ),
    (
        lambda d, _: d.objective_agrees,
        "likely cause: the objective is right and its gradient is not: a sum over ranks whose backward is not its "
        "adjoint; use self.sum_on_cp_group and megatron_wrap.ops, not torch.distributed",
    ),
    (
        lambda d, _: d.case.tp > 1 and d.case.cp == d.case.dp == 1,
        "likely cause: a softmax, maximum or sum over this process's part of the vocabulary only; use "
        "megatron_wrap.ops, which works on vocabulary-parallel logits",
    ),
    (
        lambda d, _: bool(d.case.extra_padding) and d.case.processes == 1,
        "likely cause: padding counts; what stands behind a sample's end is not the flow's: multiply by loss_mask "
        "(self.token_mean does) and count with it",
    ),
    (
        lambda d, _: d.case.dp > 1 and d.case.tp == d.case.cp == d.case.pp == 1,
        "likely cause: only the number of data-parallel replicas has changed: the loss holds a sum or mean over "
        "them (torch.distributed, average_loss_across_dp_ranks), or something that each keeps between its own "
        "micro-batches; leave sums over ranks to the framework, and state out of the loss",
    ),
    (
        lambda _, agrees_on_equal_samples: agrees_on_equal_samples(),
        "likely cause: a mean of means: it agrees when all samples are equally long; return the sum in LossOutput "
        "and what to divide it by in get_loss_weight",
    ),
    (
        lambda d, _: d.case.cp > 1,
        "likely cause: a mean, or another step that is no sum, over this process's part of the sequence; return "
        "the sum, or for a step over whole sequences sum the parts with self.sum_on_cp_group first and share the "
        "result with self.sequence_mean",
    ),
)
"""(whether it applies, what to print) of each known mistake; the first that applies is the likeliest."""
