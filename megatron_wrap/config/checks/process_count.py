"""Whether a number of processes holds whole replicas of the model, and the batches divide over them."""

import os
import shlex
import sys

from megatron_wrap.config.checks.located_errors import neighbours, refuse
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.run import SECTION_PATHS, RunConfig
from megatron_wrap.errors import LayoutError
from megatron_wrap.metrics.number_format import counted


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
