"""One optimizer step, top to bottom. The first file to read."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatron_wrap.engine.cut import prepare_batch
from megatron_wrap.engine.forward import evaluation_mode
from megatron_wrap.engine.garbage import collected_at_end
from megatron_wrap.engine.loss import NormalizedLoss
from megatron_wrap.engine.micro_batch import MicroBatch, count_step
from megatron_wrap.engine.open_step import OpenStep, StepWeights
from megatron_wrap.engine.parameters import parameter_square_sum
from megatron_wrap.engine.prepared import PreparedBatch, batch_key
from megatron_wrap.engine.reduce import ReducedMetrics
from megatron_wrap.engine.reference import with_reference_outputs
from megatron_wrap.engine.router_losses import reset_router_losses, router_losses
from megatron_wrap.engine.state import StepReport, TrainingState
from megatron_wrap.engine.step_values import split_step_values, step_values, with_step_values
from megatron_wrap.engine.update import NonFiniteUpdate, Update
from megatron_wrap.errors import DataError, FlowError, TrainingError
from megatron_wrap.flow import MegatronWrapTrainingFlowBase
from megatron_wrap.metrics.metric import MetricSums
from megatron_wrap.metrics.phases import DATA, OPTIMIZER, phase
from megatron_wrap.metrics.throughput import tflops_per_device, training_flops
from megatron_wrap.model.chunks import restored_on_error, router_biases
from megatron_wrap.parallel.collectives import reduce_in_place

_NON_FINITE_HINT = (
    "lower the learning rate or inspect the batch; megatron_lm.train.common.check_for_nan_in_loss_and_grad: false "
    "disables this check"
)


@collected_at_end()
def train_step(state: TrainingState, batch: Sequence[Any] | None) -> StepReport:
    """Train on one global batch: collate, count, forward and backward, reduce, update, report. Collective.

    Args:
        batch: `state.global_batch_size` samples on every rank, or on global rank 0 alone.

    Returns:
        The same report on every rank.

    Raises:
        DataError, FlowError: the batch or the flow is wrong.
        TrainingError: on every rank, if the loss or the gradient norm is not finite. Parameters, optimizer, schedule
            and counters are unchanged.
    """
    started = time.perf_counter()
    with phase(DATA):
        batch = state.sharing.share(batch, "train")
    check_size(state, len(batch), "wrap.train takes a batch")
    micro_batches, for_step_values = split_step_values(_micro_batches(state, batch))
    counts = count_step(state.flow, micro_batches, state.parallel.dp_on_host)
    step = OpenStep(StepWeights(counts, len(micro_batches)), MetricSums(state.platform.device), started, batch)
    # Megatron-Core moves the routers' biases at the end of the backward pass (finalize_model_grads.py)
    with restored_on_error(router_biases(state.chunks)):
        begin_step(state)
        if counts.has_weight:  # the same on all ranks; a batch without loss weight has no gradient
            local = localized(state, micro_batches)
            values = whole_step_values(state, [local], for_step_values, len(batch))
            add_gradients(state, with_step_values(local, values), step.weights, step.sums)
        return finish_step(state, step)


def begin_step(state: TrainingState) -> None:
    """Zero the gradients and the routers' losses."""
    reset_router_losses(state.config.arch)
    for chunk in state.chunks:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()


def add_gradients(state: TrainingState, local: list[MicroBatch], step_weights: StepWeights, sums: MetricSums) -> None:
    """Forward and backward: add the gradient of micro-batches' share of the objective to the gradient buffers, reduced
    over all ranks unless in `deferred_reduction`. Collective.

    Args:
        local: this process's micro-batches, from `localized`.
        step_weights: of the whole step.
        sums: receives the metrics.
    """
    cp_size, dp_size = state.parallel.cp.size, state.parallel.dp.size
    weights, count = step_weights.counts.weights, step_weights.num_microbatches
    loss = NormalizedLoss(state.flow, cp_size, dp_size, weights, count, sums)
    state.schedule.run(state.chunks, local, loss, forward_only=False)


def finish_step(state: TrainingState, step: OpenStep) -> StepReport:
    """Reduce the metrics, update the parameters, advance schedule and counters, and report. Collective.

    Args:
        step: its gradients are in the buffers, reduced over all ranks.

    Raises:
        TrainingError: as `train_step`.
    """
    progress, parallel, device, counts = state.progress, state.parallel, state.platform.device, step.weights.counts
    learning_rate, update = state.scheduler.get_lr({}), Update()
    expected_size = state.global_batch_size
    with phase(OPTIMIZER):
        square_sums = state.optimizer.prepare(device) if counts.has_weight else []
    # before the update, because a non-finite loss prevents it. While the device updates, the host goes on
    local_router_losses = router_losses(state.config.arch, step.weights.num_microbatches, parallel.dp.size, device)
    reduced = state.reduction.reduce(step.sums, "train", local_router_losses, copied=square_sums)
    if counts.has_weight:
        update = _update(state, reduced)

    progress.iteration += 1
    progress.consume(step.samples, state.offered)
    progress.consumed_tokens += counts.tokens
    progress.skipped_iterations += not update.applied
    if update.applied:
        state.scheduler.step(increment=expected_size)  # it counts steps, whatever the number of samples
    metrics = _metrics(state, reduced, step, update, learning_rate)
    return StepReport(progress.iteration, metrics, not update.applied, flow_metrics=tuple(reduced.flow_metrics))


