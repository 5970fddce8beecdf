"""Defaults that depend on machine and layout: the choices for keys that the YAML leaves null, each with its reason.

A default is a table of rows (condition, value, reason), the first of which that holds applies. `megatron-wrap explain`
prints the choices; a value in the YAML takes precedence. docs/performance.md has the measurements.
"""

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_wrap.config.reading.tree import Origin, SetBy
from megatron_wrap.config.reading.yaml_nodes import Node
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.derived import fp8_settings
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.config.schema.run import SECTION_PATHS, RunConfig
from megatron_wrap.platform.base.machine import Machine

OPTIMIZER_KEYS = ("optimizer.use_distributed_optimizer",)
OVERLAP_KEYS = ("ddp.overlap_grad_reduce", "ddp.overlap_param_gather")
FUSED_CLIPPING = "optimizer.fused_clipping"
OVERLAPPED_COMMUNICATION = "parallel.tp_comm_overlap"
LAYERS = "arch.transformer_impl"
GRAPHS = "arch.cuda_graph_impl"
_HIDING_ELEMENTS = 2**24
"""Smallest product of a micro-batch's tokens and the hidden size, for each tensor-parallel process, from which torch's
layers without CUDA graphs gain by overlapped communication (`scripts/benchmark/gpu_two.sh`). With fewer tokens the
layers wait for Python, which queues more kernels for it."""
_GRAPHS_FROM = (0, 19)
"""First version of Megatron-Core for which CUDA graphs of layers were measured."""
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Environment variable: number of hardware queues of a GPU."""
TRANSFORMER_ENGINE_CROSS_ENTROPY_FROM = (2, 18)
"""First version of Transformer Engine whose cross-entropy has correct gradients in bf16."""
FP8_GATHER_FROM = (0, 19)
"""The first Megatron-Core that computes the transposes of FP8 weights after a forced gather with overlap_param_gather
(param_and_grad_buffer.py, start_param_sync)."""
_SHIPPED_PROVIDERS = ("gpt_model", derived.VALUE_PROVIDER)


@dataclass(frozen=True)
class Choice:
    """The value of a key on this machine."""

    key: str
    """section.key of `RunConfig`, or the name of an environment variable."""
    value: Any
    reason: str

    @property
    def path(self) -> str:
        """Dotted path of the key in the YAML; the name of an environment variable stays as it is."""
        section, dot, key = self.key.partition(".")
        return f"{SECTION_PATHS[section]}.{key}" if dot else section

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.path} {value}: {self.reason}"


class _Row(NamedTuple):
    """A default that applies where `condition` is true."""

    condition: Any
    value: Any
    reason: str
    must: bool = False
    """Whether any other value would be refused, also the value of a checkpoint."""


def _first(key: str, rows: Iterable[_Row], saved: Mapping[str, Any] | None = None) -> Choice:
    """The choice of the first row that applies.

    Args:
        saved: section.key -> value in the checkpoint that the run resumes from.
    """
    row = next(row for row in rows if row.condition)
    if saved is not None and key in saved and not row.must:
        return Choice(key, saved[key], "as in the checkpoint from which the run resumes")
    return Choice(key, row.value, row.reason)


def choices(
    config: RunConfig, machine: Machine, shards: int, saved: Mapping[str, bool] | None = None
) -> tuple[Choice, ...]:
    """The choices for keys of optimizer and communication that the configuration leaves null.

    Args:
        shards: processes that share a gradient, DP * CP.
        saved: section.key -> value in the checkpoint that the run resumes from.
    """
    distributed = _first("optimizer.use_distributed_optimizer", _distributed(config, machine, shards), saved)
    is_distributed = bool(_decided(config, distributed))
    reduce = _first("ddp.overlap_grad_reduce", _overlapped_reduce(config, machine, shards), saved)
    is_overlapped = bool(_decided(config, reduce))
    gather_rows = _overlapped_gather(config, machine, is_distributed, is_overlapped)
    gather = _first("ddp.overlap_param_gather", gather_rows, saved)
    chosen = [distributed, reduce, gather, _first(FUSED_CLIPPING, _fused_clipping(config, machine), saved)]
    if config.ddp.ddp_bucket_size is None and is_overlapped:
        size = max(40_000_000, 1_000_000 * shards)  # distributed_data_parallel.py
        chosen.append(Choice("ddp.ddp_bucket_size", size, f"Megatron-Core's rule for {shards} processes"))
    return (
        *(choice for choice in chosen if config.value(choice.key) is None),
        *layer_choices(config, machine, saved),
    )


def layer_choices(config: RunConfig, machine: Machine, saved: Mapping[str, Any] | None = None) -> tuple[Choice, ...]:
    """The choices of layers, CUDA graphs and overlapped communication under tensor, context and expert parallelism that
    the configuration leaves open; see `choices`."""
    tensor, context = config.parallel.tensor_model_parallel_size, config.parallel.context_parallel_size
    if tensor == context == config.parallel.expert_model_parallel_size == 1:
        return ()
    saved, chosen = saved or {}, []
    with_torch = dataclasses.replace(config, arch=dataclasses.replace(config.arch, transformer_impl="torch"))
    if config.arch.transformer_impl == "auto" and saved.get(LAYERS, "torch") == "torch":
        overlapped = _first(OVERLAPPED_COMMUNICATION, _overlapped_communication(with_torch, machine)).value
        captured = derived.captures_graphs(config.arch) or _graphs(with_torch, machine) is not None
        faster = captured or overlapped or _exchanges_tokens(config)
        if faster and machine.transformer_engine is not None and machine.triton and _has_measured_layers(config):
            reason = "they were measured to be faster where ranks divide layers, sequences or experts"
            chosen.append(Choice(LAYERS, "torch", reason))
            config = with_torch
    graphs = _graphs(config, machine)
    if graphs is not None:
        chosen.append(graphs)
        config = with_choices(config, (graphs,))
    if tensor > 1 and config.parallel.tp_comm_overlap is None:
        chosen.append(_first(OVERLAPPED_COMMUNICATION, _overlapped_communication(config, machine), saved))
    return tuple(chosen)


def all_choices(config: RunConfig, machine: Machine, shards: int, connections: str | None) -> tuple[Choice, ...]:
    """All choices that a run makes on a machine, for `explain`; see `choices` and `cuda_connections`."""
    of_run = choices(config, machine, shards)
    config = with_choices(config, of_run)
    transformer_engine = has_transformer_engine_layers(config, machine)
    kernels = kernel_choices(config.arch, machine, transformer_engine)
    open_kernels = [choice for choice in kernels if choice.key.partition(".")[2] not in config.arch.upstream]
    if config.arch.num_experts is not None and config.arch.experts_impl == "auto":
        with_fp8 = fp8_settings(config) is not None
        open_kernels.append(experts_choice(config.arch, with_fp8))
    chosen = [*of_run, *_model_choices(config, machine), *open_kernels]
    if machine.platform == "cuda":
        chosen.append(cuda_connections(config, machine, connections))
    return tuple(chosen)


def layers_choice(config: RunConfig) -> str:
    """Choice of `transformer_impl`. An adapter is as fast with torch's layers, so only FP8 selects Transformer Engine
    for it."""
    without_fp8 = config.adapter.adapter_type != "none" and fp8_settings(config) is None
    return "torch" if config.arch.transformer_impl == "auto" and without_fp8 else config.arch.transformer_impl


def has_transformer_engine_layers(config: RunConfig, machine: Machine) -> bool:
    """Whether the layers use Transformer Engine on a machine; a machine must have it if the configuration names it."""
    layers = layers_choice(config)
    return layers == "transformer_engine" or (layers == "auto" and machine.transformer_engine is not None)


def kernel_choices(arch: ArchConfig, machine: Machine, transformer_engine: bool) -> Iterator[Choice]:
    """Choices for fields of Megatron-Core's TransformerConfig that select fused kernels.

    Args:
        transformer_engine: whether the layers use Transformer Engine.
    """
    owner = "Transformer Engine has a kernel" if transformer_engine else "megatron-wrap has a kernel in Triton"
    has_kernel = machine.platform == "cuda" and (transformer_engine or machine.triton)
    no_kernel = "the platform is cpu" if machine.platform == "cpu" else "Triton is not installed"
    if arch.position_embedding_type == "rope":
        # the kernel of fusions/fused_mla_yarn_rope_apply.py supports only YaRN, and not fp32
        latent = "latent attention has a kernel in Triton that needs no choice" if machine.triton else no_kernel
        fused = has_kernel and not arch.multi_latent_attention
        yield Choice("arch.apply_rope_fusion", fused, owner if fused else latent if has_kernel else no_kernel)
    # fusions/fused_bias_gelu.py
    gated = [name for name in ("geglu", "quick_geglu") if getattr(arch, name)]
    other = f"{gated[0]} has none" if gated else "the fused kernel of GELU computes the tanh form"
    reason = "SwiGLU has a fused kernel" if arch.swiglu else other
    yield Choice("arch.bias_activation_fusion", arch.swiglu, reason)
    if machine.weight_gradients is not None:
        can = "accumulate" if machine.weight_gradients else "do not accumulate"
        reason = f"torch and the device {can} half-precision matmuls in fp32"
        yield Choice("arch.gradient_accumulation_fusion", machine.weight_gradients, reason)


def experts_choice(arch: ArchConfig, fp8: bool) -> Choice:
    """Implementation of the experts: `experts_impl`, decided where it is auto.

    Args:
        fp8: whether the matmuls of experts are in FP8.
    """
    rows = (
        _Row(arch.experts_impl != "auto", arch.experts_impl, "experts_impl"),
        _Row(arch.moe_grouped_gemm, "transformer_engine", "moe_grouped_gemm"),
        _Row(arch.moe_grouped_gemm is not None, "sequential", "moe_grouped_gemm"),
        _Row(fp8, "transformer_engine", "Transformer Engine multiplies in FP8"),
        _Row(True, "grouped_mm", "torch multiplies all experts at once"),
    )
    return _first("arch.experts_impl", rows)


def _model_choices(config: RunConfig, machine: Machine) -> Iterator[Choice]:
    arch, parallel = config.arch, config.parallel
    version = ".".join(map(str, machine.transformer_engine or ()))
    if arch.transformer_impl == "auto":
        installed = f"Transformer Engine {version} is installed" if version else "Transformer Engine is not installed"
        reason = installed if machine.platform == "cuda" else "Transformer Engine needs a GPU"
        if layers_choice(config) == "torch":
            version, reason = "", "adapters need torch's layers, unless in FP8"
        yield Choice("arch.transformer_impl", "transformer_engine" if version else "torch", reason)
    if parallel.sequence_parallel is None:
        reason = f"tensor_model_parallel_size is {parallel.tensor_model_parallel_size}"
        yield Choice("parallel.sequence_parallel", derived.sequence_parallel(parallel), reason)


def with_choices(config: RunConfig, chosen: tuple[Choice, ...]) -> RunConfig:
    """The configuration with the chosen values, also in `resolved` and `origins`, which a checkpoint records."""
    sections: dict[str, dict[str, Any]] = {}
    resolved, origins = copy.deepcopy(dict(config.resolved)), dict(config.origins)
    for choice in chosen:
        section, _, key = choice.key.partition(".")
        sections.setdefault(section, {})[key] = choice.value
        values: Any = resolved
        for name in SECTION_PATHS[section].split("."):
            values = values.setdefault(name, {})
        values[key] = choice.value
        origins[choice.path] = Origin(Node(choice.value, f"chosen: {choice.reason}"), SetBy.MACHINE)
    changed = {name: _replaced(getattr(config, name), keys) for name, keys in sections.items()}
    return dataclasses.replace(config, **changed, resolved=resolved, origins=origins)


def _replaced(section: Any, keys: Mapping[str, Any]) -> Any:
    """The section with these values; Megatron-Core's own keys are in its `upstream`."""
    fields = {field.name for field in dataclasses.fields(section)} & keys.keys()
    upstream = {name: value for name, value in keys.items() if name not in fields}
    values = {name: keys[name] for name in fields}
    return dataclasses.replace(
        section, **values, **({"upstream": {**section.upstream, **upstream}} if upstream else {})
    )


