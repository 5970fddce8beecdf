"""The checks of a whole run: `check_run` needs no process, `check_layout` needs their number.

A contradiction is refused, never repaired. Messages begin with the file and line of the value to change and its dotted
path, and name the legal values.
"""

import os
import re
import shlex
import sys
from dataclasses import fields

from megatron_wrap.config.checks.contradictions import check_needs
from megatron_wrap.config.checks.located_errors import check_each, neighbours, refuse
from megatron_wrap.config.checks.model import check_model
from megatron_wrap.config.checks.paths import check_paths
from megatron_wrap.config.checks.training import check_training
from megatron_wrap.config.reading.yaml_nodes import inline_yaml
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.keys import key_range
from megatron_wrap.config.schema.launch.slurm import RENDERED_OPTIONS
from megatron_wrap.config.schema.run import SECTION_PATHS, UPSTREAM, RunConfig
from megatron_wrap.errors import ConfigError, LayoutError, Mistakes, PlatformError
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.platform.base.platform import NEEDS_CUDA


def check_run(config: RunConfig) -> None:
    """Check a configuration as far as possible before a process starts.

    Raises:
        ConfigError, LayoutError: values that contradict each other or are out of range.
        DataError, CheckpointError: a data file or checkpoint is missing or cannot be read.
    """
    check_values(config)
    check_paths(config)


def check_values(config: RunConfig) -> None:
    """The part of `check_run` that checks values alone and does not access the disk."""
    _check_ranges(config)  # the others compute with the values
    check_each(config, (check_needs, check_model, check_training, _check_graphs, _check_platform, _check_slurm))


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
    """How to start a program of the user that runs under plain python; empty for processes of a launcher."""
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


def _check_graphs(config: RunConfig) -> None:
    """CUDA graphs of layers have constant shapes. Those of other implementations are captured by Megatron-LM's loop,
    and would silently be missing here."""
    upstream = config.arch.upstream
    implementation = upstream.get("cuda_graph_impl", "none")
    if implementation not in ("none", "local"):
        refuse(config, ["arch.cuda_graph_impl"], f"{implementation} is captured by Megatron-LM's loop; write local")
    if upstream.get("external_cuda_graph"):
        refuse(config, ["arch.external_cuda_graph"], "is captured by Megatron-LM's loop; write cuda_graph_impl: local")
    if not derived.captures_graphs(config.arch):
        return
    keys = [f"arch.{name}" for name in ("cuda_graph_impl", "enable_cuda_graph") if name in upstream]
    if config.adapter.adapter_type != "none":
        refuse(config, [*keys, "adapter.adapter_type"], "CUDA graphs call no adapters of a layer; write none here")
    if derived.varies_in_length(config):
        rule = "CUDA graphs need micro-batches of one shape; write collate_type: fixed_length without packing, or none"
        refuse(config, [*keys, "flow.flow_key"], rule)


def _check_platform(config: RunConfig) -> None:
    """Check fields of Megatron-Core's dataclasses against a platform that the configuration names."""
    for section in UPSTREAM if config.init.platform == "cpu" else ():
        for name, value in getattr(config, section).upstream.items():
            if value not in NEEDS_CUDA.get(name, (value,)):
                working = " or ".join(map(inline_yaml, NEEDS_CUDA[name]))
                rule = f"{inline_yaml(value)} does not work on platform cpu; write {working}, or delete it"
                refuse(config, [f"{section}.{name}", "init.platform"], rule, PlatformError)


def _check_ranges(config: RunConfig) -> None:
    mistakes = Mistakes()
    for section in SECTION_PATHS:
        decoded = getattr(config, section)
        for field in fields(decoded):
            allowed, value = key_range(field), getattr(decoded, field.name)
            if allowed is not None and value is not None and not allowed.holds(value):
                null = "; null disables it" if allowed.null_means_off else ""
                with mistakes.collected():
                    refuse(config, [f"{section}.{field.name}"], f"must be {allowed}, not {value}{null}", ConfigError)
    mistakes.raise_first()


def _check_slurm(config: RunConfig) -> None:
    """Check options that are passed to sbatch and srun."""
    for name in ("sbatch_options", "srun_options"):
        for option in getattr(config.slurm, name):
            if not re.match(r"--?[A-Za-z]", option):
                refuse(
                    config, [f"slurm.{name}"], f"{option!r} is no option; write it as on the command line, --name=value"
                )
    for option in config.slurm.sbatch_options:
        owner = RENDERED_OPTIONS.get(re.split(r"[=\s]", option)[0])
        if owner is not None:
            refuse(config, ["slurm.sbatch_options"], f"{option} follows from {owner}; set that instead")
