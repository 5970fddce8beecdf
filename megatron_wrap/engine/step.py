"""One optimizer step from top to bottom. Start reading the code here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_wrap.engine.bad_steps import record_good_step, refuse_or_skip, skip_or_refuse_untrained, spike
from megatron_wrap.engine.batches.micro_batch import MicroBatch, ReplicaMicroBatches, count_step
from megatron_wrap.engine.memory import memory_advised
from megatron_wrap.engine.passes.loss import ReducedMetrics, StartedReduction
from megatron_wrap.engine.passes.parameters import parameter_square_sum
from megatron_wrap.engine.router_losses import expert_load, record_expert_load, reset_router_losses, router_losses
from megatron_wrap.engine.state.evaluation_mode import evaluation_mode
from megatron_wrap.engine.state.state import StepReport, TrainingState
from megatron_wrap.engine.state.step_state import OpenStep, RandomStates, StepWeights, Update
from megatron_wrap.engine.step_inputs import loss_micro_batches, normalized_loss, replica_micro_batches
from megatron_wrap.errors import DataError, FlowError
from megatron_wrap.metrics.metric import MetricSums
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.metrics.phases import DATA, GRADIENTS, OPTIMIZER, doing, phase
from megatron_wrap.model.chunks import restored_on_error, router_biases
from megatron_wrap.parallel.collectives import reduce_in_place
from megatron_wrap.plan.flops import tflops_per_device
from megatron_wrap.platform.megatron_core.first_gradients import zero_stale
from megatron_wrap.utils.garbage import collect_delayed, delayed_collection

_STOP = "stop_requests"


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
            steps are not skipped, or no token of the last batches is trained. Parameters, optimizer, learning rate and
            counters are unchanged.
    """
    started = time.perf_counter()
    with phase(DATA):
        batch = state.sharing.share(None if batch is None else state.with_cursor(batch), "train")
    check_size(state, len(batch), "wrap.train takes a batch")
    micro_batches = replica_micro_batches(state, batch)
    weights = step_weights(state, micro_batches)
    step = begin_step(state, weights, batch, started)
    return finish_step(state, step, lambda: compute_gradients(state, step, micro_batches))


def step_weights(state: TrainingState, micro_batches: ReplicaMicroBatches) -> StepWeights:
    """The loss weights of a step that is passed in one part. Collective over replicas."""
    counts = count_step(state.flow, micro_batches.training, state.parallel.dp_on_host)
    return StepWeights(counts, len(micro_batches.training))


def begin_step(state: TrainingState, weights: StepWeights, samples: Sequence[Any], started: float) -> OpenStep:
    """Zero the gradients and the routers' losses.

    Args:
        samples: of the global batch, or [] if they follow in parts.
        started: time.perf_counter() at the beginning of the step.
    """
    reset_router_losses(state.config.arch)
    if _reports_expert_load(state):
        record_expert_load(state.chunks)
    state.zero_gradients()
    device = state.platform.device
    checked = state.config.train.check_for_nan_in_loss_and_grad
    return OpenStep(weights, MetricSums(device), started, samples, RandomStates.now(device) if checked else None)


def compute_gradients(state: TrainingState, step: OpenStep, micro_batches: ReplicaMicroBatches) -> None:
    """Compute the gradients of the whole batch into the gradient buffers, reduced over all ranks. Collective."""
    [local] = loss_micro_batches(state, micro_batches, len(step.samples))
    add_gradients(state, step, local)
    if not step.weights.counts.is_trained:
        for chunk in state.chunks:
            zero_stale(chunk.parameters())


def add_gradients(state: TrainingState, step: OpenStep, local: list[MicroBatch]) -> None:
    """Run forward and backward: add the gradient of the micro-batches' share of the objective to the gradient buffers,
    reduced over all ranks unless within `deferred_reduction`. If the step trains no token, only the metrics are
    computed. Collective.

    Args:
        local: this process's micro-batches, as the loss takes them.
    """
    loss = normalized_loss(state, step.weights.counts.weights, step.weights.num_microbatches, step.sums)
    if not step.weights.counts.is_trained:  # the same on all ranks
        with evaluation_mode(state):
            state.pipeline_schedule.forward(state.chunks, local, loss, with_predictions=True)
        return
    with doing(GRADIENTS), memory_advised(state):
        state.pipeline_schedule.forward_backward(state.chunks, local, loss)


def finish_step(state: TrainingState, step: OpenStep, gradients: Callable[[], None]) -> StepReport:
    """Complete the gradients, reduce the metrics, update the parameters, advance learning rate and counters, and
    report. Collective.

    Args:
        gradients: computes the gradients into the buffers, or completes them: reduced over all ranks afterwards.

    Raises:
        TrainingError: as `train_step`.
    """
    progress, parallel, device, counts = state.progress, state.parallel, state.platform.device, step.weights.counts
    learning_rate, update, expected_size = state.lr_scheduler.get_lr({}), Update(), state.global_batch_size
    # Megatron-Core moves the routers' biases at the end of the backward pass (finalize_model_grads.py)
    biases = [] if state.config.arch.num_experts is None else router_biases(state.chunks)
    with restored_on_error(biases) as restore_biases:
        gradients()
        skip_or_refuse_untrained(state, counts.is_trained)
        with phase(OPTIMIZER):
            square_sums = state.optimizer.prepare(device) if counts.is_trained else []
        local = router_losses(state.config.arch, step.weights.num_microbatches, parallel.dp.size, device)
        requests = torch.full((), float(state.stop_requested()), dtype=torch.float64, device=device)
        seconds = {} if state.stragglers is None else state.stragglers.summands()
        summands = {**local, **seconds, _STOP: requests}
        reduction = state.reduction.start(step.sums, "train", summands, copied=square_sums)
        if counts.is_trained and state.config.bad_steps.spike_threshold is None:
            _start_update(state, reduction)
        reduced = reduction.finish(collect_delayed)  # the host does not wait for the update
        if not counts.is_trained:  # a mean over sequences of no loss is not 0
            reduced = replace(reduced, loss=math.nan)
        stop_requested = reduced.sums.pop(_STOP) > 0
        if state.stragglers is not None:
            state.stragglers.compare(reduced.sums)
        if counts.is_trained:
            update = _update(state, reduced)
        if update.is_bad:
            refuse_or_skip(state, step, reduced.loss, update.grad_norm)
            restore_biases()

        progress.iteration += 1
        progress.consume(state.with_cursor(step.samples))
        state.offered = None
        progress.consumed_tokens += counts.tokens
        progress.skipped_iterations += not update.applied
        if update.applied:
            record_good_step(state, reduced.loss)
            state.lr_scheduler.step(increment=expected_size)  # it counts steps, whatever the number of samples
        metrics = _metrics(state, reduced, step, update, learning_rate)
        flow_metrics = tuple(reduced.flow_metrics)
        return StepReport(
            progress.iteration, metrics, not update.applied, flow_metrics, stop_requested, counts.is_trained
        )


