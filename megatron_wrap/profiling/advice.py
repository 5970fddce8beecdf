"""Changes of a configuration that a measured step suggests, each with an upper bound of the time that it saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_wrap.config import RunConfig
from megatron_wrap.config.reading.pipeline_layout import PipelineLayout
from megatron_wrap.config.reading.tree import SetBy
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.run import SECTION_PATHS
from megatron_wrap.plan.pipeline_split import bubble
from megatron_wrap.profiling import kernel_kinds as kinds
from megatron_wrap.profiling.breakdown import StepBreakdown

_LEAST_SHARE = 0.01
"""Smallest share of the step, or of the peak memory, that a suggested change could save."""
_ATTAINABLE = 0.8
"""Share of the peak FLOP/s that large matmuls reach (790 of 989 TFLOP/s on an H200, measured)."""
_PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "H800": 989.0, "A100": 312.0, "A800": 312.0, "B200": 2250.0}
"""Part of a GPU's name -> its dense bf16 TFLOP/s, from its data sheet."""


@dataclass(frozen=True)
class Change:
    """A suggested change of one key."""

    override: str
    """Override `a.b.c=value` of the change."""
    saves_ms: float
    """Upper bound of the saved time, ms per step."""
    reason: str
    changes_numbers: bool = False
    """Whether it changes the training's precision, and therefore its results."""


@dataclass(frozen=True)
class MemoryChange:
    """A suggested change of one key that lowers a process's peak memory and leaves the results unchanged."""

    override: str
    """Override `a.b.c=value` of the change."""
    saves_gib: float
    """Upper bound of the saved memory, GiB."""
    peak_gib: float
    """Peak memory of the process in the profiled step, GiB."""
    reason: str


@dataclass(frozen=True)
class StepMemory:
    """Memory of one process in a profiled step."""

    peak_gib: float
    avoidable_logits_gib: float
    """Memory of the logits of a micro-batch and of their gradient, GiB; 0: not stored, or the model needs them."""


@dataclass(frozen=True)
class ProfiledRun:
    """Properties of a profiled run beside its configuration, on one process."""

    device: str
    """Name of the GPU; "" on a CPU."""
    transformer_engine_layers: bool
    has_transformer_engine: bool
    has_triton: bool
    can_pack: bool
    """Whether the flow supports packed rows."""
    dp_size: int
    num_microbatches: int
    total_gib: float
    """Memory of the device, GiB."""
    faster_split: tuple[PipelineLayout, float] | None = None
    """Layers of the pipeline's stages by cost, and the share of a step that they would save; None: the run already uses
    them."""
    padding_share: float = 0.0
    """Measured share of the computed tokens that are padding, 0 to 1."""
    product_flops: float = 0.0
    """Measured FLOPs of the model's matmuls without attention scores, per step and device."""
    peak_gib: float = 0.0
    """Measured peak memory, GiB."""

    @property
    def free_share(self) -> float:
        """Share of the device's memory that the run never used."""
        return 1 - self.peak_gib / self.total_gib if self.total_gib else 0.0

    @property
    def peak_tflops(self) -> float | None:
        """bf16 TFLOP/s of the GPU; None: unknown."""
        return next((peak for name, peak in _PEAK_TFLOPS.items() if name in self.device), None)


def promising_changes(step: StepBreakdown, config: RunConfig, run: ProfiledRun, count: int = 2) -> list[Change]:
    """The changes that could save most; changes that leave the results unchanged come first. Keys that the defaults
    chose for this machine and layout are not suggested, because those choices have reasons.

    Args:
        step: breakdown of the slowest process.
        count: maximum number of changes.
    """
    worthwhile = [
        change
        for rules in (_waits, _stages, _communication, _memory, _kernels, _precision)
        for change in rules(step, config, run)
        if change.saves_ms >= _LEAST_SHARE * step.step_ms
        and config.set_by(change.override.partition("=")[0]) is not SetBy.MACHINE
    ]
    return sorted(worthwhile, key=lambda change: (change.changes_numbers, -change.saves_ms))[:count]


def memory_changes(processes: Sequence[StepMemory]) -> list[MemoryChange]:
    """The changes that could lower the peak memory of the process that could save most."""
    memory = max(processes, key=lambda of_process: of_process.avoidable_logits_gib)
    if not memory.avoidable_logits_gib or memory.avoidable_logits_gib < _LEAST_SHARE * memory.peak_gib:
        return []
    key = _key("model_provider", "linear_cross_entropy", True)
    reason = "the logits of a micro-batch and their gradient are stored; the loss can be computed in chunks of tokens"
    return [MemoryChange(key, memory.avoidable_logits_gib, memory.peak_gib, reason)]


