"""One optimizer step from top to bottom, in one part or in several. Start reading the code here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.engine.bad_steps import record_loss, refuse_or_skip, refuse_or_warn_untrained, spike
from megatron_wrap.engine.batches.micro_batch import MicroBatch, ReplicaMicroBatches, count_step
from megatron_wrap.engine.batches.micro_batching import check_parts, has_step_samples
from megatron_wrap.engine.memory import memory_advice
from megatron_wrap.engine.passes.loss import ReducedMetrics
from megatron_wrap.engine.passes.pipeline_schedule import deferred_reduction
from megatron_wrap.engine.router_losses import record_expert_load, reset_router_losses, router_losses
from megatron_wrap.engine.state.state import OpenStep, RandomStates, StepReport, StepWeights, TrainingState, Update
from megatron_wrap.engine.step_inputs import (
    localized,
    loss_micro_batches,
    normalized_loss,
    replica_micro_batches,
    step_statistics,
    with_statistics,
)
from megatron_wrap.engine.step_metrics import step_metrics
from megatron_wrap.errors import DataError, TrainingError
from megatron_wrap.metrics.metric import MetricSums
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.metrics.phases import DATA, GRADIENTS, OPTIMIZER, doing, phase
from megatron_wrap.model.chunks import restored_on_error, router_biases
from megatron_wrap.platform.megatron_core.first_gradients import zero_stale
from megatron_wrap.utils.garbage import collect_delayed, delayed_collection

_STOP = "stop_requests"


# ---- a step in one part


@delayed_collection()
def train_step(state: TrainingState, batch: Sequence[Any] | None) -> StepReport:
    """Train on one global batch: split, count, forward and backward, reduce, update, report. Collective.

    Args:
        batch: `state.global_batch_size` samples on every rank, or on global rank 0 alone.

    Returns:
        The same report on every rank.

    Raises:
        DataError, FlowError: the batch or the flow is wrong.
        TrainingError: on every rank, if the loss or the gradient norm is not finite or the loss is a spike, and such
            steps are not skipped, or no token of the last batches is trained, or a step in parts is open. Parameters,
            optimizer, learning rate and counters are unchanged.
    """
    started = time.perf_counter()
    if state.open_step is not None:
        raise TrainingError("wrap.train: a step in parts is open; call wrap.optimizer_step first")
    with phase(DATA):
        batch = state.sharing.share(None if batch is None else state.with_cursor(batch), "train")
    by_tokens = state.config.train.global_batch_tokens is not None
    _check_size(len(batch), state.global_batch_size, by_tokens, "wrap.train takes a batch")
    step, micro_batches = _begin_whole(state, batch, started)
    return _finish_step(state, step, lambda: _gradients_of_whole(state, step, micro_batches))


def gradients_of_batch(state: TrainingState, batch: Sequence[Any]) -> ReplicaMicroBatches:
    """The first half of `train_step`: compute the gradients of a global batch into the buffers without an update.
    For checks that inspect gradients. Collective.

    Returns:
        This replica's micro-batches, before padding and splitting.
    """
    step, micro_batches = _begin_whole(state, batch, time.perf_counter())
    _gradients_of_whole(state, step, micro_batches)
    return micro_batches


def _begin_whole(state: TrainingState, batch: Sequence[Any], started: float) -> tuple[OpenStep, ReplicaMicroBatches]:
    """Begin a step of one part, with its loss weights. Collective over replicas."""
    micro_batches = replica_micro_batches(state, batch)
    counts = count_step(state.flow, micro_batches.training, state.parallel.dp_on_host)
    return _begin_step(state, StepWeights(counts, len(micro_batches.training)), batch, started), micro_batches


def _gradients_of_whole(state: TrainingState, step: OpenStep, micro_batches: ReplicaMicroBatches) -> None:
    """Compute the gradients of the whole batch into the gradient buffers, reduced over all ranks. Collective."""
    [local], _ = loss_micro_batches(state, micro_batches, len(step.samples))
    _add_gradients(state, step, local)
    if not step.weights.counts.is_trained:
        for chunk in state.chunks:
            zero_stale(chunk.parameters())


# ---- a step in several parts, equal to `train_step` of the whole batch


def count_weights(state: TrainingState, batches: Sequence[Sequence[Any]] | None) -> StepWeights:
    """Loss weights, and the statistics that the flow declares, of a step whose batch is passed in parts. Collective.

    Args:
        batches: the parts in their order, `state.global_batch_size` samples together; on every rank, or on global rank
            0 alone.

    Raises:
        DataError, FlowError: a part or the flow is wrong.
    """
    with phase(DATA):
        batches = state.sharing.share(batches, "count_weights")
    if not batches or not all(len(batch) for batch in batches):
        raise DataError("wrap.count_weights takes a list of batches, each with at least one sample")
    sizes = tuple(map(len, batches))
    check_parts(sizes, state.micro_batching, state.flow.micro_batch_size, state.parallel.dp.size)
    samples = [sample for batch in batches for sample in batch]
    by_tokens = state.config.train.global_batch_tokens is not None
    _check_size(len(samples), state.global_batch_size, by_tokens, "wrap.count_weights takes the parts of a batch")
    starts = accumulate(sizes, initial=0)
    parts = [replica_micro_batches(state, batch, start).training for batch, start in zip(batches, starts, strict=False)]
    training = [micro_batch for part in parts for micro_batch in part]
    counts = count_step(state.flow, training, state.parallel.dp_on_host)
    statistics: dict[str, Tensor] = {}
    if state.flow.step_values_from is not None:
        # the flow chooses samples for its statistics among those of the whole step
        chosen = replica_micro_batches(state, samples).statistics if has_step_samples(state.flow) else ()
        groups = [localized(state, run) for run in ([chosen] if chosen else parts)]
        statistics = step_statistics(state, training, groups, len(samples))
    return StepWeights(counts, len(training), statistics, sizes, state.progress.iteration)


@delayed_collection()
def forward_backward(state: TrainingState, batch: Sequence[Any] | None, weights: StepWeights) -> None:
    """Add the gradients of the next part of a step, without a reduction over replicas. Collective over the replica.

    Args:
        batch: the next of the parts that were passed to `count_weights`.
        weights: from `count_weights`.

    Raises:
        TrainingError: the weights are of another step. DataError: the part has another size. After an error the step
            must begin again.
    """
    started = time.perf_counter()
    step, state.open_step = state.open_step, None  # stays so after an error
    _check_weights(weights, step, state.progress.iteration)
    with phase(DATA):
        batch = state.sharing.share(batch, "forward_backward")
    part = 0 if step is None else step.parts
    if part >= len(weights.sizes) or len(batch) != weights.sizes[part]:
        raise DataError(
            f"wrap.forward_backward: part {part + 1} of the step has {counted(len(batch), 'sample')}, but "
            f"wrap.count_weights got parts of {list(weights.sizes)}; pass the same parts in the same order"
        )
    if step is None:
        step = _begin_step(state, weights, [], started)
    micro_batches = replica_micro_batches(state, batch, len(step.samples)).training
    local = with_statistics(localized(state, micro_batches), weights.statistics)
    with deferred_reduction(state.chunks, state.transformer_config, len(local) / weights.num_microbatches):
        _add_gradients(state, step, local)
    step.samples = [*step.samples, *batch]
    step.parts += 1
    state.open_step = step


@delayed_collection()
def optimizer_step(state: TrainingState) -> StepReport:
    """Reduce the gradients of all parts over replicas, and update. Collective.

    Returns:
        The report of `train_step`; its time begins with the first part.

    Raises:
        TrainingError: a part is missing; or as `train_step`.
    """
    step = state.open_step
    if step is None:
        raise TrainingError("wrap.optimizer_step: there are no gradients; call wrap.forward_backward first")
    missing = len(step.weights.sizes) - step.parts
    if missing:
        raise TrainingError(
            f"wrap.optimizer_step: {counted(missing, 'part')} of {len(step.weights.sizes)} missing in the step; call "
            "wrap.forward_backward for each"
        )
    state.open_step = None

    def reduce_gradients() -> None:
        """Complete the gradients as the schedule does after its last micro-batch (schedules.py,
        finalize_model_grads_func)."""
        if step.weights.counts.is_trained:
            for chunk in state.chunks if state.config.ddp.overlap_grad_reduce else ():
                chunk.start_grad_sync()
            state.transformer_config.finalize_model_grads_func(state.chunks, None)

    return _finish_step(state, step, reduce_gradients)


# ---- what both have in common


def _begin_step(state: TrainingState, weights: StepWeights, samples: Sequence[Any], started: float) -> OpenStep:
    """Zero the gradients and the routers' losses.

    Args:
        samples: of the global batch, or [] if they follow in parts.
        started: time.perf_counter() at the beginning of the step.
    """
    if state.config.arch.num_experts is not None:
        reset_router_losses(state.config.arch)
        if state.config.logger.add_expert_load_to_metrics:
            record_expert_load(state.chunks)
    state.zero_gradients()
    device = state.platform.device
    checked = state.config.train.check_for_nan_in_loss_and_grad
    return OpenStep(weights, MetricSums(device), started, samples, RandomStates.now(device) if checked else None)


def _add_gradients(state: TrainingState, step: OpenStep, local: list[MicroBatch]) -> None:
    """Run forward and backward: add the gradient of the micro-batches' share of the objective to the gradient buffers,
    reduced over all ranks unless within `deferred_reduction`. If the step trains no token, only the metrics are
    computed. Collective.

    Args:
        local: this process's micro-batches, as the loss takes them.
    """
    loss = normalized_loss(state, step.weights.counts.weights, step.weights.num_microbatches, step.sums)
    if not step.weights.counts.is_trained:  # the same on all ranks
        with state.evaluation_mode():
            state.pipeline_schedule.forward(state.chunks, local, loss, with_predictions=True)
        return
    try:
        with doing(GRADIENTS):
            state.pipeline_schedule.forward_backward(state.chunks, local, loss)
    except torch.OutOfMemoryError as error:
        advice = memory_advice(state.config, state.parallel, state.chunks, state.shape.vocab_size)
        raise torch.OutOfMemoryError(f"{error}\n{advice}") from error


def _finish_step(state: TrainingState, step: OpenStep, gradients: Callable[[], None]) -> StepReport:
    """Complete the gradients, reduce the metrics, update the parameters, advance learning rate and counters, and
    report. Collective.

    Args:
        gradients: computes the gradients into the buffers, or completes them: reduced over all ranks afterwards.

    Raises:
        TrainingError: as `train_step`.
    """
    progress, counts, settings = state.progress, step.weights.counts, state.config.bad_steps
    learning_rate, expected_size = state.lr_scheduler.get_lr({}), state.global_batch_size
    # Megatron-Core moves the routers' biases at the end of the backward pass (finalize_model_grads.py)
    biases = [] if state.config.arch.num_experts is None else router_biases(state.chunks)
    with restored_on_error(biases) if biases else nullcontext(lambda: None) as restore_biases:
        gradients()
        state.steps_without_weight = 0 if counts.is_trained else state.steps_without_weight + 1
        if not counts.is_trained:
            refuse_or_warn_untrained(state.steps_without_weight, settings.max_without_loss, progress.iteration + 1)
        reduced, update = _reduce_and_update(state, step)
        stop_requested = reduced.sums.pop(_STOP) > 0
        if update.is_bad:
            refuse_or_skip(state, step, reduced.loss, update.grad_norm)
            restore_biases()

        progress.iteration += 1
        progress.consume(state.with_cursor(step.samples))
        state.offered = None
        progress.consumed_tokens += counts.tokens
        progress.skipped_iterations += not update.applied
        if update.applied:
            state.bad_steps_in_a_row = 0
            if settings.spike_threshold is not None:
                record_loss(progress.recent_losses, reduced.loss, settings.spike_window)
            state.lr_scheduler.step(increment=expected_size)  # it counts steps, whatever the number of samples
        metrics = step_metrics(state, reduced, step, update, learning_rate)
        flow_metrics = tuple(reduced.flow_metrics)
        return StepReport(
            progress.iteration, metrics, not update.applied, flow_metrics, stop_requested, counts.is_trained
        )


def _reduce_and_update(state: TrainingState, step: OpenStep) -> tuple[ReducedMetrics, Update]:
    """Reduce the metrics over all ranks, and update the parameters if the step is trained and not bad. Where no value
    is needed on the host first, the update is queued before the host waits for the metrics, and the device omits it if
    the loss is not finite. Collective."""
    arch, device, weights = state.config.arch, state.platform.device, step.weights
    is_trained, settings = weights.counts.is_trained, state.config.bad_steps
    is_checked, detects_spikes = state.config.train.check_for_nan_in_loss_and_grad, settings.spike_threshold is not None
    square_sums: list[Tensor] = []
    if is_trained:
        with phase(OPTIMIZER):
            square_sums = state.optimizer.prepare(device)
    summands: dict[str, Tensor] = {}
    if arch.num_experts is not None:
        summands |= router_losses(arch, weights.num_microbatches, state.parallel.dp.size, device)
    if state.stragglers is not None:
        summands |= state.stragglers.summands()
    summands[_STOP] = torch.full((), float(state.stop_requested()), dtype=torch.float64, device=device)
    reduction = state.reduction.start(step.sums, "train", summands, copied=square_sums)
    if is_trained and not detects_spikes:  # the host detects spikes
        with phase(OPTIMIZER):
            state.optimizer.start_update(reduction.loss_is_finite() if is_checked else None)
    reduced = reduction.finish(collect_delayed)  # the host does not wait for the update
    if state.stragglers is not None:
        state.stragglers.compare(reduced.sums)
    if not is_trained:  # a mean over sequences of no loss is not 0
        return replace(reduced, loss=math.nan), Update()
    is_spike = detects_spikes and spike(settings, state.progress.recent_losses, reduced.loss) is not None
    with phase(OPTIMIZER):
        return reduced, state.optimizer.update(reduced.loss if is_checked else None, reduced.copied, is_spike=is_spike)


# ---- refusals


def _check_size(num_samples: int, expected: int, by_tokens: bool, rule: str) -> None:
    """Raise a DataError if a step of this number of samples is not the next one.

    Args:
        expected: samples of the next step.
        by_tokens: batches are formed by tokens, so that any number above 0 is right.
        rule: the beginning of the message.
    """
    if num_samples != expected and not (by_tokens and num_samples):
        raise DataError(f"{rule} of global_batch_size = {counted(expected, 'sample')}, got {num_samples}")


def _check_weights(weights: Any, step: OpenStep | None, iteration: int) -> None:
    if not isinstance(weights, StepWeights):
        raise TrainingError(
            f"wrap.forward_backward: step_weights is {type(weights).__name__}; pass what wrap.count_weights returned "
            "for all parts of the step"
        )
    if weights.iteration != iteration or (step is not None and step.weights is not weights):
        raise TrainingError(
            f"wrap.forward_backward: step_weights are of another step than iteration {iteration + 1}; "
            "call wrap.count_weights for the parts of this step"
        )
