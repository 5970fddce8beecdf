"""Contradictions between the parallel layout, the model and a number of processes, which must hold whole replicas."""

import math
import os
import shlex
import sys
from collections.abc import Sequence

from megatron_wrap.config.checks.contradictions import check_each, divisors, neighbours, refuse
from megatron_wrap.config.reading.pipeline_layout import parse_layout
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.run import SECTION_PATHS, RunConfig
from megatron_wrap.errors import LayoutError
from megatron_wrap.metrics.number_format import counted


def check_parallel(config: RunConfig) -> None:
    """Check the parallel layout against the architecture.

    Raises:
        ConfigError, LayoutError: values that contradict each other; see `check_each`.
    """
    check_each(config, (_check_sharding, _check_overlapped_communication, _check_head_exchange, _check_pipeline))


def check_layout(config: RunConfig, world_size: int) -> int:
    """Check the configuration for `world_size` processes (all nodes); returns the data-parallel size.

    Raises:
        LayoutError: the processes are no multiple of a model replica, or a batch does not divide.
    """
    parallel, train = config.parallel, config.train
    replica = derived.replica_processes(config)
    if world_size % replica:
        sizes = (
            f"TP {parallel.tensor_model_parallel_size} x PP {parallel.pipeline_model_parallel_size} x "
            f"CP {parallel.context_parallel_size}"
        )
        raise LayoutError(
            f"{counted(world_size, 'process')} {'does' if world_size == 1 else 'do'} not hold whole replicas of the "
            f"model: {sizes} = {counted(replica, 'process')} each; start a multiple of "
            f"{replica}{_launch_command(world_size, replica)}, or change {SECTION_PATHS['parallel']}"
        )
    if config.arch.num_experts is not None and world_size % derived.expert_processes(parallel):
        raise LayoutError(
            f"{world_size} processes do not hold whole replicas of the experts: expert TP x EP x PP = "
            f"{derived.expert_processes(parallel)} processes each; start a multiple of it, or change "
            f"{SECTION_PATHS['parallel']}.expert_model_parallel_size"
        )
    data_parallel = derived.data_parallel_size(config, world_size)
    unit = train.micro_batch_size * data_parallel
    for size in derived.global_batch_sizes(config):
        if size % unit:
            refuse(
                config,
                ["train.global_batch_size" if size == train.global_batch_size else "train.rampup_batch_size"],
                f"the global batch of {counted(size, 'sample')} is not divisible by micro_batch_size "
                f"{train.micro_batch_size} x data-parallel size {data_parallel} "
                f"({counted(world_size, 'process')} / {replica}) = {unit}; "
                f"nearest legal sizes: {neighbours(size, unit)}",
                LayoutError,
            )
        _check_interleaving(config, data_parallel, size)
    return data_parallel


def _launch_command(world_size: int, processes: int) -> str:
    """The hint to start a user's program under torchrun instead of plain python; empty for processes of a launcher."""
    if world_size > 1 or "WORLD_SIZE" in os.environ or not sys.argv[0].endswith(".py"):
        return ""
    return f": `torchrun --nproc-per-node {processes} {shlex.join(sys.argv)}`"


def _check_interleaving(config: RunConfig, data_parallel: int, global_batch_size: int) -> None:
    # pipeline_parallel/schedules.py: groups of exactly PP micro-batches
    stages = config.parallel.pipeline_model_parallel_size
    if derived.virtual_pipeline_size(config) is None or "microbatch_group_size_per_vp_stage" in config.arch.upstream:
        return
    count = derived.num_microbatches(config, data_parallel, global_batch_size)
    if count % stages:
        unit = stages * config.train.micro_batch_size * data_parallel
        refuse(
            config,
            ["train.global_batch_size"],
            f"an interleaved pipeline of {stages} stages needs a multiple of {stages} micro-batches per step, and the "
            f"{counted(global_batch_size, 'sample')} of a batch are {count}; nearest legal sizes: "
            f"{neighbours(global_batch_size, unit)}",
            LayoutError,
        )


def _check_sharding(config: RunConfig) -> None:
    arch, tensor = config.arch, config.parallel.tensor_model_parallel_size
    key = "parallel.tensor_model_parallel_size"
    split = {
        "num_attention_heads": arch.num_attention_heads,
        "num_query_groups": derived.num_query_groups(arch),
    }
    if arch.multi_latent_attention:  # MLASelfAttention builds them even if they are replaced later
        split["kv_lora_rank + qk_pos_emb_head_dim"] = arch.kv_lora_rank + arch.qk_pos_emb_head_dim
        split["q_lora_rank"] = arch.q_lora_rank or 0
    if 0 in derived.moe_layer_pattern(arch):
        split["ffn_hidden_size"] = derived.ffn_hidden_size(arch)
    if arch.num_experts is not None and arch.moe_shared_expert_intermediate_size is not None:
        split["moe_shared_expert_intermediate_size"] = arch.moe_shared_expert_intermediate_size
    for name, count in split.items():
        if count % tensor:
            refuse(
                config,
                [key, f"arch.{name.split()[0]}"],
                f"{name} {count} is not divisible by tensor_model_parallel_size {tensor}; "
                f"legal sizes for this model: {divisors(math.gcd(*split.values()))}",
            )


