"""Forward-only passes: evaluation of a set, and outputs per sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_wrap.data.order.sample_sets import SampleSet
from megatron_wrap.engine.batches.global_batch import rows_in_order
from megatron_wrap.engine.batches.micro_batch import MicroBatch
from megatron_wrap.engine.passes.parameters import synchronize_parameters
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.engine.step_inputs import (
    equal_runs,
    loss_micro_batches,
    normalized_loss,
    refuse_without_routing,
    split,
)
from megatron_wrap.errors import ConfigError, DataError, FlowError
from megatron_wrap.flow import MegatronWrapTrainingFlowBase
from megatron_wrap.flow.contract.routing import ROUTED_EXPERTS
from megatron_wrap.metrics.metric import MetricSums
from megatron_wrap.nearest_names import did_you_mean
from megatron_wrap.ops.deferred_logits import whole_logits
from megatron_wrap.parallel import zigzag
from megatron_wrap.parallel.collectives import gather_tensors


def evaluate(state: TrainingState, name: str, samples: Sequence[Any] | None) -> dict[str, float]:
    """The objective and the flow's metrics over a whole evaluation set; the state is unchanged. Collective.

    Args:
        samples: any number of samples, on every rank or only on global rank 0.

    Returns:
        {"loss": ..., further metrics of the flow}, the same on every rank.

    Raises:
        DataError: the set is empty, or a sample is wrong. FlowError: the flow breaks its contract.
    """
    samples = state.sharing.share(samples, f"evaluate({name})")
    if not len(samples):
        raise DataError(f"wrap.evaluate: the set {name!r} is empty")
    name_of = samples.where if isinstance(samples, SampleSet) else None
    sums, seed = MetricSums(state.platform.device), state.config.train.seed
    with state.evaluation_mode():
        for start, batch in _batches(state, samples):
            micro_batches = split(
                *(state.flow, state.prepare_sample, batch, state.micro_batching, seed + start, state.parallel.dp),
                _names(name_of, start),
            )
            # the weight of the batch is not needed: the sums and weights of all batches are reduced at the end
            step_weights = dict.fromkeys(micro_batches.training[0].weights, 1.0)
            loss = normalized_loss(state, step_weights, len(micro_batches.training), sums)
            runs, _ = loss_micro_batches(state, micro_batches, len(batch), equal_rows=True)
            for run in runs:
                state.pipeline_schedule.forward(state.chunks, run, loss, with_predictions=True)
    reduced = state.reduction.start(sums, f"evaluate({name})").finish()
    return {"loss": reduced.loss, **reduced.flow_metrics}


@contextmanager
def with_adapter(state: TrainingState, name: str | None) -> Iterator[None]:
    """Context in which the model computes with the adapter of this name, or without any adapter. Collective.

    Raises:
        ConfigError: there is no such adapter.
    """
    from megatron_wrap.nn.adapters.lora import TRAINED, only_adapter

    adapter = state.config.adapter
    names = [] if adapter.adapter_type == "none" else [TRAINED, *(adapter.others or {})]
    if name is not None and name not in names:
        raise ConfigError(
            f"wrap.adapter({name!r}): the run's adapters are {', '.join(names) or 'none'}{did_you_mean(name, names)}; "
            "megatron_wrap.adapter.others names frozen ones"
        )
    synchronize_parameters(state.chunks, bool(state.config.ddp.overlap_param_gather) and state.optimizer is not None)
    with only_adapter(state.chunks, name):
        yield


def forward(
    state: TrainingState, samples: Sequence[Any] | None, name_of: Callable[[int], str] | None = None
) -> list[dict[str, Tensor]]:
    """The outputs of the flow's `calculate_outputs` for each sample. Collective.

    Args:
        name_of: index of a sample -> its name in messages; None: they name its index.

    Returns:
        On every rank one dictionary of CPU tensors per sample, in order: the sample's row of each output. A row with a
        sequence dimension is cut to the sequence's length without padding, if a sample is one sequence. With
        `router_replay: R2` also `routed_experts` [tokens, layers with experts, topk], the experts of each token.

    Raises:
        DataError: a sample is wrong. FlowError: the flow breaks its contract.
    """
    samples = state.sharing.share(samples, "forward")
    flow, parallel, seed = state.flow, state.parallel, state.config.train.seed
    outputs = partial(_outputs, flow, parallel.cp.group)
    results: list[dict[str, Tensor]] = []
    with state.evaluation_mode():
        for start, batch in _batches(state, samples):
            by_samples, names = state.micro_batching.by_samples(), _names(name_of, start)
            micro_batches = split(flow, state.prepare_sample, batch, by_samples, seed + start, parallel.dp, names)
            refuse_without_routing(flow.context.routing, micro_batches.training, ("R3",))
            rows: list[dict[str, Tensor]] = []
            for run in equal_runs(micro_batches.training, by_samples.num_microbatches_multiple):
                local = state.localization.localize(run, state.extra_padding)
                rows += _rows(state, local, outputs)
            results += rows_in_order(rows, len(batch), flow.micro_batch_size, parallel)
    return results


def _rows(
    state: TrainingState, local: list[MicroBatch], outputs: Callable[[MicroBatch, Tensor], list[dict[str, Tensor]]]
) -> list[dict[str, Tensor]]:
    """One row of outputs for each sample of the micro-batches of one run, on the last pipeline stage. Collective."""
    schedule = state.pipeline_schedule
    routing = schedule.routing
    if routing is None or routing.shape.mode != "R2":
        return [row for of_micro_batch in schedule.forward(state.chunks, local, outputs) for row in of_micro_batch]
    with routing.recording() as recorded:
        rows = [row for of_micro_batch in schedule.forward(state.chunks, local, outputs) for row in of_micro_batch]
    routed = routing.rows(recorded, local)
    if rows and len(routed) != len(rows):
        raise FlowError(
            f"{type(state.flow).__name__} collates {len(routed)} sequences from {len(rows)} samples, whose routing "
            "cannot be replayed; set megatron_lm.train.common.router_replay to disabled"
        )
    return [{**row, ROUTED_EXPERTS: of_row} for row, of_row in zip(rows, routed, strict=False)]


def _batches(state: TrainingState, samples: Sequence[Any]) -> Iterator[tuple[int, Sequence[Any]]]:
    """(index of its first sample, samples) of each global batch."""
    size = state.config.train.global_batch_size
    for start in range(0, len(samples), size):
        yield start, [samples[index] for index in range(start, min(start + size, len(samples)))]


def _names(name_of: Callable[[int], str] | None, start: int) -> Callable[[int], str] | None:
    """The function `name_of` for the samples from `start` on."""
    return None if name_of is None else lambda index: name_of(start + index)


def _outputs(
    flow: MegatronWrapTrainingFlowBase, cp_group: ProcessGroup, micro_batch: MicroBatch, output: Tensor
) -> list[dict[str, Tensor]]:
    """The flow's outputs of one micro-batch as one row per sample on the CPU, merged over context-parallel ranks."""
    if not micro_batch.counted:
        return []
    seqdims = micro_batch.seqdims
    columns: dict[str, Tensor] = {}
    for name, returned in flow.calculate_outputs(micro_batch.loss_inputs, output).items():
        tensor = whole_logits(returned)
        if tensor.dim() == 0 or tensor.shape[0] != micro_batch.num_samples:
            raise FlowError(
                f"{type(flow).__name__}.calculate_outputs: {name!r} has shape {tuple(tensor.shape)}; return one "
                f"row for each of the {micro_batch.num_samples} samples of the micro-batch"
            )
        if name in seqdims:
            tensor = zigzag.merge(gather_tensors(tensor.detach(), cp_group), seqdims[name])
        columns[name] = tensor.detach().cpu()
    lengths = micro_batch.lengths.tolist()
    if len(lengths) != micro_batch.num_samples:  # several sequences per sample
        lengths = [micro_batch.width] * micro_batch.num_samples
    return [
        {name: _without_padding(tensor[row], seqdims.get(name), length).clone() for name, tensor in columns.items()}
        for row, length in enumerate(lengths)
    ]


def _without_padding(row: Tensor, seqdim: int | None, length: int) -> Tensor:
    """The first `length` tokens of a sample's row.

    Args:
        seqdim: the sequence dimension of the rows of a micro-batch; None: there is none.
    """
    return row if seqdim is None else row.narrow(seqdim % (row.dim() + 1) - 1, 0, length)