def check_size(state: TrainingState, num_samples: int, rule: str) -> None:
    """Raise a DataError if a step of this number of samples is not the next one."""
    expected_size = state.global_batch_size
    by_tokens = state.config.train.global_batch_tokens is not None
    if num_samples != expected_size and not (by_tokens and num_samples):
        raise DataError(f"{rule} of global_batch_size = {counted(expected_size, 'sample')}, got {num_samples}")


def gradients_of_batch(state: TrainingState, batch: Sequence[Any]) -> ReplicaMicroBatches:
    """The first half of `train_step`: compute the gradients of a global batch into the buffers without an update.
    For checks that inspect gradients. Collective.

    Returns:
        This replica's micro-batches, before padding and splitting.
    """
    micro_batches = replica_micro_batches(state, batch)
    step = begin_step(state, step_weights(state, micro_batches), batch, time.perf_counter())
    compute_gradients(state, step, micro_batches)
    return micro_batches


def _start_update(state: TrainingState, reduction: StartedReduction) -> None:
    """Queue the update, which the device omits if the loss is not finite; the host detects spikes."""
    is_checked = state.config.train.check_for_nan_in_loss_and_grad
    with phase(OPTIMIZER):
        state.optimizer.start_update(reduction.loss_is_finite() if is_checked else None)


def _update(state: TrainingState, reduced: ReducedMetrics) -> Update:
    loss = reduced.loss if state.config.train.check_for_nan_in_loss_and_grad else None
    with phase(OPTIMIZER):
        return state.optimizer.update(loss, reduced.copied, is_spike=spike(state, reduced.loss) is not None)


def _metrics(
    state: TrainingState,
    reduced: ReducedMetrics,
    step: OpenStep,
    update: Update,
    learning_rate: float,
) -> dict[str, float]:
    """The step's metrics by name, in the order of `metrics.declared`; the elapsed time ends here."""
    progress, logger, devices = state.progress, state.config.logger, state.parallel.world.size
    counts = step.weights.counts
    first: dict[str, float] = {"iteration": progress.iteration, "loss": reduced.loss}
    metrics: dict[str, float] = {
        "grad_norm": update.grad_norm,
        "learning_rate": learning_rate,
        "loss_scale": state.optimizer.loss_scale,
    }
    if logger.add_num_zeros_in_grad_to_metrics:
        metrics["num_zeros_in_grad"] = update.num_zeros
    metrics |= reduced.sums
    if logger.add_params_norm_to_metrics:
        metrics["params_norm"] = _params_norm(state)
    if _reports_expert_load(state):
        metrics |= expert_load(state.chunks, state.config.arch, state.parallel.world)
    elapsed_seconds = time.perf_counter() - step.started
    metrics |= {
        "global_batch_size": len(step.samples),
        "consumed_samples": progress.consumed_samples,
        "consumed_tokens": progress.consumed_tokens,
        "skipped_iterations": progress.skipped_iterations,
        "bad_steps": progress.bad_steps,
        "skipped_samples": progress.skipped_samples,
        "elapsed_time": elapsed_seconds,
        "tokens_per_second": counts.tokens / elapsed_seconds,
        "tokens_per_second_per_device": counts.tokens / elapsed_seconds / devices,
    }
    if "num_tokens" not in reduced.flow_metrics:  # a flow may report one
        metrics["num_tokens"] = progress.consumed_tokens
    if logger.add_throughput_to_metrics:
        flops = state.step_flops.of(counts.tokens, counts.squared_lengths)
        metrics["tflops"] = metrics["throughput"] = tflops_per_device(flops, elapsed_seconds, devices)
    if logger.add_memory_to_metrics:
        metrics |= state.platform.memory_gib()
    clash = sorted(reduced.flow_metrics.keys() & (first.keys() | metrics.keys()))
    if clash:
        raise FlowError(
            f"{type(state.flow).__name__} reports the metrics {clash}, which the engine reports itself; rename them"
        )
    return {**first, **reduced.flow_metrics, **metrics}


def _reports_expert_load(state: TrainingState) -> bool:
    return state.config.logger.add_expert_load_to_metrics and state.config.arch.num_experts is not None


def _params_norm(state: TrainingState) -> float:
    """Norm of all parameters after the update, in a separate all-reduce."""
    total = parameter_square_sum(state.chunks, state.parallel, state.platform.device)
    reduce_in_place(total, "sum", state.parallel.world.group)
    return math.sqrt(total.item())
