"""The law of the loss, as Megatron-Core's schedule takes it.

Megatron-Core divides a three-value loss by its tokens and by the number of micro-batches
(`forward_step_calc_loss`, megatron/core/pipeline_parallel/schedules.py), and DistributedDataParallel averages gradients
over data- and context-parallel ranks. The weights W of the step are known before the forward pass, so each micro-batch
gives `loss_sum * num_microbatches * dp * cp / W` with one token, which leaves exactly loss_sum / W. Megatron-Core's
per-token switch stays off: with it the versions scale auxiliary losses differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.engine.micro_batch import DEFAULT_TERM, MicroBatch
from megatron_wrap.errors import FlowError
from megatron_wrap.flow import LossOutput, MegatronWrapTrainingFlowBase
from megatron_wrap.metrics.metric import MetricSums
from megatron_wrap.parallel.state import ParallelState

OBJECTIVE = "objective/"
"""Prefix of the objective's terms among the metrics: pairs of loss_sum and weight."""


@dataclass(frozen=True)
class _Share:
    """One term of one micro-batch on this rank."""

    loss_sum: Tensor
    weight: float
    """Weight of the micro-batch, on the whole of it."""
    step_weight: float
    """Weight of the whole step, all ranks."""


@dataclass(frozen=True)
class LossLaw:
    """Turns a flow's losses into what the schedule differentiates, and adds up what is to be reported."""

    flow: MegatronWrapTrainingFlowBase
    parallel: ParallelState
    step_weights: Mapping[str, float]
    """Weight of each term over the whole step, all ranks."""
    num_microbatches: int
    """Micro-batches of one replica."""
    sums: MetricSums

    def __call__(self, micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """(loss for the schedule, one token, nothing to store) of one micro-batch on the last stage."""
        one_token = torch.ones((), dtype=torch.int)
        if not micro_batch.counted:
            return _empty(output), one_token, {}
        returned = self.flow.calculate_loss(micro_batch.loss_inputs, output)
        shares, metrics = self._shares(returned, micro_batch)
        coefficients = self.flow.get_loss_coefficients()
        total: Tensor | None = None
        for term, share in shares.items():
            loss_sum = share.loss_sum
            self.sums.add({OBJECTIVE + term: (loss_sum, share.weight / self.parallel.cp.size)}, weight=0.0)
            if torch.is_grad_enabled() and not loss_sum.requires_grad:
                self._refuse_detached(loss_sum, term)
            elif share.step_weight:
                factor = self.num_microbatches * self.parallel.dp_cp.size / share.step_weight
                scaled = loss_sum * (factor * coefficients.get(term, 1.0))
                total = scaled if total is None else total + scaled
        self.sums.add(metrics, weight=next(iter(shares.values())).weight)
        return _empty(output) if total is None else total, one_token, {}

    def _shares(self, returned: Any, micro_batch: MicroBatch) -> tuple[dict[str, _Share], Mapping[str, Any]]:
        name = f"{type(self.flow).__name__}.calculate_loss"
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
            # (loss, metrics): complete and equal on every context-parallel rank, a mean over micro-batches
            loss_sum = _scalar(name, returned[0], DEFAULT_TERM) / self.parallel.cp.size
            share = _Share(loss_sum, weight=1.0, step_weight=float(self.num_microbatches * self.parallel.dp.size))
            return {DEFAULT_TERM: share}, returned[1]
        if not isinstance(returned, LossOutput):
            raise FlowError(
                f"{name} returns {type(returned).__name__}; return LossOutput(loss_sum, metrics), or (loss, metrics) "
                "as older flows do"
            )
        if not micro_batch.says_weight:
            raise FlowError(
                f"{type(self.flow).__name__}: the loss inputs have no 'loss_mask'; define get_loss_weight(loss_inputs) "
                "to say what the loss is a mean over"
            )
        given = returned.loss_sum
        terms = dict(given) if isinstance(given, Mapping) else {DEFAULT_TERM: given}
        if terms.keys() != micro_batch.weights.keys():
            raise FlowError(
                f"{name} gives the terms {sorted(terms)}, get_loss_weight {sorted(micro_batch.weights)}; name the same "
                "terms in both"
            )
        shares = {
            term: _Share(_scalar(name, loss_sum, term), micro_batch.weights[term], self.step_weights[term])
            for term, loss_sum in terms.items()
        }
        return shares, returned.metrics

    def _refuse_detached(self, loss_sum: Tensor, term: str) -> None:
        """A share without a graph is right only where it is empty; then the zero of `_empty` stands for it."""
        if loss_sum.item() != 0.0:
            raise FlowError(
                f"{type(self.flow).__name__}.calculate_loss: the loss{f' {term}' if term else ''} is "
                f"{loss_sum.item():.4g}, but it does not depend on the model's output (detached?), so nothing would "
                "be learned"
            )


def _scalar(name: str, loss_sum: Any, term: str) -> Tensor:
    if not isinstance(loss_sum, Tensor) or loss_sum.numel() != 1:
        found = f"of shape {tuple(loss_sum.shape)}" if isinstance(loss_sum, Tensor) else type(loss_sum).__name__
        raise FlowError(
            f"{name}: the loss{f' {term}' if term else ''} is {found}; give a scalar tensor, the sum over this rank's "
            "tokens or sequences"
        )
    return loss_sum.reshape(())


def _empty(output: Tensor) -> Tensor:
    """A zero that depends on the model's output, so that a rank without any loss takes part in the backward pass."""
    return output.flatten()[:1].float().sum() * 0.0


def objective(metrics: dict[str, float | None], coefficients: Mapping[str, float]) -> float:
    """Take the terms out of the reduced metrics and sum them up; nan where nothing had weight."""
    terms = {name: metrics.pop(name) for name in list(metrics) if name.startswith(OBJECTIVE)}
    counted = [
        coefficients.get(name.removeprefix(OBJECTIVE), 1.0) * mean for name, mean in terms.items() if mean is not None
    ]
    return sum(counted) if counted else float("nan")
