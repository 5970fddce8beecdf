"""Forward-only passes: evaluation of named sets, and per-sample outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.engine.loss import LossLaw
from megatron_wrap.engine.micro_batch import MicroBatch
from megatron_wrap.engine.reduce import reduce_metrics
from megatron_wrap.engine.reference import add_reference_outputs
from megatron_wrap.engine.samples import shared_batch
from megatron_wrap.engine.schedule import localize_all, run_schedule
from megatron_wrap.engine.state import TrainingState
from megatron_wrap.engine.step import collate_share
from megatron_wrap.errors import DataError, FlowError
from megatron_wrap.metrics.metric import MetricSums
from megatron_wrap.parallel import context
from megatron_wrap.parallel.collectives import gather_objects, gather_tensors


def evaluate(state: TrainingState, name: str, samples: Sequence[Any] | None) -> dict[str, float]:
    """The objective and the flow's metrics over a whole set, without changing anything.

    Args:
        samples: on every rank, or on global rank 0 alone; any number of them.

    Returns:
        {"loss": ..., further metrics of the flow}, the same on every rank.
    """
    samples = shared_batch(samples, state.parallel, state.agreed, f"evaluate({name})")
    if not len(samples):
        raise DataError(f"wrap.evaluate: the set {name!r} is empty")
    sums = MetricSums(state.platform.device)
    with evaluation_mode(state):
        for start, batch in _batches(samples, state.config.train.global_batch_size):
            micro_batches = collate_share(state, batch, first_sample=start)
            step_weights = dict.fromkeys(micro_batches[0].weights, 1.0)
            law = LossLaw(state.flow, state.parallel, step_weights, len(micro_batches), sums)
            _forward(state, micro_batches, law, with_reference=True)
    reduced = reduce_metrics(state, sums, f"evaluate({name})")
    return {"loss": reduced.loss, **reduced.flow_metrics}


def forward(state: TrainingState, samples: Sequence[Any] | None) -> list[dict[str, Tensor]]:
    """What the flow's `calculate_outputs` gives for each sample.

    Returns:
        One dictionary of CPU tensors for each sample, in order, on every rank: the row of each output; where it has a
        sequence dimension and a sample is one sequence, cut to that sequence's own length.
    """
    samples = shared_batch(samples, state.parallel, state.agreed, "forward")
    results: list[dict[str, Tensor]] = []
    with evaluation_mode(state):
        for start, batch in _batches(samples, state.config.train.global_batch_size):
            stored = _forward(state, collate_share(state, batch, first_sample=start), partial(_outputs, state))
            mine = [row for rows in stored for row in rows] if state.parallel.counts_once else []
            # every context-parallel rank of a replica has the merged rows; one of them speaks
            gathered = gather_objects([mine if state.parallel.cp.rank == 0 else [], state.parallel.dp.rank])
            by_replica = {dp_rank: rows for rows, dp_rank in gathered if rows}
            results += _in_order(by_replica, len(batch), state.flow.micro_batch_size, state.parallel.dp.size)
    return results


def _batches(samples: Sequence[Any], size: int) -> Iterator[tuple[int, Sequence[Any]]]:
    for start in range(0, len(samples), size):
        yield start, [samples[place] for place in range(start, min(start + size, len(samples)))]


def _forward(
    state: TrainingState, micro_batches: list[MicroBatch], loss_function: Any, with_reference: bool = False
) -> list[Any]:
    """The schedule over micro-batches that may have fewer samples at the end; a pipeline wants equal ones, and an
    interleaved one whole groups of them (schedules.py, forward_backward_pipelining_with_interleaving)."""
    interleaved = len(state.chunks) > 1
    group_size = state.transformer_config.microbatch_group_size_per_vp_stage if interleaved else 1
    stored = []
    for _, same_size in groupby(micro_batches, key=lambda micro_batch: micro_batch.num_samples):
        equal = list(same_size)
        equal += [replace(equal[-1], counted=False)] * (-len(equal) % group_size)
        local = localize_all(state, equal)
        if with_reference:
            local = add_reference_outputs(state, local)
        stored += run_schedule(state.chunks, state, local, loss_function, forward_only=True)
    return stored


@contextmanager
def evaluation_mode(state: TrainingState) -> Iterator[None]:
    """No dropout and no graph; parameters gathered first where their gathering overlaps with training's forward."""
    overlapped = state.config.ddp.overlap_param_gather and state.optimizer is not None
    for chunk in state.chunks:
        chunk.eval()
        if overlapped:
            chunk.disable_forward_pre_hook(param_sync=True)
    try:
        with torch.no_grad():
            yield
    finally:
        for chunk in state.chunks:
            chunk.train()
            if overlapped:
                chunk.enable_forward_pre_hook()


def _outputs(
    state: TrainingState, micro_batch: MicroBatch, output: Tensor
) -> tuple[Tensor, Tensor, list[dict[str, Tensor]]]:
    """The flow's outputs of one micro-batch as rows on the CPU, whole over context-parallel ranks."""
    one_token = torch.ones((), dtype=torch.int)
    nothing = output.new_zeros(())
    if not micro_batch.counted:
        return nothing, one_token, []
    seqdims = state.flow.get_fields_and_seqdims()
    columns: dict[str, Tensor] = {}
    for name, tensor in state.flow.calculate_outputs(micro_batch.loss_inputs, output).items():
        if tensor.dim() == 0 or tensor.shape[0] != micro_batch.num_samples:
            raise FlowError(
                f"{type(state.flow).__name__}.calculate_outputs: {name!r} has shape {tuple(tensor.shape)}; give one "
                f"row for each of the {micro_batch.num_samples} samples of the micro-batch"
            )
        if name in seqdims:
            tensor = context.merge(gather_tensors(tensor.detach(), state.parallel.cp.group), seqdims[name])
        columns[name] = tensor.detach().cpu()
    lengths = micro_batch.lengths.tolist()
    if len(lengths) != micro_batch.num_samples:
        lengths = [micro_batch.width] * micro_batch.num_samples
    rows = []
    for row, length in enumerate(lengths):
        one = {name: tensor[row] for name, tensor in columns.items()}
        for name in one.keys() & seqdims.keys():
            dim = seqdims[name] % columns[name].dim() - 1
            one[name] = one[name].narrow(dim, 0, length)
        rows.append({name: tensor.clone() for name, tensor in one.items()})
    return nothing, one_token, rows


def _in_order(
    by_replica: Mapping[int, list[dict[str, Tensor]]], count: int, micro_batch_size: int, dp_size: int
) -> list[dict[str, Tensor]]:
    """Undo the cut of `micro_batch_samples`."""
    rows = {replica: iter(of_replica) for replica, of_replica in by_replica.items()}
    return [next(rows[(place // micro_batch_size) % dp_size]) for place in range(count)]