def cuda_connections(config: RunConfig, machine: Machine, environment: str | None) -> Choice:
    """Value of `CUDA_DEVICE_MAX_CONNECTIONS`.

    Args:
        environment: its value in the environment, which takes precedence; None: unset.
    """
    parallel = config.parallel
    sizes = {"tensor": parallel.tensor_model_parallel_size, "context": parallel.context_parallel_size}
    kinds = [kind for kind, size in sizes.items() if size > 1]
    # tensor_parallel/layers.py relies on the order of one queue
    in_order = f"{' and '.join(kinds)} parallelism overlap communication by the order in which kernels are queued"
    copies = environment is None and kinds and _uses_copy_engines(config, machine)
    rows = (
        _Row(environment is not None, environment, "set in the environment"),
        _Row(copies, "8", "with one queue a kernel would wait for a copy that was queued before it"),
        _Row(kinds, "1", in_order),
        _Row(True, "32", "without tensor and context parallelism nothing relies on one queue"),
    )
    return _first(CONNECTIONS, rows)


def _decided(config: RunConfig, choice: Choice) -> Any:
    """The value in the YAML, else the chosen one."""
    value = config.value(choice.key)
    return choice.value if value is None else value


def _distributed(config: RunConfig, machine: Machine, shards: int) -> tuple[_Row, ...]:
    """The rows of use_distributed_optimizer."""
    optimizer, fp8 = config.optimizer, fp8_settings(config)
    return (
        _Row(optimizer.optimizer == "sgd", False, "Megatron-Core's distributed optimizer supports adam, not sgd", True),
        _Row(optimizer.optimizer == "muon", False, "it cuts matrices at any element, and muon needs them whole", True),
        _Row(config.ddp.overlap_param_gather, True, "overlap_param_gather needs it", True),
        _Row(fp8 is not None and fp8.param_gather, True, "fp8_param_gather needs it", True),
        _Row(optimizer.use_precision_aware_optimizer, True, "use_precision_aware_optimizer needs it", True),
        _Row(machine.platform == "cpu", False, "on the CPU it saves no time"),
        _Row(shards == 1, False, "no other process has the same parameters"),
        _Row(True, True, f"optimizer states are shared by {shards} processes (data and context parallelism)"),
    )