def check_size(state: TrainingState, num_samples: int, what: str) -> None:
    """Raise a DataError if a step of this number of samples is not the next one."""
    expected_size = state.global_batch_size
    by_tokens = state.config.train.global_batch_tokens is not None
    if num_samples != expected_size and not (by_tokens and num_samples):
        raise DataError(f"{what} of global_batch_size = {expected_size} samples, got {num_samples}")


def _micro_batches(state: TrainingState, batch: Sequence[Any]) -> list[MicroBatch]:
    """This replica's micro-batches: those that the batch carries if they are of this step, else prepared now."""
    seed, dp = state.config.train.seed + state.progress.consumed_samples, state.parallel.dp
    ahead = batch.micro_batches(batch_key(state.cut, seed, dp)) if isinstance(batch, PreparedBatch) else None
    if ahead is not None:
        return ahead
    with phase(DATA):
        return prepare_batch(state.flow, batch, state.cut, seed, dp)


def localized(state: TrainingState, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
    """This process's micro-batches for the loss, with the reference model's outputs. Collective."""
    local = state.schedule.localize(micro_batches, state.extra_padding)
    if state.reference is None:
        return local
    return with_reference_outputs(state.reference, state.flow, state.schedule, local)


def whole_step_values(
    state: TrainingState, groups: list[list[MicroBatch]], for_step_values: list[MicroBatch], num_samples: int
) -> dict[str, Tensor]:
    """The statistics of the whole step, from `groups`, or from micro-batches for them alone; empty if the flow has
    none. Collective."""
    if state.flow.step_values_from is None:
        return {}
    with evaluation_mode(state):
        return step_values(state, [localized(state, for_step_values)] if for_step_values else groups, num_samples)


def gradients_of_batch(state: TrainingState, batch: Sequence[Any]) -> list[MicroBatch]:
    """The first half of `train_step`: compute the gradients of a global batch into the buffers without an update.
    For checks that inspect gradients. Collective.

    Returns:
        This replica's micro-batches, before padding and splitting.
    """
    parallel = state.parallel
    prepared = prepare_batch(state.flow, batch, state.cut, state.config.train.seed, parallel.dp)
    micro_batches, for_step_values = split_step_values(prepared)
    counts = count_step(state.flow, micro_batches, parallel.dp_on_host)
    begin_step(state)
    local = localized(state, micro_batches)
    values = whole_step_values(state, [local], for_step_values, len(batch))
    weights = StepWeights(counts, len(micro_batches))
    add_gradients(state, with_step_values(local, values), weights, MetricSums(state.platform.device))
    return micro_batches


def _update(state: TrainingState, reduced: ReducedMetrics) -> Update:
    loss = reduced.loss if state.config.train.check_for_nan_in_loss_and_grad else None
    try:
        with phase(OPTIMIZER):
            return state.optimizer.update(loss, reduced.copied)
    except NonFiniteUpdate as error:
        values = {"loss": error.loss, "grad_norm": error.grad_norm}
        non_finite = " and ".join(name for name, value in values.items() if not math.isfinite(value))
        raise TrainingError(
            f"{non_finite} of iteration {state.progress.iteration + 1} not finite (loss {error.loss}, grad_norm "
            f"{error.grad_norm}); nothing was updated; {_NON_FINITE_HINT}"
        ) from error


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
    elapsed_seconds = time.perf_counter() - step.started
    metrics |= {
        "global_batch_size": len(step.samples),
        "consumed_samples": progress.consumed_samples,
        "consumed_tokens": progress.consumed_tokens,
        "skipped_iterations": progress.skipped_iterations,
        "skipped_samples": progress.skipped_samples,
        "elapsed_time": elapsed_seconds,
        "tokens_per_second": counts.tokens / elapsed_seconds,
        "tokens_per_second_per_device": counts.tokens / elapsed_seconds / devices,
    }
    if "num_tokens" not in reduced.flow_metrics:  # a flow may have its own
        metrics["num_tokens"] = progress.consumed_tokens
    if logger.add_throughput_to_metrics:
        flops = training_flops(state.shape, counts.tokens, counts.squared_lengths)
        flops *= _forward_passes(state) / 3  # a backward pass costs two forward passes
        metrics["tflops"] = metrics["throughput"] = tflops_per_device(flops, elapsed_seconds, devices)
    if logger.add_memory_to_metrics:
        metrics |= state.platform.memory_gib()
    clash = sorted(reduced.flow_metrics.keys() & (first.keys() | metrics.keys()))
    if clash:
        raise FlowError(
            f"{type(state.flow).__name__} reports the metrics {clash}, which the engine reports itself; rename them"
        )
    return {**first, **reduced.flow_metrics, **metrics}


def _forward_passes(state: TrainingState) -> int:
    """Cost of a step in forward passes over its tokens; samples of `get_step_samples` count as many tokens."""
    flow, with_reference = state.flow, state.reference is not None
    further = type(flow).get_step_samples is not MegatronWrapTrainingFlowBase.get_step_samples
    statistics = flow.step_values_from is not None
    return 3 + with_reference * (2 if statistics and further else 1) + (flow.step_values_from == "outputs")


def _params_norm(state: TrainingState) -> float:
    """Norm of all parameters after the update, in a separate all-reduce."""
    total = parameter_square_sum(state.chunks, state.parallel, state.platform.device)
    reduce_in_place(total, "sum", state.parallel.world.group)
    return math.sqrt(total.item())
