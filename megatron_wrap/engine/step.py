"""One optimizer step, top to bottom. The first file to read."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_wrap.engine.loss import LossLaw
from megatron_wrap.engine.micro_batch import MicroBatch, collate
from megatron_wrap.engine.parameters import parameter_square_sum
from megatron_wrap.engine.reduce import ReducedMetrics, reduce_metrics
from megatron_wrap.engine.reference import add_reference_outputs
from megatron_wrap.engine.router_losses import router_losses
from megatron_wrap.engine.samples import micro_batch_samples, shared_batch
from megatron_wrap.engine.schedule import localize_all, run_schedule
from megatron_wrap.engine.state import StepReport, TrainingState
from megatron_wrap.errors import DataError, FlowError, TrainingError
from megatron_wrap.metrics.metric import MetricSums
from megatron_wrap.metrics.throughput import tflops_per_device, training_flops
from megatron_wrap.parallel.collectives import all_reduce_values

_WAYS_OUT_OF_NOT_FINITE = (
    "lower the learning rate or look at the batch; megatron_lm.train.common.check_for_nan_in_loss_and_grad: false goes "
    "on all the same"
)


PARAMS_NORM = "params_norm"


def train_step(state: TrainingState, batch: Sequence[Any] | None) -> StepReport:
    """Take one global batch: collate, count, forward and backward, update, report.

    Args:
        batch: `state.global_batch_size` samples on every rank, or on global rank 0 alone.

    Returns:
        The same report on every rank.

    Raises:
        DataError, FlowError: the batch or the flow is wrong. TrainingError: a loss or gradient is not finite.
    """
    started = time.perf_counter()
    progress, parallel = state.progress, state.parallel
    batch = shared_batch(batch, parallel, state.agreed, "train")
    if len(batch) != state.global_batch_size:
        raise DataError(
            f"wrap.train takes a batch of global_batch_size = {state.global_batch_size} samples, got {len(batch)}"
        )
    micro_batches = collate_share(state, batch, first_sample=progress.consumed_samples)
    counts = count_step(state, micro_batches)
    learning_rate = state.scheduler.get_lr({})

    sums = MetricSums(state.platform.device)
    updated, grad_norm, num_zeros = False, 0.0, 0
    if any(counts.weights.values()):  # known to all ranks alike; a batch without weight teaches nothing
        compute_gradients(state, micro_batches, counts, sums)
        updated, norm, zeros = state.optimizer.step()
        grad_norm, num_zeros = float(norm or 0.0), int(zeros or 0)

    progress.iteration += 1
    progress.consumed_samples += len(batch)
    progress.consumed_tokens += counts.tokens
    progress.skipped_iterations += not updated
    if updated:
        state.scheduler.step(increment=len(batch))

    of_all_ranks = router_losses(state, len(micro_batches))
    if state.config.logger.add_params_norm_to_metrics:
        of_all_ranks[PARAMS_NORM] = parameter_square_sum(state.chunks, state.parallel, state.platform.device)
    reduced = reduce_metrics(state, sums, "train", of_all_ranks)
    metrics = _metrics(state, reduced, counts, grad_norm, num_zeros, learning_rate, time.perf_counter() - started)
    if updated and state.config.train.check_for_nan_in_loss_and_grad:
        _refuse_not_finite(metrics)
    return StepReport(progress.iteration, metrics, skipped=not updated, flow_metrics=tuple(reduced.flow_metrics))


def collate_share(state: TrainingState, batch: Sequence[Any], first_sample: int) -> list[MicroBatch]:
    """This replica's micro-batches of a global batch; `first_sample` is the batch's place in the run, for seeds.

    A replica that a short batch leaves with fewer micro-batches than others repeats a sample, uncounted.
    """
    size, dp = state.flow.micro_batch_size, state.parallel.dp
    seed = state.config.train.seed
    micro_batches = [
        collate(state.flow, samples, seed=seed + first_sample + start)
        for start, samples in micro_batch_samples(batch, size, dp.rank, dp.size)
    ]
    rounds = -(-len(batch) // (size * dp.size))
    if len(micro_batches) < rounds:
        filler = collate(state.flow, batch[:1], seed=seed)
        micro_batches.append(replace(filler, counted=False))
    return micro_batches


def compute_gradients(
    state: TrainingState, micro_batches: list[MicroBatch], counts: StepCounts, sums: MetricSums
) -> None:
    """Leave the gradient of the objective in the gradient buffers, reduced over all ranks; metrics go to `sums`."""
    for chunk in state.chunks:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()
    router_losses(state, len(micro_batches))  # what an earlier pass left there is not this step's
    law = LossLaw(state.flow, state.parallel, counts.weights, len(micro_batches), sums)
    local = add_reference_outputs(state, localize_all(state, micro_batches))
    try:
        run_schedule(state.chunks, state, local, law, forward_only=False)
    except RuntimeError as error:
        if "local grad norm" not in str(error):  # param_and_grad_buffer.py, check_grads
            raise
        raise TrainingError(
            f"the gradient of iteration {state.progress.iteration + 1} is not finite; nothing was updated; "
            f"{_WAYS_OUT_OF_NOT_FINITE}"
        ) from error


@dataclass(frozen=True)
class StepCounts:
    """Sums over all micro-batches and replicas of one step, known before the forward pass."""

    weights: dict[str, float]
    tokens: int
    squared_lengths: float


def count_step(state: TrainingState, micro_batches: list[MicroBatch]) -> StepCounts:
    """Sum weights and tokens of the step over replicas, in one collective."""
    terms = sorted({term for m in micro_batches for term in m.weights})
    if any(sorted(m.weights) != terms for m in micro_batches):
        raise FlowError(f"{type(state.flow).__name__}.get_loss_weight names other terms in another micro-batch")
    counted = [m for m in micro_batches if m.counted]
    numbers = [sum(m.weights[term] for m in counted) for term in terms]
    numbers.append(sum(int(m.lengths.sum()) for m in counted))
    numbers.append(sum(float((m.lengths.double() ** 2).sum()) for m in counted))
    *weights, tokens, squares = all_reduce_values(numbers, state.parallel.dp.group, state.platform.device)
    return StepCounts(dict(zip(terms, weights, strict=True)), round(tokens), squares)


def _metrics(
    state: TrainingState,
    reduced: ReducedMetrics,
    counts: StepCounts,
    grad_norm: float,
    num_zeros: int,
    learning_rate: float,
    elapsed_seconds: float,
) -> dict[str, float]:
    progress, logger, devices = state.progress, state.config.logger, state.parallel.world.size
    first: dict[str, float] = {"iteration": progress.iteration, "loss": reduced.loss}
    metrics: dict[str, float] = {
        "grad_norm": grad_norm,
        "learning_rate": learning_rate,
        "loss_scale": float(state.optimizer.get_loss_scale()),
    }
    if logger.add_num_zeros_in_grad_to_metrics:
        metrics["num_zeros_in_grad"] = num_zeros
    metrics |= {name: math.sqrt(total) if name == PARAMS_NORM else total for name, total in reduced.sums.items()}
    metrics |= {
        "consumed_samples": progress.consumed_samples,
        "consumed_tokens": progress.consumed_tokens,
        "skipped_iterations": progress.skipped_iterations,
        "elapsed_time": elapsed_seconds,
        "tokens_per_second": counts.tokens / elapsed_seconds,
        "tokens_per_second_per_device": counts.tokens / elapsed_seconds / devices,
    }
    if logger.add_throughput_to_metrics:
        flops = training_flops(state.shape, counts.tokens, counts.squared_lengths)
        if state.reference is not None:
            flops *= 4 / 3  # one more forward pass; a backward pass takes twice as much
        metrics["tflops"] = metrics["throughput"] = tflops_per_device(flops, elapsed_seconds, devices)
    if logger.add_memory_to_metrics:
        metrics |= state.platform.memory_gib()
    clash = sorted(reduced.flow_metrics.keys() & (first.keys() | metrics.keys()))
    if clash:
        raise FlowError(f"{type(state.flow).__name__} reports the metrics {clash}, which the engine makes; rename them")
    return {**first, **reduced.flow_metrics, **metrics}


def _refuse_not_finite(metrics: dict[str, float]) -> None:
    bad = [name for name in ("loss", "grad_norm") if not math.isfinite(metrics[name])]
    if bad:
        raise TrainingError(
            f"{' and '.join(bad)} of iteration {metrics['iteration']} not finite "
            f"(loss {metrics['loss']}, grad_norm {metrics['grad_norm']}); {_WAYS_OUT_OF_NOT_FINITE}"
        )