def _overlapped_reduce(config: RunConfig, machine: Machine, shards: int) -> tuple[_Row, ...]:
    """The rows of overlap_grad_reduce."""
    own_provider = config.model_provider.provider_key not in _SHIPPED_PROVIDERS
    return (
        _Row(config.ddp.overlap_param_gather, True, "overlap_param_gather needs it", True),
        _Row(machine.platform == "cpu", False, "on the CPU gloo and the backward pass share the cores"),
        _Row(shards == 1, False, "no other process has the same parameters"),
        # param_and_grad_buffer.py, finish_grad_sync
        _Row(own_provider, False, "it fails for parameters without a gradient, which your provider may have"),
        _Row(True, True, f"gradients of {shards} processes are reduced during the backward pass"),
    )


def _overlapped_gather(
    config: RunConfig, machine: Machine, is_distributed: bool, is_overlapped: bool
) -> tuple[_Row, ...]:
    """The rows of overlap_param_gather."""
    fp8 = fp8_settings(config)
    outdated = fp8 is not None and fp8.param_gather and machine.megatron_core < FP8_GATHER_FROM
    own_provider = config.model_provider.provider_key not in _SHIPPED_PROVIDERS
    fp8_reason = "Megatron-Core before 0.19 uses outdated transposes of FP8 weights after an evaluation"
    return (
        _Row(not is_distributed, False, "only the distributed optimizer gathers parameters", True),
        _Row(not is_overlapped, False, "it needs overlap_grad_reduce", True),
        _Row(own_provider, False, "your provider may use parameters outside of their module's forward pass"),
        _Row(outdated, False, fp8_reason, True),
        _Row(True, True, "parameters are gathered during the forward pass"),
    )


