"""A step in parts: `count_weights`, several times `forward_backward`, `optimizer_step`; equal to `train_step` of the
whole batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from megatron_wrap.engine.batches.micro_batch import count_step
from megatron_wrap.engine.batches.micro_batching import has_step_samples
from megatron_wrap.engine.passes.pipeline_schedule import deferred_reduction
from megatron_wrap.engine.state.state import StepReport, TrainingState
from megatron_wrap.engine.state.step_state import OpenStep, StepWeights
from megatron_wrap.engine.step import add_gradients, begin_step, check_size, finish_step
from megatron_wrap.engine.step_inputs import localized, replica_micro_batches, step_statistics, with_statistics
from megatron_wrap.errors import DataError, TrainingError
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.metrics.phases import DATA, phase
from megatron_wrap.utils.garbage import delayed_collection


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
    _check_parts(state, [len(batch) for batch in batches])
    samples = [sample for batch in batches for sample in batch]
    check_size(state, len(samples), "wrap.count_weights takes the parts of a batch")
    sizes = tuple(map(len, batches))
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
    _check_weights(state, step, weights)
    with phase(DATA):
        batch = state.sharing.share(batch, "forward_backward")
    part = 0 if step is None else step.parts
    if part >= len(weights.sizes) or len(batch) != weights.sizes[part]:
        raise DataError(
            f"wrap.forward_backward: part {part + 1} of the step has {counted(len(batch), 'sample')}, but "
            f"wrap.count_weights got parts of {list(weights.sizes)}; pass the same parts in the same order"
        )
    if step is None:
        step = begin_step(state, weights, [], started)
    micro_batches = replica_micro_batches(state, batch, len(step.samples)).training
    local = with_statistics(localized(state, micro_batches), weights.statistics)
    with deferred_reduction(state.chunks, state.transformer_config, len(local) / weights.num_microbatches):
        add_gradients(state, step, local)
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
    is_trained = step.weights.counts.is_trained
    return finish_step(state, step, lambda: _reduce_gradients(state) if is_trained else None)


def refuse_open_step(state: TrainingState, caller: str) -> None:
    """Raise a TrainingError in the middle of a step in parts."""
    if state.open_step is not None:
        raise TrainingError(f"{caller}: a step in parts is open; call wrap.optimizer_step first")


def _reduce_gradients(state: TrainingState) -> None:
    """Complete the gradients as the schedule does after its last micro-batch (schedules.py, finalize_model_grads_func).
    Collective."""
    if state.config.ddp.overlap_grad_reduce:
        for chunk in state.chunks:
            chunk.start_grad_sync()
    state.transformer_config.finalize_model_grads_func(state.chunks, None)


def _check_parts(state: TrainingState, sizes: list[int]) -> None:
    """Refuse parts that cannot be split into micro-batches of one size or, for an interleaved pipeline, into a multiple
    of its stages."""
    if state.micro_batching.capacity is not None:
        return
    multiple = state.micro_batching.num_microbatches_multiple
    unit = state.flow.micro_batch_size * state.parallel.dp.size * multiple
    for number, size in enumerate(sizes, 1):
        if size % unit:
            of_pipeline = f" x {multiple} of the interleaved pipeline" if multiple > 1 else ""
            raise DataError(
                f"wrap.count_weights: part {number} has {counted(size, 'sample')}, which is not a multiple of {unit} "
                f"(micro_batch_size {state.flow.micro_batch_size} x data-parallel size {state.parallel.dp.size}"
                f"{of_pipeline}); split the batch at other samples"
            )


def _check_weights(state: TrainingState, step: OpenStep | None, weights: Any) -> None:
    if not isinstance(weights, StepWeights):
        raise TrainingError(
            f"wrap.forward_backward: step_weights is {type(weights).__name__}; pass what wrap.count_weights returned "
            "for all parts of the step"
        )
    if weights.iteration != state.progress.iteration or (step is not None and step.weights is not weights):
        raise TrainingError(
            f"wrap.forward_backward: step_weights are of another step than iteration {state.progress.iteration + 1}; "
            "call wrap.count_weights for the parts of this step"
        )