def _key(section: str, name: str, value: object) -> str:
    return f"{SECTION_PATHS[section]}.{name}={str(value).lower() if isinstance(value, bool) else value}"


def _waits(step: StepBreakdown, config: RunConfig, run: ProfiledRun) -> Iterator[Change]:
    """Changes for a device that waits for data, or for Python: larger micro-batches contain more work for each of its
    calls."""
    workers, idle = config.data.num_workers, step.milliseconds[kinds.IDLE]
    reason = (
        "the device waits while batches are read, collated or copied; take them from wrap.batches(), which prepares "
        f"them ahead in {workers} worker process{'es' * (workers != 1)} now"
    )
    yield Change(_key("data", "num_workers", max(1, 2 * workers)), step.milliseconds[kinds.DATA], reason)
    if config.parallel.pipeline_model_parallel_size == 1 and idle > 0.03 * step.step_ms and _can_double(config, run):
        calls = f"{step.num_kernels:,.0f} {'kernels' if step.on_gpu else 'operations'} a step"
        reason = f"Python does not keep up with {calls}; fewer and larger micro-batches have fewer"
        yield Change(_doubled(config), idle if step.on_gpu else idle / 2, reason)


def _can_double(config: RunConfig, run: ProfiledRun) -> bool:
    """Whether micro-batches can be twice as large."""
    train = config.train
    divides = train.global_batch_size % (2 * train.micro_batch_size * run.dp_size) == 0
    return divides and run.free_share > 0.4 and run.num_microbatches > 1


def _doubled(config: RunConfig) -> str:
    return _key("train", "micro_batch_size", 2 * config.train.micro_batch_size)


