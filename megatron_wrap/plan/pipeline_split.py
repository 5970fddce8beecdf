"""Splits a model's layers over pipeline stages so that the slowest stage takes as little time as possible; the time of
each part in a training step is its FLOPs over measured speeds of the device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_wrap.config.defaults import Choice, with_choices
from megatron_wrap.config.reading.pipeline_layout import PipelineLayout, even_layout
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.derived import fp8_settings
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.plan.model_parts import (
    OUTPUT,
    ModelShape,
    Part,
    TrainedParts,
    attention_width,
    layer_parts,
    output_weights,
)


@dataclass(frozen=True)
class DeviceSpeed:
    """Speeds of a device within a bf16 training step."""

    matmuls: float
    """FLOP/s of matmuls."""
    attention: float
    """FLOP/s of causal attention, without the FLOPs of masked scores."""
    elementwise: float
    """Seconds of a layer's norms, rotary embedding, activation and additions, for each token and hidden unit."""
    loss: float
    """Seconds of the loss, for each token and entry of the vocabulary."""


_HOPPER_BANDWIDTHS = {"H200": 4.8, "H100": 3.35, "H800": 3.35}
"""Memory bandwidth in TB/s, from the data sheets."""
_H200 = DeviceSpeed(matmuls=721e12, attention=290e12, elementwise=3.74e-11, loss=1.67e-12)
"""From `megatron-wrap profile` of the 1.5B Llama at 4,096 tokens, forward and backward (docs/profiling.md)."""
SPEEDS = {
    name: DeviceSpeed(
        matmuls=_H200.matmuls,
        attention=_H200.attention,
        elementwise=_H200.elementwise * _HOPPER_BANDWIDTHS["H200"] / bandwidth,
        loss=_H200.loss * _HOPPER_BANDWIDTHS["H200"] / bandwidth,
    )
    for name, bandwidth in _HOPPER_BANDWIDTHS.items()
}
"""Part of a GPU's name -> its speeds. The Hopper chips differ in the bandwidth of their memory."""
ANY_DEVICE = DeviceSpeed(matmuls=1.0, attention=0.5, elementwise=0.0, loss=0.0)
"""Other devices, in FLOPs: attention at half of the matmuls' speed, a rounded ratio of the H200's."""
_FP8_MATMULS = 1.62
"""Speed of a layer's matmuls in FP8, relative to bf16 (docs/performance.md)."""


@dataclass(frozen=True)
class ModelCosts:
    """Seconds of forward and backward pass for each token, of the whole model on one device, or in units of FLOPs on a
    device without measured speeds. Tensor and context parallelism divide all of them alike."""

    layers: tuple[float, ...]
    """Cost of each transformer layer."""
    embedding: float
    output: float
    """Cost of output layer and loss, and of the layers for multi-token prediction, which are on the same stage."""


def device_speed(device: str) -> DeviceSpeed:
    """The speeds of a GPU by its name; those of `ANY_DEVICE` if it was not measured."""
    return next((speed for name, speed in SPEEDS.items() if name in device), ANY_DEVICE)


def model_costs(config: RunConfig, shape: ModelShape, device: str) -> ModelCosts:
    """The costs of a run's model for sequences of `seq_length` tokens. A frozen weight has no gradient; all inputs
    have, as those of a pipeline stage do in Megatron-Core (pipeline_parallel/p2p_communication.py).

    Args:
        device: name of the GPU; "" on CPUs.
    """
    arch, speed, seq_length = shape.arch, device_speed(device), config.train.seq_length
    # forward and backward pass are three forward passes if all is trained; recomputation adds a part of one
    granularity = config.recompute.recompute_granularity
    passes = 4.0 if granularity == "full" else 3.0
    attention_passes = 4.0 if granularity is not None else 3.0
    faster = 1.0 if fp8_settings(config) is None else _FP8_MATMULS
    elementwise = speed.elementwise * arch.hidden_size
    attention = attention_passes * attention_width(arch) * seq_length / speed.attention
    trained = TrainedParts(shape)

    def matmuls(prefix: str, parts: Iterable[Part], passes: float) -> float:
        return (
            sum(2 * part.weights * (passes - 1 + trained.share(prefix + part.name)) for part in parts) / speed.matmuls
        )

    def layer(prefix: str, has_experts: int, is_linear: int) -> float:
        parts = itertools.chain(*layer_parts(arch, bool(has_experts), bool(is_linear)))
        return matmuls(prefix, parts, passes) / faster + (0.0 if is_linear else attention) + elementwise * passes / 3

    output = matmuls("", [Part(OUTPUT, weights=output_weights(shape))], 3.0)
    output += speed.loss * (shape.output_size or shape.vocab_size)
    experts, ahead = derived.moe_layer_pattern(arch), 0.0
    for number in range(derived.trained_prediction_layers(arch)):
        prefix = f"mtp_block.layers.{number}."
        ahead += matmuls(prefix, [Part("eh_proj", weights=2 * arch.hidden_size**2)], passes)
        ahead += layer(f"{prefix}transformer_layer.", experts[-1], 0) + output
    kinds = zip(experts, derived.linear_layer_pattern(arch), strict=True)
    return ModelCosts(
        layers=tuple(layer(f"decoder.layers.{number}.", *kind) for number, kind in enumerate(kinds)),
        embedding=elementwise / 3,
        output=output + ahead,
    )