def _check_overlapped_communication(config: RunConfig) -> None:
    parallel = config.parallel
    split = parallel.tensor_model_parallel_size > 1 and not derived.sequence_parallel(parallel)
    if parallel.tp_comm_overlap and split:
        rule = "true overlaps the communication of sequence parallelism; write sequence_parallel: null, or false here"
        refuse(config, ["parallel.tp_comm_overlap", "parallel.sequence_parallel"], rule)


def _check_head_exchange(config: RunConfig) -> None:
    parallel = config.parallel
    if parallel.cp_comm_type != "a2a" or derived.exchanged_groups(config) is not None:
        return
    heads, groups = derived.attention_heads_of_process(config)
    legal = [size for size in range(1, heads + 1) if heads % size == 0 and (groups % size == 0 or size % groups == 0)]
    refuse(
        config,
        ["parallel.cp_comm_type", "parallel.context_parallel_size", "arch.num_attention_heads"],
        f"a2a gives each of {parallel.context_parallel_size} context-parallel processes an equal share of heads, and a "
        f"tensor-parallel process has {counted(heads, 'head')} of {counted(groups, 'query group')}; legal "
        f"context_parallel_size: {', '.join(map(str, legal))}; or write all_gather or null",
    )


def _check_pipeline(config: RunConfig) -> None:
    parallel, layers = config.parallel, config.arch.num_layers
    stages = parallel.pipeline_model_parallel_size
    chunks, per_chunk = parallel.virtual_pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage
    virtual_keys = ["parallel.num_layers_per_virtual_pipeline_stage", "parallel.virtual_pipeline_model_parallel_size"]
    if parallel.pipeline_model_parallel_layout is not None:
        _check_pipeline_layout(config, parallel.pipeline_model_parallel_layout)
        return
    if derived.splits_by_cost(config):
        _check_enough_layers(config, stages * (chunks or 1))
        return
    key = virtual_keys[0 if per_chunk is not None else 1]
    ends = [f"decoder_{end}_pipeline_num_layers" for end in ("first", "last")]
    uneven = [name for name in ends if getattr(parallel, name) is not None]
    if uneven:
        _check_uneven(config, uneven)
    elif derived.accounts_for_ends(config):
        return  # Megatron-Core checks these splits itself
    elif layers % stages:
        refuse(
            config,
            ["parallel.pipeline_model_parallel_size", "arch.num_layers"],
            f"num_layers {layers} is not divisible by pipeline_model_parallel_size {stages}; legal sizes: "
            f"{divisors(layers)}; or split unevenly with pipeline_split cost or {ends[0]} and {ends[1]}",
        )
    elif per_chunk is not None and layers // stages % per_chunk:
        refuse(
            config,
            [key],
            f"{per_chunk} does not divide the {layers // stages} layers of a stage; "
            f"legal: {divisors(layers // stages)}",
        )
    if chunks is not None:
        for count in derived.layers_per_stage(config):
            if count % chunks:
                rule = f"{chunks} chunks do not divide a stage of {counted(count, 'layer')}; legal: {divisors(count)}"
                refuse(config, [key], rule)


def _check_pipeline_layout(config: RunConfig, text: str) -> None:
    parallel, key = config.parallel, "parallel.pipeline_model_parallel_layout"
    try:
        layout = parse_layout(text, config.arch.num_layers, parallel.pipeline_model_parallel_size)
    except ValueError as error:
        refuse(config, [key], f"{text} {error}")
    chunks = parallel.virtual_pipeline_model_parallel_size
    if chunks is not None and chunks != layout.chunks_per_stage:
        other = "parallel.virtual_pipeline_model_parallel_size"
        rule = f"{text} has {counted(layout.chunks_per_stage, 'part')} for each stage, not {chunks}; delete {other}"
        refuse(config, [key, other], rule)


def _check_enough_layers(config: RunConfig, num_chunks: int) -> None:
    layers, stages = config.arch.num_layers, config.parallel.pipeline_model_parallel_size
    if layers < num_chunks:
        refuse(
            config,
            ["parallel.pipeline_model_parallel_size", "arch.num_layers"],
            f"{counted(layers, 'layer')} cannot be split over {stages} stages of "
            f"{counted(num_chunks // stages, 'chunk')}; lower pipeline_model_parallel_size or "
            "virtual_pipeline_model_parallel_size",
        )


def _check_uneven(config: RunConfig, ends: Sequence[str]) -> None:
    parallel, layers = config.parallel, config.arch.num_layers
    stages = parallel.pipeline_model_parallel_size
    keys = [f"parallel.{name}" for name in ends]
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        rule = "stages of an uneven split differ; set virtual_pipeline_model_parallel_size (chunks per stage) instead"
        refuse(config, ["parallel.num_layers_per_virtual_pipeline_stage"], rule)
    at_ends = sum(getattr(parallel, name) for name in ends)
    middle_stages, middle = stages - len(ends), layers - at_ends
    if middle < 0 or bool(middle) != bool(middle_stages) or (middle_stages and middle % middle_stages):
        refuse(
            config,
            keys,
            f"{' and '.join(ends)} take {at_ends} of {layers} layers and leave {middle} for {middle_stages} other "
            f"stages, which must be a positive multiple of {middle_stages}"
            if middle_stages
            else f"{' and '.join(ends)} take {at_ends} of {layers} layers, and no stage is left for the rest",
        )
