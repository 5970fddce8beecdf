"""All checks that the configuration alone decides: no files, no torch, any number of processes.

A contradiction is refused, never repaired. Messages begin with the file and line of the value to change and its dotted
path, and name the legal values. Types and ranges of a shipped flow's keys are those of the shipped JSON schema,
because the flow's code imports torch.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal, Union

from megatron_wrap.config.checks.contradictions import check_each, check_needs, refuse
from megatron_wrap.config.checks.layout import check_layout
from megatron_wrap.config.checks.model import check_model
from megatron_wrap.config.checks.training import check_training
from megatron_wrap.config.reading.tree import shipped_flow_keys
from megatron_wrap.config.reading.yaml_nodes import describe, inline_yaml
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.familiar_names import unknown_key_hint
from megatron_wrap.config.schema.keys import Mismatch, Range, check_value, key_ranges
from megatron_wrap.config.schema.launch import RENDERED_OPTIONS
from megatron_wrap.config.schema.run import SECTION_PATHS, UPSTREAM, RunConfig
from megatron_wrap.errors import ConfigError, Mistakes, PlatformError
from megatron_wrap.platform.base.platform import NEEDS_CUDA

_TYPES: Mapping[str, Any] = {"integer": int, "number": float, "boolean": bool, "string": str, "null": type(None)}


def check_configuration(config: RunConfig) -> None:
    """Check a decoded configuration.

    Raises:
        ConfigError, LayoutError: values that contradict each other, or that no number of processes can run.
    """
    check_values(config)
    check_each(
        config,
        # necessary for every larger number of processes too, which is a multiple of this one
        (check_flow_options, lambda config: check_layout(config, derived.processes_needed(config))),
    )


def check_values(config: RunConfig) -> None:
    """Check the values of a configuration; accesses no files.

    Raises:
        ConfigError, LayoutError, PlatformError: values that contradict each other or are out of range.
    """
    _check_ranges(config)  # the other checks compute with the values
    check_each(config, (check_needs, check_model, check_training, _check_graphs, _check_platform, _check_slurm))


def _check_graphs(config: RunConfig) -> None:
    """Check that CUDA graphs of layers have constant shapes. Other implementations are captured by Megatron-LM's loop,
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
    if config.arch.transformer_impl == "transformer_engine" and config.parallel.context_parallel_size > 1:
        rule = "Transformer Engine's attention under context parallelism cannot be captured; write torch, or none"
        refuse(config, ["arch.transformer_impl", *keys], rule)
    if (mode := config.train.router_replay) != "disabled":
        rule = f"CUDA graphs of layers replay no recorded routing; write none for router_replay {mode}"
        refuse(config, [*keys, "train.router_replay"], rule)
    _check_graphs_of_experts(config, keys)
    if derived.varies_in_length(config):
        rule = "CUDA graphs need micro-batches of one shape; write collate_type: fixed_length without packing, or none"
        refuse(config, [*keys, "flow.flow_key"], rule)


def _check_graphs_of_experts(config: RunConfig, keys: list[str]) -> None:
    """Check the graphs of layers with experts. A graph of such a layer ends before the exchange of its tokens
    (nn/experts/layer.py); for other layers the host would wait during the capture."""
    arch, parallel = config.arch, config.parallel
    exchanges = parallel.expert_model_parallel_size > 1 or derived.expert_tensor_parallel_size(parallel) > 1
    if arch.num_experts is None or not exchanges:
        return
    if not derived.sorts_tokens_on_device(arch) or config.recompute.recompute_granularity is not None:
        rule = (
            "CUDA graphs of layers that exchange tokens need experts_impl grouped_mm, moe_token_dispatcher_type "
            "alltoall, no recomputation, capacity factor, latent experts and moe_shared_expert_overlap; write none"
        )
        refuse(config, [*keys, "arch.num_experts"], rule)


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
        for name, allowed in key_ranges(type(decoded)).items():
            value = getattr(decoded, name)
            if value is not None and not allowed.holds(value):
                null = "; null disables it" if allowed.null_means_off else ""
                with mistakes.collected():
                    refuse(config, [f"{section}.{name}"], f"must be {allowed}, not {value}{null}", ConfigError)
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


def check_flow_options(config: RunConfig) -> None:
    """Check the keys of a shipped flow; those of another flow, and contradictions between keys, need its code.

    Raises:
        ConfigError: an unknown key, a wrong type, or a value out of range.
    """
    known = shipped_flow_keys().get(config.flow.flow_key)
    if known is None:
        return
    for name, value in config.flow.options.items():
        key = [f"flow.{name}"]
        if name not in known:
            hint = unknown_key_hint(f"{SECTION_PATHS['flow']}.{name}", known) or f"; the keys are {', '.join(known)}"
            refuse(config, key, f"unknown key{hint}")
        try:
            check_value(value, _type(known[name]))
        except Mismatch as mismatch:
            refuse(config, key, f"{mismatch}, not {describe(value)}")
        bound = known[name].get
        allowed = Range(bound("minimum"), bound("exclusiveMinimum"), bound("maximum"), bound("exclusiveMaximum"))
        if value is not None and not allowed.holds(value):
            refuse(config, key, f"must be {allowed}, not {value}")


def _type(schema: Mapping[str, Any]) -> Any:
    """The type whose values the schema (of `type_schema`) describes."""
    if "enum" in schema:
        return Literal[tuple(schema["enum"])]
    if "anyOf" in schema:
        members = sorted(schema["anyOf"], key=lambda member: member.get("type") == "array")  # shown last
        return Union[tuple(map(_type, members))]  # noqa: UP007 - the members are only known now
    kinds = schema["type"]
    if isinstance(kinds, list):
        return Union[tuple(_type({**schema, "type": kind}) for kind in kinds)]  # noqa: UP007
    return tuple[_type(schema["items"]), ...] if kinds == "array" else _TYPES[kinds]  # type: ignore[misc]