LAYOUT_KEY = "parallel.pipeline_model_parallel_layout"


def with_split(config: RunConfig, shape: ModelShape, device: str, saved: str | None = None) -> RunConfig:
    """The configuration, to which the layers of each pipeline stage are added if no key names them."""
    choice = split_choice(config, shape, device, saved)
    return config if choice is None else with_choices(config, (choice,))


def split_choice(config: RunConfig, shape: ModelShape, device: str, saved: str | None = None) -> Choice | None:
    """The split of a run whose configuration names none, with what it is expected to waste; None: nothing to choose.

    Args:
        shape: shape of the run's model.
        device: name of the GPU, the same on all ranks; "" on CPUs.
        saved: the split of the checkpoint from which the run continues bit for bit.
    """
    if not derived.splits_by_cost(config):
        return None
    if saved is not None:
        return Choice(LAYOUT_KEY, saved, "as in the checkpoint from which the run resumes")
    stages, chunks = config.parallel.pipeline_model_parallel_size, derived.virtual_pipeline_size(config) or 1
    costs = model_costs(config, shape, device)
    layout = split_by_cost(costs, stages, chunks)
    even = even_layout(config.arch.num_layers, stages, chunks)
    reason = f"layers {_counts(layout)}; {_waste(costs, layout)}"
    if even is not None and even != layout:
        reason += f" ({_counts(even)}: {_waste(costs, even)})"
    return Choice(LAYOUT_KEY, str(layout), reason)


def faster_split(config: RunConfig, shape: ModelShape, device: str) -> tuple[PipelineLayout, float] | None:
    """The split by cost of a pipeline that has another one, and the share of a step that it would save; None: the
    pipeline has it, or there is no pipeline. Same arguments as `split_choice`, with a configuration that names a split.
    """
    stages = config.parallel.pipeline_model_parallel_size
    if stages == 1 or derived.accounts_for_ends(config):
        return None
    layout, chunks = named_split(config), derived.virtual_pipeline_size(config) or 1
    costs = model_costs(config, shape, device)
    best = split_by_cost(costs, stages, chunks)
    share = 1 - max(stage_costs(costs, best)) / max(stage_costs(costs, layout))
    return (best, share) if share > 0 else None