def _fused_clipping(config: RunConfig, machine: Machine) -> tuple[_Row, ...]:
    """The rows of fused_clipping."""
    optimizer, on_gpu = config.optimizer, machine.platform == "cuda" and machine.triton
    other_states = optimizer.optimizer != "adam" or optimizer.use_precision_aware_optimizer
    saves_none = optimizer.clip_grad == 0 or not on_gpu
    return (
        _Row(other_states, False, "only Adam with fp32 states has it", True),
        _Row(saves_none, False, "it saves a pass over the gradients only on a GPU with Triton"),
        _Row(True, True, "Adam multiplies gradients by the clipping factor as it reads them"),
    )


def _overlapped_communication(config: RunConfig, machine: Machine) -> tuple[_Row, ...]:
    """The rows of tp_comm_overlap."""
    arch, parallel, train = config.arch, config.parallel, config.train
    unsupported = arch.multi_latent_attention or config.adapter.adapter_type != "none"
    with_te = has_transformer_engine_layers(config, machine)
    half_precision = config.dtype.bf16 or config.dtype.fp16
    tokens = train.seq_length * train.micro_batch_size // parallel.context_parallel_size
    is_small = tokens * arch.hidden_size // parallel.tensor_model_parallel_size < _HIDING_ELEMENTS
    graphs_reason = "with CUDA graphs the layers do not wait for Python, even in small parts of matmuls"
    return (
        _Row(
            not derived.sequence_parallel(parallel),
            False,
            "it overlaps the communication of sequence parallelism",
            True,
        ),
        _Row(unsupported, False, "latent attention and adapters do not support it", True),
        _Row(machine.platform == "cpu", False, "on the CPU gloo and the matmuls share the cores"),
        _Row(with_te, False, "the user buffers of Transformer Engine's layers must be asked for"),
        _Row(not half_precision, False, "it was measured in half precision"),
        _Row(derived.captures_graphs(arch), True, graphs_reason),
        _Row(is_small, False, f"parts of matmuls of {tokens:,} tokens may be slower than the communication"),
        _Row(True, True, f"matmuls of {tokens:,} tokens hide the communication of sequence parallelism"),
    )