def _stages(step: StepBreakdown, config: RunConfig, run: ProfiledRun) -> Iterator[Change]:
    """Changes for pipeline stages that wait for each other: twice as many virtual stages, twice as many micro-batches
    of half the size, or another number of layers for each stage."""
    parallel, micro_batch_size = config.parallel, config.train.micro_batch_size
    stages, chunks = parallel.pipeline_model_parallel_size, derived.virtual_pipeline_size(config) or 1
    if stages == 1:
        return
    layers, count, parts = config.arch.num_layers, run.num_microbatches, 2 * chunks * stages
    waits = step.milliseconds[kinds.IDLE] + step.exposed_collectives.get("send and receive", 0.0)
    now = bubble(stages, chunks, count)
    reason = "stages wait for each other; with {}, the bubble is {:.1%} of a step instead of {:.1%}"
    divides = layers >= parts if parallel.pipeline_split == "cost" else layers % parts == 0
    layout_key = f"{SECTION_PATHS['parallel']}.pipeline_model_parallel_layout"
    is_named = parallel.num_layers_per_virtual_pipeline_stage is not None or (
        chunks > 1
        and parallel.pipeline_model_parallel_layout is not None
        and config.set_by(layout_key) is not SetBy.MACHINE  # a layout may be the run's own choice
    )
    if divides and not is_named and count % stages == 0:
        key = _key("parallel", "virtual_pipeline_model_parallel_size", 2 * chunks)
        then = bubble(stages, 2 * chunks, count)
        yield Change(key, waits / 2, reason.format(f"{2 * chunks} chunks on each", then, now))
    if micro_batch_size % 2 == 0:
        key = _key("train", "micro_batch_size", micro_batch_size // 2)
        then = bubble(stages, chunks, 2 * count)
        yield Change(key, waits / 2, reason.format(f"{2 * count} micro-batches of half the size", then, now))
    if run.faster_split is not None:
        layout, share = run.faster_split
        by_cost = dataclasses.replace(config, parallel=dataclasses.replace(parallel, pipeline_split="cost"))
        key = _key("parallel", "pipeline_model_parallel_layout", layout)
        if derived.splits_by_cost(by_cost):
            key = _key("parallel", "pipeline_split", "cost")
        slower, counts = 1 / (1 - share) - 1, "+".join(map(str, layout.layers))
        reason = f"the slowest stage takes {slower:.0%} longer than with {counts} layers, by their FLOPs"
        yield Change(key, share * step.step_ms, reason)


def _communication(step: StepBreakdown, config: RunConfig, run: ProfiledRun) -> Iterator[Change]:
    """Changes for exposed communication. Without tensor parallelism, all reductions and gathers are those of data
    parallelism."""
    ddp, parallel, exposed = config.ddp, config.parallel, step.exposed_collectives
    if run.dp_size > 1 and parallel.tensor_model_parallel_size == 1:
        if not ddp.overlap_grad_reduce:
            reduction = exposed.get("reduce-scatter", 0.0) + exposed.get("all-reduce", 0.0)
            reason = "gradients are reduced after the backward pass, while nothing else runs"
            yield Change(_key("ddp", "overlap_grad_reduce", True), reduction, reason)
        elif config.optimizer.use_distributed_optimizer and not ddp.overlap_param_gather:
            reason = "parameters are gathered after the update, while nothing else runs"
            yield Change(_key("ddp", "overlap_param_gather", True), exposed.get("all-gather", 0.0), reason)
    for words in ("tensor", "context"):
        name = "tensor_model_parallel_size" if words == "tensor" else "context_parallel_size"
        size = getattr(parallel, name)
        if size > 1 and size % 2 == 0 and run.free_share > 0.5:
            reason = f"{words}-parallel processes wait for each other, and {run.free_share:.0%} of the memory is free"
            yield Change(_key("parallel", name, size // 2), step.milliseconds[kinds.COMMUNICATION] / 2, reason)
            return


def _memory(step: StepBreakdown, config: RunConfig, run: ProfiledRun) -> Iterator[Change]:
    """Changes that use free memory, for larger matmuls and without recomputation: the forward, recomputed forward and
    backward pass of a whole layer take 1 : 1 : 2."""
    measured, free = step.milliseconds[kinds.MATMUL], f"{run.free_share:.0%} of the memory is free"
    if run.peak_tflops and _can_double(config, run) and config.dtype.bf16 is not False and not config.dtype.fp8:
        attainable = _ATTAINABLE * run.peak_tflops
        least = run.product_flops / attainable / 1e9  # ms
        if measured > 1.15 * least:
            rate = run.product_flops / measured / 1e9
            reason = f"matmuls run at {rate:,.0f} TFLOP/s, large ones at {attainable:,.0f}; {free}"
            yield Change(_doubled(config), measured - least, reason)
    granularity = config.recompute.recompute_granularity
    if granularity is not None and run.free_share >= 0.3:
        layer = (kinds.MATMUL, kinds.ATTENTION, kinds.ELEMENTWISE)
        repeated = (kinds.ATTENTION,) if granularity == "selective" else layer
        saved = sum(step.milliseconds[kind] for kind in repeated) / 4
        reason = f"activations are computed twice ({granularity}), and {free}"
        yield Change(_key("recompute", "__select__", "none"), saved, reason)


def _kernels(step: StepBreakdown, config: RunConfig, run: ProfiledRun) -> Iterator[Change]:
    """Changes to fewer or faster kernels with the same results."""
    times = step.milliseconds
    if step.on_gpu and not run.has_triton:
        reason = "without Triton the loss makes fp32 copies of the logits; with it, a fused kernel reads them once"
        yield Change("pip install triton", times[kinds.LOSS], reason)
    if run.can_pack and not config.flow.packing:
        saved = run.padding_share * (step.busy_ms - times[kinds.OPTIMIZER])
        reason = f"{run.padding_share:.0%} of the computed tokens are padding"
        yield Change(_key("flow", "packing", True), saved, reason)
    between = times[kinds.ELEMENTWISE] + times[kinds.COPIES]
    if run.has_transformer_engine and not run.transformer_engine_layers and between > 0.15 * step.step_ms:
        reason = "work between the matmuls takes long; Transformer Engine's layers fuse it"
        yield Change(_key("arch", "transformer_impl", "transformer_engine"), between, reason)
    if run.dp_size > 1 and not config.optimizer.use_distributed_optimizer:
        saved = times[kinds.OPTIMIZER] * (1 - 1 / run.dp_size)
        reason = f"each of {run.dp_size} replicas updates all parameters"
        yield Change(_key("optimizer", "use_distributed_optimizer", True), saved, reason)


def _precision(step: StepBreakdown, config: RunConfig, run: ProfiledRun) -> Iterator[Change]:
    if not step.on_gpu:
        return
    if not (config.dtype.bf16 or config.dtype.fp16):
        reason = "fp32 matmuls use no tensor cores; bf16 changes the results"
        yield Change(_key("dtype", "bf16", True), 0.75 * step.busy_ms, reason, changes_numbers=True)
    elif run.transformer_engine_layers and (run.peak_tflops or 0) > 900 and not config.dtype.fp8:
        reason = "FP8 matmuls run at twice the rate of bf16; they change the results, so compare the losses"
        saved = step.milliseconds[kinds.MATMUL] / 2
        yield Change(_key("dtype", "fp8", "hybrid"), saved, reason, changes_numbers=True)
