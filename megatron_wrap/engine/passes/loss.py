"""Loss normalization, in the form that Megatron-Core's schedule expects.

    objective = sum over terms k of coefficient_k * (sum of loss_sum_k) / (sum of weight_k)

with both sums over all micro-batches and ranks of the step. Megatron-Core divides the loss of a three-value return by
its number of tokens and by the number of micro-batches (`forward_step_calc_loss`,
megatron/core/pipeline_parallel/schedules.py), and the loss is averaged over data- and context-parallel ranks
(engine/setup/build.py). The weight W of the whole step is known before the forward pass, so each micro-batch returns
`loss_sum * num_microbatches * dp * cp / W` with a token count of one; after these divisions its contribution is exactly
loss_sum / W. Megatron-Core's `calculate_per_token_loss` stays off, because its versions then scale auxiliary losses
differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.engine.batches.micro_batch import MicroBatch
from megatron_wrap.errors import FlowError
from megatron_wrap.flow import LossOutput, MegatronWrapTrainingFlowBase
from megatron_wrap.flow.contract.base import STEP_PREFIX
from megatron_wrap.flow.contract.collated import DEFAULT_TERM
from megatron_wrap.flow.shared.cross_entropy import prediction_losses
from megatron_wrap.metrics.metric import MetricSums
from megatron_wrap.metrics.phases import LOSS, phase
from megatron_wrap.ops.deferred_logits import one_token_logits, with_loss_factor

ModelOutput = Tensor | tuple[Tensor, ...]
"""Output of the last pipeline stage: the logits, followed with multi-token prediction by the logits of each of its
layers."""
CalculateLoss = Callable[[dict[str, Tensor], Tensor], Any]
"""(loss inputs, output of the model) -> what a flow's `calculate_loss` returns."""
OBJECTIVE = "objective/"
"""Prefix of the objective's terms among the metrics, each a pair (loss_sum, weight)."""


@dataclass(frozen=True)
class _Term:
    """One term of one micro-batch on this rank."""

    loss_sum: Tensor
    weight: float
    """Weight of the full micro-batch, over all context-parallel ranks."""
    step_weight: float
    """Weight of the whole step, over all ranks."""