def _has_measured_layers(config: RunConfig) -> bool:
    """Whether torch's layers were measured to be as fast as Transformer Engine's in this layout: dense ones, and those
    with experts under expert parallelism without tensor and context parallelism."""
    arch, parallel = config.arch, config.parallel
    if any(value is not None for value in (arch.linear_attention_freq, arch.mtp_num_layers, fp8_settings(config))):
        return False
    if arch.num_experts is None:
        return not arch.multi_latent_attention
    alone = parallel.tensor_model_parallel_size == parallel.context_parallel_size == 1
    alone = alone and derived.expert_tensor_parallel_size(parallel) == 1
    return alone and parallel.expert_model_parallel_size > 1


def _exchanges_tokens(config: RunConfig) -> bool:
    """Whether the host waits in each layer for the sizes of an exchange of tokens between experts in half precision.
    After such a wait, Python queues torch's layers in less time than Transformer Engine's (`gpu_two.sh`)."""
    exchanges = config.arch.num_experts is not None and config.parallel.expert_model_parallel_size > 1
    return exchanges and (config.dtype.bf16 or config.dtype.fp16)


def _sorts_on_device(config: RunConfig) -> bool:
    """Whether layers have no experts, or experts whose exchange `nn/experts/dispatcher.py` prepares on the device."""
    return config.arch.num_experts is None or derived.sorts_tokens_on_device(config.arch)


def _graphs(config: RunConfig, machine: Machine) -> Choice | None:
    """CUDA graphs of layers where they were measured to be faster and to keep the losses; None elsewhere, and if the
    configuration has a key for them."""
    arch, parallel = config.arch, config.parallel
    if {"cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"} & arch.upstream.keys():
        return None
    if machine.platform != "cuda" or machine.megatron_core < _GRAPHS_FROM:
        return None
    if has_transformer_engine_layers(config, machine) or config.adapter.adapter_type != "none":
        return None
    is_plain = _has_measured_layers(config) and _sorts_on_device(config)
    is_plain = is_plain and config.recompute.recompute_granularity is None and config.train.router_replay == "disabled"
    has_one_shape = config.flow.flow_key in _ONE_PASS and not derived.varies_in_length(config)
    one_stage = parallel.pipeline_model_parallel_size == 1
    shares = derived.sequence_parallel(parallel) or parallel.tensor_model_parallel_size == 1
    if not (is_plain and has_one_shape and one_stage and shares and (config.dtype.bf16 or config.dtype.fp16)):
        return None
    return Choice(GRAPHS, "local", "without them layers that exchange parts of tensors wait for Python")


_ONE_PASS = ("gpt_sft", "gpt_pretrain")
"""Flows that pass each micro-batch through the layers once."""


def _uses_copy_engines(config: RunConfig, machine: Machine) -> bool:
    """Whether torch's layers overlap the communication of tensor parallelism and the transfers of a ring with
    computation, where a run has them."""
    config = with_choices(config, layer_choices(config, machine))
    parallel = config.parallel
    if machine.platform != "cuda" or has_transformer_engine_layers(config, machine):
        return False
    half_precision = config.dtype.bf16 or config.dtype.fp16
    rings = half_precision and parallel.cp_comm_type in (None, "p2p")
    tensors = parallel.tensor_model_parallel_size == 1 or bool(parallel.tp_comm_overlap)
    return tensors and (parallel.context_parallel_size == 1 or rings)
