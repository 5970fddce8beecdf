"""Forward-only passes: evaluation of a set, and outputs per sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_wrap.engine.cut import prepare_batch
from megatron_wrap.engine.loss import NormalizedLoss
from megatron_wrap.engine.micro_batch import MicroBatch
from megatron_wrap.engine.reference import with_reference_outputs
from megatron_wrap.engine.state import TrainingState
from megatron_wrap.engine.step_values import split_step_values, step_values, with_step_values
from megatron_wrap.errors import DataError, FlowError
from megatron_wrap.flow import MegatronWrapTrainingFlowBase
from megatron_wrap.metrics.metric import MetricSums
from megatron_wrap.parallel import context
from megatron_wrap.parallel.collectives import gather_objects, gather_tensors
from megatron_wrap.parallel.state import ParallelState
from megatron_wrap.platform.generation import without_fp8

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def evaluate(state: TrainingState, name: str, samples: Sequence[Any] | None) -> dict[str, float]:
    """The objective and the flow's metrics over a whole evaluation set; the state is unchanged. Collective.

    Args:
        samples: any number of samples, on every rank or only on global rank 0.

    Returns:
        {"loss": ..., further metrics of the flow}, the same on every rank.
    """
    samples = state.sharing.share(samples, f"evaluate({name})")
    if not len(samples):
        raise DataError(f"wrap.evaluate: the set {name!r} is empty")
    sums, parallel, train = MetricSums(state.platform.device), state.parallel, state.config.train
    with evaluation_mode(state):
        for start, batch in _batches(samples, train.global_batch_size):
            prepared = prepare_batch(state.flow, batch, state.cut, train.seed + start, parallel.dp)
            micro_batches, for_step_values = split_step_values(prepared)
            groups = list(_localized(state, micro_batches, with_reference=True))
            if state.flow.step_values_from is not None:
                source = list(_localized(state, for_step_values, with_reference=True)) if for_step_values else groups
                values = step_values(state, source, len(batch))
                groups = [with_step_values(group, values) for group in groups]
            step_weights = dict.fromkeys(micro_batches[0].weights, 1.0)
            loss = NormalizedLoss(
                state.flow, parallel.cp.size, parallel.dp.size, step_weights, len(micro_batches), sums
            )
            for group in groups:
                state.schedule.run(state.chunks, group, loss, forward_only=True)
    reduced = state.reduction.reduce(sums, f"evaluate({name})")
    return {"loss": reduced.loss, **reduced.flow_metrics}


def forward(state: TrainingState, samples: Sequence[Any] | None) -> list[dict[str, Tensor]]:
    """The outputs of the flow's `calculate_outputs` for each sample. Collective.

    Returns:
        On every rank one dictionary of CPU tensors per sample, in order: the sample's row of each output. A row with a
        sequence dimension is cut to the sequence's length without padding, if a sample is one sequence.
    """
    samples = state.sharing.share(samples, "forward")
    parallel, train = state.parallel, state.config.train
    results: list[dict[str, Tensor]] = []
    with evaluation_mode(state):
        for start, batch in _batches(samples, train.global_batch_size):
            prepared = prepare_batch(state.flow, batch, state.cut.fixed(), train.seed + start, parallel.dp)
            micro_batches, _ = split_step_values(prepared)
            outputs = partial(_outputs, state.flow, parallel.cp.group)
            rows = [
                row
                for group in _localized(state, micro_batches)
                for micro_batch_rows in state.schedule.run(state.chunks, group, outputs, forward_only=True)
                for row in micro_batch_rows
            ]
            results += in_order(rows, len(batch), state.flow.micro_batch_size, parallel)
    return results


def _batches(samples: Sequence[Any], size: int) -> Iterator[tuple[int, Sequence[Any]]]:
    for start in range(0, len(samples), size):
        yield start, [samples[place] for place in range(start, min(start + size, len(samples)))]


def _localized(
    state: TrainingState, micro_batches: list[MicroBatch], with_reference: bool = False
) -> Iterator[list[MicroBatch]]:
    """Local micro-batches, a list for each run of the schedule: one for each size of micro-batch, because the last ones
    may be smaller and a pipeline needs equal ones. An interleaved pipeline also needs a multiple of its group size
    (schedules.py, forward_backward_pipelining_with_interleaving), so fillers are appended."""
    interleaved = len(state.chunks) > 1
    group_size = state.transformer_config.microbatch_group_size_per_vp_stage if interleaved else 1
    for _, same_size in groupby(micro_batches, key=lambda micro_batch: micro_batch.num_rows):
        equal = list(same_size)
        equal += [replace(equal[-1], counted=False)] * (-len(equal) % group_size)
        local = state.schedule.localize(equal, state.extra_padding)
        if with_reference and state.reference is not None:
            local = with_reference_outputs(state.reference, state.flow, state.schedule, local)
        yield local


@contextmanager
def evaluation_mode(state: TrainingState) -> Iterator[None]:
    """No dropout, no graph and no FP8. With `overlap_param_gather` the parameters are gathered first, because in
    training the forward pass gathers them."""
    overlapped = state.config.ddp.overlap_param_gather and state.optimizer is not None
    for chunk in state.chunks:
        chunk.eval()
        if overlapped:
            chunk.disable_forward_pre_hook(param_sync=True)
    try:
        with torch.no_grad(), without_fp8(state.chunks) if state.transformer_config.fp8 else nullcontext():
            yield
    finally:
        for chunk in state.chunks:
            chunk.train()
            if overlapped:
                chunk.enable_forward_pre_hook()


def _outputs(
    flow: MegatronWrapTrainingFlowBase, cp_group: ProcessGroup, micro_batch: MicroBatch, output: Tensor
) -> tuple[Tensor, Tensor, list[dict[str, Tensor]]]:
    """The flow's outputs of one micro-batch as one row per sample on the CPU, merged over context-parallel ranks."""
    one_token = torch.ones((), dtype=torch.int)
    nothing = output.new_zeros(())
    if not micro_batch.counted:
        return nothing, one_token, []
    seqdims = micro_batch.seqdims
    columns: dict[str, Tensor] = {}
    for name, tensor in flow.calculate_outputs(micro_batch.loss_inputs, output).items():
        if tensor.dim() == 0 or tensor.shape[0] != micro_batch.num_samples:
            raise FlowError(
                f"{type(flow).__name__}.calculate_outputs: {name!r} has shape {tuple(tensor.shape)}; return one "
                f"row for each of the {micro_batch.num_samples} samples of the micro-batch"
            )
        if name in seqdims:
            tensor = context.merge(gather_tensors(tensor.detach(), cp_group), seqdims[name])
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


def in_order(rows: list[Any], count: int, micro_batch_size: int, parallel: ParallelState) -> list[Any]:
    """Gather the rows of all replicas in the order of the `count` samples: the inverse of `micro_batch_samples`.
    Collective over all ranks.

    Args:
        rows: one for each of this replica's samples; only those of the last stage's tensor-parallel rank 0 are used.
    """
    # every context-parallel rank of a replica has the merged rows; context-parallel rank 0 contributes them
    mine = rows if parallel.counts_once and parallel.cp.rank == 0 else []
    by_replica = {dp_rank: iter(found) for found, dp_rank in gather_objects([mine, parallel.dp.rank]) if found}
    return [next(by_replica[(place // micro_batch_size) % parallel.dp.size]) for place in range(count)]