@dataclass(frozen=True)
class NormalizedLoss:
    """The loss function of one step. It returns the tensor that the schedule differentiates for each micro-batch, and
    adds the metrics to `sums`."""

    flow: MegatronWrapTrainingFlowBase
    calculate_loss: CalculateLoss
    """The flow's `calculate_loss`, or an observer around it."""
    cp_size: int
    dp_size: int
    """Data-parallel size, without CP."""
    step_weights: Mapping[str, float]
    """Weight of each term over the whole step, over all ranks."""
    num_microbatches: int
    """Number of micro-batches of one replica."""
    sums: MetricSums
    factor_is_known: bool = False
    """Whether the factor of the loss is known before the forward pass, because no dynamic loss scale multiplies it."""

    def __call__(self, micro_batch: MicroBatch, output: ModelOutput) -> Tensor:
        """The scalar to differentiate for one micro-batch, on the last pipeline stage."""
        with phase(LOSS):
            return self._scaled(micro_batch, output)

    def _scaled(self, micro_batch: MicroBatch, output: ModelOutput) -> Tensor:
        logits, *predictions = output if isinstance(output, tuple) else (output,)
        if not micro_batch.counted:
            return _zero_loss(logits, *predictions)
        logits = with_loss_factor(logits, self._loss_factor(micro_batch))
        try:
            returned = self.calculate_loss(micro_batch.loss_inputs, logits)
        except KeyError as error:
            self._check_step_value(str(error.args[0]) if error.args else "")
            raise
        terms, metrics = self._terms(returned, micro_batch)
        weight = next(iter(terms.values())).weight
        if predictions:
            metrics = self._with_predictions(terms, metrics, micro_batch, predictions)
        coefficients = loss_coefficients(self.flow)
        total: Tensor | None = None
        for name, term in terms.items():
            self.sums.add({OBJECTIVE + name: (term.loss_sum, term.weight / self.cp_size)}, weight=0.0)
            if torch.is_grad_enabled() and not term.loss_sum.requires_grad:
                self._check_detached(term.loss_sum, name)
            elif term.step_weight:
                factor = self.num_microbatches * self.dp_size * self.cp_size / term.step_weight
                scaled = term.loss_sum * (factor * coefficients.get(name, 1.0))
                total = scaled if total is None else total + scaled
        self.sums.add(metrics, weight=weight)
        if total is None:
            return _zero_loss(logits, *predictions)
        without_weight = [
            tensor
            for tensor, term in zip(predictions, self._prediction_terms, strict=bool(predictions))
            if not self.step_weights[term]
        ]
        # their layers also take part in the backward pass, for its collectives
        return total + _zero_loss(*without_weight) if without_weight else total

    @property
    def _prediction_terms(self) -> tuple[str, ...]:
        prediction = self.flow.context.prediction
        return () if prediction is None else prediction.terms

    def _with_predictions(
        self, terms: dict[str, _Term], metrics: Mapping[str, Any], micro_batch: MicroBatch, outputs: Sequence[Tensor]
    ) -> Mapping[str, Any]:
        """Add the terms of multi-token prediction, and return the metrics extended by the losses of these terms.
        `nll_loss` is then the loss of the next token alone, unless the flow reports it."""
        added: dict[str, Any] = {}
        if len(terms) == 1:
            (term,) = terms.values()
            added["nll_loss"] = (term.loss_sum.detach(), term.weight / self.cp_size)
        losses = prediction_losses(self.flow, micro_batch.loss_inputs, outputs)
        for name, loss_sum in zip(self._prediction_terms, losses, strict=True):
            weight = micro_batch.weights[name]
            terms[name] = _Term(loss_sum, weight, self.step_weights[name])
            added[f"{name}_loss"] = (loss_sum.detach(), weight / self.cp_size)
        return {**added, **metrics}

    def _loss_factor(self, micro_batch: MicroBatch) -> float | None:
        """Factor of the flow's only `loss_sum` in the tensor that the schedule differentiates, after the schedule's
        divisions; None if it is not known before the forward pass."""
        only_term = micro_batch.has_explicit_weight and micro_batch.weights.keys() == {DEFAULT_TERM}
        if not (self.factor_is_known and only_term and self.step_weights[DEFAULT_TERM]):
            return None
        coefficient = self.flow.get_loss_coefficients().get(DEFAULT_TERM, 1.0)
        return coefficient / self.step_weights[DEFAULT_TERM]

    def _terms(self, returned: Any, micro_batch: MicroBatch) -> tuple[dict[str, _Term], Mapping[str, Any]]:
        name = f"{type(self.flow).__name__}.calculate_loss"
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
            # averaged over micro-batches and replicas alike
            loss, step_weight = _scalar(name, returned[0], DEFAULT_TERM), float(self.num_microbatches * self.dp_size)
            return {DEFAULT_TERM: _Term(loss / self.cp_size, 1.0, step_weight)}, returned[1]
        if not isinstance(returned, LossOutput):
            raise FlowError(
                f"{name} returns {type(returned).__name__}; return LossOutput(loss_sum, metrics), or the older form "
                "(loss, metrics)"
            )
        if not micro_batch.has_explicit_weight:
            raise FlowError(
                f"{type(self.flow).__name__}: the loss inputs have no 'loss_mask'; define "
                "get_loss_weight(loss_inputs), which returns the denominator of the mean, such as a number of tokens"
            )
        returned_sum = returned.loss_sum
        loss_sums = dict(returned_sum) if isinstance(returned_sum, Mapping) else {DEFAULT_TERM: returned_sum}
        weighted = micro_batch.weights.keys() - {*self._prediction_terms}
        if loss_sums.keys() != weighted:
            raise FlowError(
                f"{name} returns the terms {sorted(loss_sums)}, get_loss_weight {sorted(weighted)}; use "
                "the same names in both"
            )
        terms = {
            term: _Term(_scalar(name, loss_sum, term), micro_batch.weights[term], self.step_weights[term])
            for term, loss_sum in loss_sums.items()
        }
        return terms, returned.metrics

    def _check_step_value(self, missing: str) -> None:
        if missing.startswith(STEP_PREFIX) and self.flow.step_values_from is None:
            raise FlowError(
                f"{type(self.flow).__name__}.calculate_loss reads {missing!r}, a statistic of the whole step, but the "
                f'flow declares none; set step_values_from = "inputs" or "outputs" in the class, and define '
                f"calculate_step_values with a result for {missing.removeprefix(STEP_PREFIX)!r}"
            ) from None

    def _check_detached(self, loss_sum: Tensor, term: str) -> None:
        """Refuse a loss without a graph unless its sum is 0 because this rank has no tokens; `_zero_loss` then replaces
        it.

        Raises:
            FlowError: the sum is not 0.
        """
        if loss_sum.item() != 0.0:
            raise FlowError(
                f"{type(self.flow).__name__}.calculate_loss: the loss{f' {term}' if term else ''} is "
                f"{loss_sum.item():.4g}, but it does not depend on the model's output, so it has no gradient; remove "
                "detach() or no_grad() from its computation"
            )


def _scalar(name: str, loss_sum: Any, term: str) -> Tensor:
    if not isinstance(loss_sum, Tensor) or loss_sum.numel() != 1:
        actual = f"of shape {tuple(loss_sum.shape)}" if isinstance(loss_sum, Tensor) else type(loss_sum).__name__
        raise FlowError(
            f"{name}: the loss{f' {term}' if term else ''} is {actual}; return a scalar tensor, the sum over this "
            "rank's tokens or sequences"
        )
    return loss_sum.reshape(())


def _zero_loss(*outputs: Tensor) -> Tensor:
    """A zero that depends on outputs of the model, so that a rank without any loss takes part in the backward pass."""
    zeros = [one_token_logits(output).flatten()[:1].float().sum() * 0.0 for output in outputs]
    return torch.stack(zeros).sum()


def loss_coefficients(flow: MegatronWrapTrainingFlowBase) -> dict[str, float]:
    """Coefficient of each term whose coefficient is not 1: the flow's terms, and those of multi-token prediction."""
    prediction = flow.context.prediction
    return {**flow.get_loss_coefficients(), **({} if prediction is None else prediction.coefficients)}


def take_objective(metrics: dict[str, float | None], coefficients: Mapping[str, float]) -> float:
    """Remove the objective's terms from the reduced metrics and return their weighted sum; nan if all weights are 0."""
    terms = {name: metrics.pop(name) for name in list(metrics) if name.startswith(OBJECTIVE)}
    weighted = [
        coefficients.get(name.removeprefix(OBJECTIVE), 1.0) * mean for name, mean in terms.items() if mean is not None
    ]
    return sum(weighted) if weighted else float("nan")