def named_split(config: RunConfig) -> PipelineLayout:
    """The layers of each chunk of a configuration that names them, or leaves Megatron-Core's even split."""
    layout, chunks = derived.pipeline_layout(config), derived.virtual_pipeline_size(config) or 1
    if layout is not None:
        return layout
    counts = [count // chunks for count in derived.layers_per_stage(config)]
    return PipelineLayout(tuple(counts * chunks), config.parallel.pipeline_model_parallel_size)


def split_by_cost(costs: ModelCosts, num_stages: int, chunks_per_stage: int = 1) -> PipelineLayout:
    """The layers of each chunk for the fastest slowest stage; among equally fast ones the stages, then the chunks, are
    as equal as possible. Each chunk has at least one layer.

    Exact for one chunk on each stage and for equal layers (`tests/unit/plan/test_pipeline_split.py`); for several
    chunks of unequal layers it is the best of three starts that are improved layer by layer, never slower than an even
    split.
    """
    num_chunks, num_layers = num_stages * chunks_per_stage, len(costs.layers)
    assert num_layers >= num_chunks, "each chunk has a layer (config/checks/model.py)"
    sums = list(itertools.accumulate(costs.layers, initial=0.0))
    even = [num_layers * (chunk + 1) // num_chunks - num_layers * chunk // num_chunks for chunk in range(num_chunks)]
    starts = [even, even[::-1], _fastest_chunks(costs, sums, num_chunks)]
    improved = [_improved(costs, sums, counts, num_stages) for counts in starts]
    return PipelineLayout(min(improved, key=lambda counts: _badness(costs, sums, counts, num_stages)), num_stages)


def _fastest_chunks(costs: ModelCosts, sums: Sequence[float], num_chunks: int) -> list[int]:
    """Layers of each chunk for the fastest slowest chunk, by dynamic programming over the chunk and its last layer."""
    num_layers = len(costs.layers)
    slowest, begins = [costs.embedding + cost for cost in sums], []
    for chunk in range(1, num_chunks):
        last = costs.output if chunk == num_chunks - 1 else 0.0
        columns: list[tuple[float, int]] = [(math.inf, 0)] * (num_layers + 1)
        for end in range(chunk + 1, num_layers + 1):
            columns[end] = min((max(slowest[at], sums[end] - sums[at] + last), at) for at in range(chunk, end))
        slowest = [value for value, _ in columns]
        begins.append([begin for _, begin in columns])
    counts, end = [], num_layers
    for column in reversed(begins):
        counts.append(end - column[end])
        end = column[end]
    return [end, *reversed(counts)]


def _improved(costs: ModelCosts, sums: Sequence[float], counts: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Move one layer at a time into or out of a slowest stage while that helps."""
    num_chunks = len(counts)
    best = _badness(costs, sums, counts, num_stages)
    while True:
        stages = _stage_costs(costs, sums, counts, num_stages)
        slowest = max(range(num_stages), key=stages.__getitem__)
        moved = [
            [count - (chunk == giver) + (chunk == taker) for chunk, count in enumerate(counts)]
            for giver in range(num_chunks)
            for taker in range(num_chunks)
            if counts[giver] > 1 and giver != taker and (num_chunks < 24 or giver % num_stages == slowest)
        ]
        candidate = min(moved, key=lambda counts: _badness(costs, sums, counts, num_stages), default=counts)
        badness = _badness(costs, sums, candidate, num_stages)
        if badness >= best:
            return tuple(counts)
        counts, best = candidate, badness


def stage_costs(costs: ModelCosts, layout: PipelineLayout) -> tuple[float, ...]:
    """Seconds of each stage for a token, first to last."""
    sums = list(itertools.accumulate(costs.layers, initial=0.0))
    return tuple(_stage_costs(costs, sums, layout.layers, layout.num_stages))


def waste(costs: ModelCosts, layout: PipelineLayout) -> float:
    """Share of the stages' time in which they wait for the slowest one, without the pipeline's bubble; 0 to 1."""
    stages = stage_costs(costs, layout)
    return 1 - sum(stages) / (len(stages) * max(stages))


def bubble(num_stages: int, chunks_per_stage: int, num_microbatches: int) -> float:
    """Share of a step in which equal stages wait while the pipeline fills and drains, 0 to 1 (Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2)."""
    return (num_stages - 1) / (chunks_per_stage * num_microbatches + num_stages - 1)


def _chunk_costs(costs: ModelCosts, sums: Sequence[float], counts: Sequence[int]) -> list[float]:
    ends = list(itertools.accumulate(counts, initial=0))
    chunks = [sums[end] - sums[start] for start, end in itertools.pairwise(ends)]
    chunks[0] += costs.embedding
    chunks[-1] += costs.output
    return chunks


def _stage_costs(costs: ModelCosts, sums: Sequence[float], counts: Sequence[int], num_stages: int) -> list[float]:
    chunks = _chunk_costs(costs, sums, counts)
    return [sum(chunks[stage::num_stages]) for stage in range(num_stages)]


def _badness(
    costs: ModelCosts, sums: Sequence[float], counts: Sequence[int], num_stages: int
) -> tuple[float, float, float]:
    """Cost of the slowest stage, and sums of squares over stages and over chunks, as shares of the model's cost. They
    are rounded to a billionth, so that the order of additions does not decide."""
    whole = sums[-1] + costs.embedding + costs.output
    chunks = [chunk / whole for chunk in _chunk_costs(costs, sums, counts)]
    stages = [sum(chunks[stage::num_stages]) for stage in range(num_stages)]
    return round(max(stages), 9), round(sum(stage**2 for stage in stages), 9), round(sum(c**2 for c in chunks), 9)


def _counts(layout: PipelineLayout) -> str:
    """The split as text, such as `10+6`, or with two chunks on each stage `3+3+3+1, stages 6+4`."""
    counts = "+".join(map(str, layout.layers))
    return counts if layout.chunks_per_stage == 1 else f"{counts}, stages {'+'.join(map(str, layout.layers_per_stage))}"


def _waste(costs: ModelCosts, layout: PipelineLayout) -> str:
    return f"stages wait {waste(costs, layout):.1%} of the time for the slowest"
