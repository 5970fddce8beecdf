"""Loss normalization, in the form that Megatron-Core's schedule expects, and the reduction of metrics over all ranks.

    objective = sum over terms k of coefficient_k * (sum of loss_sum_k) / (sum of weight_k)

with both sums over all micro-batches and ranks of the step. Megatron-Core divides the loss of a three-value return by
its number of tokens and by the number of micro-batches (`forward_step_calc_loss`,
megatron/core/pipeline_parallel/schedules.py), and the loss is averaged over data- and context-parallel ranks
(setup/model_chunks.py). The weight W of the whole step is known before the forward pass, so each micro-batch returns
`loss_sum * num_microbatches * dp * cp / W` with a token count of one; after these divisions its contribution is exactly
loss_sum / W. Megatron-Core's `calculate_per_token_loss` stays off, because its versions then scale auxiliary losses
differently.

Metrics are reduced in one all-reduce, and one more if a flow reports extremes.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.engine.batches.micro_batch import MicroBatch
from megatron_wrap.errors import FlowError
from megatron_wrap.flow import LossOutput, MegatronWrapTrainingFlowBase
from megatron_wrap.flow.contract.base import STEP_PREFIX
from megatron_wrap.flow.contract.collated import DEFAULT_TERM
from megatron_wrap.flow.shared.cross_entropy import prediction_losses
from megatron_wrap.metrics.metric import SUMMANDS, MetricSums, read_reduced
from megatron_wrap.metrics.phases import LOSS, phase
from megatron_wrap.ops.deferred_logits import one_token_logits, with_loss_factor
from megatron_wrap.parallel.collectives import gather_objects, reduce_in_place
from megatron_wrap.parallel.state import ParallelState
from megatron_wrap.platform.base.read_on_host import start_host_copy

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
        total: Tensor | None = None
        summed: dict[str, Any] = {}
        for name, term in terms.items():
            summed[OBJECTIVE + name] = (term.loss_sum, term.weight / self.cp_size)
            if torch.is_grad_enabled() and not term.loss_sum.requires_grad:
                self._check_detached(term.loss_sum, name)
            elif term.step_weight:
                factor = self.num_microbatches * self.dp_size * self.cp_size / term.step_weight
                scaled = term.loss_sum * (factor * self._coefficients.get(name, 1.0))
                total = scaled if total is None else total + scaled
        self.sums.add({**summed, **metrics}, weight=weight)
        if total is None:
            return _zero_loss(logits, *predictions)
        without_weight = [
            tensor
            for tensor, term in zip(predictions, self._prediction_terms, strict=bool(predictions))
            if not self.step_weights[term]
        ]
        # their layers also take part in the backward pass, for its collectives
        return total + _zero_loss(*without_weight) if without_weight else total

    @functools.cached_property
    def _coefficients(self) -> dict[str, float]:
        return loss_coefficients(self.flow)

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
        return self._coefficients.get(DEFAULT_TERM, 1.0) / self.step_weights[DEFAULT_TERM]

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


@dataclass(frozen=True)
class ReducedMetrics:
    """Metrics of a step or an evaluation, the same on every rank."""

    loss: float
    """The objective; nan if all weights are 0."""
    flow_metrics: dict[str, float]
    sums: dict[str, float]
    """Further values of the engine, such as router losses, summed over all ranks."""
    copied: tuple[float, ...] = ()
    """Values of the tensors that were copied to the host without a reduction."""


class StartedReduction:
    """A reduction that is queued on the device, followed by the copy of its result to the host.

    Args:
        vector: fp64; the numbers of the metrics, of `values`, and of what is only copied, after their reduction.
        known: name of each metric and its kind.
        values: names of the further values.
        coefficients: of the loss terms.
        host_waits: set when the host waits.
    """

    def __init__(
        self,
        vector: Tensor,
        known: Mapping[str, str],
        values: Sequence[str],
        coefficients: Mapping[str, float],
        host_waits: threading.Event,
    ) -> None:
        self._vector, self._known, self._values, self._coefficients = vector, known, values, coefficients
        self._host_waits, self._wait = host_waits, start_host_copy(vector)

    def loss_is_finite(self) -> Tensor:
        """Whether the objective will be a finite number, bool with one element on the device."""
        terms = sum(name.startswith(OBJECTIVE) for name in self._known)  # pairs, one after the other: names are sorted
        begin = sum(SUMMANDS[kind] for name, kind in self._known.items() if name < OBJECTIVE)
        sums, weights = self._vector[begin:][: 2 * terms].view(-1, 2).unbind(1)
        counted = weights != 0
        is_finite = ((sums / weights).isfinite() | ~counted).all() & counted.any()
        return is_finite if all(map(math.isfinite, self._coefficients.values())) else torch.zeros_like(is_finite)

    def finish(self, meanwhile: Callable[[], None] = lambda: None) -> ReducedMetrics:
        """Wait for the device.

        Args:
            meanwhile: called when the host would begin to wait.
        """
        self._host_waits.set()
        meanwhile()
        read: list[float] = self._wait().tolist()
        first = sum(SUMMANDS[kind] for kind in self._known.values())
        summed = first + len(self._values)
        after = summed + sum(1 for kind in self._known.values() if SUMMANDS[kind] == 0)
        values = read_reduced(self._known, read[:first], read[summed:after])
        loss = take_objective(values, self._coefficients)
        values.pop("loss", None)  # older flows report the loss among their metrics; the objective replaces it
        return ReducedMetrics(
            loss=loss,
            flow_metrics={name: math.nan if value is None else value for name, value in values.items()},
            sums=dict(zip(self._values, read[first:summed], strict=True)),
            copied=tuple(read[after:]),
        )


class MetricReduction:
    """Sums metrics over ranks. All ranks exchange the names of the metrics in the first step of each kind, because only
    the last pipeline stage knows them.

    Args:
        flow: reports the metrics and defines the loss coefficients.
    """

    def __init__(self, flow: MegatronWrapTrainingFlowBase, parallel: ParallelState, device: torch.device) -> None:
        self._flow = flow
        self._parallel = parallel
        self._device = device
        self._known: dict[str, dict[str, str]] = {}
        """Kind of step -> name of each metric, sorted, and its kind."""
        self.host_waits = threading.Event()
        """Event that is set when this process has queued all work of a step and waits for the device. Other threads
        should work then: earlier they would hold Python's lock, which the queueing needs."""

    def start(
        self,
        sums: MetricSums,
        kind: str,
        local_values: Mapping[str, Tensor] = MappingProxyType({}),
        copied: Sequence[Tensor] = (),
    ) -> StartedReduction:
        """Queue the reduction over ranks and the copy of its result to the host. The host waits for it in `finish` of
        the result, the only wait in a step. Collective.

        Args:
            sums: of the flow's metrics; only those of the last pipeline stage's tensor-parallel rank 0 are added.
            kind: "train" or "evaluate(NAME)".
            local_values: further values, of which each rank holds one summand; the same names on all ranks.
            copied: tensors of one element on the device whose values this rank needs at the same time.

        Raises:
            FlowError: a rank reports a metric that it did not report in its first step of this kind.
        """
        known = self._metric_kinds(sums, kind)
        local = sums if self._parallel.counts_once else MetricSums(self._device)
        numbers, extremes = local.summands(known), local.extremes(known)
        numbers += local_values.values()
        everything = (*numbers, *extremes, *copied)
        vector = torch.zeros(0, dtype=torch.float64, device=self._device)
        if everything:
            vector = torch.stack([number.double().reshape(()) for number in everything])
        if numbers:  # the same conditions on all ranks
            reduce_in_place(vector[: len(numbers)], "sum", self._parallel.world.group)
        if extremes:
            reduce_in_place(vector[len(numbers) :][: len(extremes)], "max", self._parallel.world.group)
        return StartedReduction(vector, known, tuple(local_values), loss_coefficients(self._flow), self.host_waits)

    def _metric_kinds(self, sums: MetricSums, kind: str) -> dict[str, str]:
        if kind not in self._known:
            everywhere: dict[str, str] = {}
            for of_rank in gather_objects(sums.kinds):
                everywhere |= of_rank
            self._known[kind] = dict(sorted(everywhere.items()))
        known = self._known[kind]
        new = sums.kinds.keys() - known.keys()
        if new:
            raise FlowError(
                f"{type(self._flow).__name__}: metrics {sorted(new)} were not reported in the first step; report the "
                "same names in every micro-batch"
            )
        return known
