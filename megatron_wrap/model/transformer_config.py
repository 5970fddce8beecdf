"""Builds Megatron-Core's `TransformerConfig` from the run's configuration."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from megatron_wrap.config.defaults import (
    TRANSFORMER_ENGINE_CROSS_ENTROPY_FROM,
    experts_choice,
    kernel_choices,
    layers_choice,
)
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.derived import Fp8Settings, fp8_settings
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.errors import PlatformError
from megatron_wrap.nn.kernels.available import layer_kernels
from megatron_wrap.plan.context_exchange import exchange_choice
from megatron_wrap.platform.base.platform import NEEDS_CUDA, Platform

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def parameter_dtype(config: RunConfig) -> torch.dtype:
    """Dtype of weights and activations."""
    return torch.bfloat16 if config.dtype.bf16 else torch.float16 if config.dtype.fp16 else torch.float32


def use_transformer_engine(config: RunConfig, platform: Platform) -> bool:
    """Whether the layers use Transformer Engine.

    Raises:
        PlatformError: `transformer_engine` is selected but not available.
    """
    wanted = layers_choice(config)
    if wanted == "torch":
        return False
    available = platform.has_transformer_engine
    if wanted == "transformer_engine" and not available:
        raise PlatformError(
            f"megatron_lm.model.arch.transformer_impl is transformer_engine, which is not available on platform "
            f"{platform.name}; install transformer-engine[pytorch] on a GPU machine, or set auto or torch"
        )
    return available


def transformer_config(config: RunConfig, platform: Platform, training: bool = True) -> TransformerConfig:
    """Megatron-Core's configuration of the model for the run's layout; `arch.upstream` overrides other fields. Needs no
    process group.

    Args:
        training: whether the model is trained; other models compute in bf16 where the run has FP8.

    Raises:
        PlatformError: the machine cannot run FP8, or Megatron-Core rejects the configuration; the message includes
            Megatron-Core's.
    """
    transformer_engine = use_transformer_engine(config, platform)
    needs_cuda = {name: value for name, value in config.arch.upstream.items() if name in NEEDS_CUDA}
    platform.refuse_unsafe(needs_cuda, transformer_engine)
    fp8 = fp8_settings(config) if training else None
    if fp8 is not None:
        _refuse_missing(fp8, platform, transformer_engine)
    config_class = _config_class(config.arch)
    virtual_size = derived.virtual_pipeline_size(config)
    exchange = exchange_choice(config, transformer_engine)  # also None where training has decided it
    settings: dict[str, Any] = {
        **_architecture(config.arch, config_class),
        **_yarn(config.arch),
        **_experts(config, config_class, platform, transformer_engine, fp8 is not None),
        **same_named(config.parallel, config_class),
        "virtual_pipeline_model_parallel_size": virtual_size,
        "sequence_parallel": derived.sequence_parallel(config.parallel),
        "tp_comm_overlap": _hides_communication(config, training, transformer_engine),
        **({} if exchange is None else {"cp_comm_type": exchange.value}),
        "num_layers_in_first_pipeline_stage": config.parallel.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": config.parallel.decoder_last_pipeline_num_layers,
        **same_named(config.recompute, config_class),
        **same_named(config.dtype, config_class),
        "params_dtype": parameter_dtype(config),
        "pipeline_dtype": parameter_dtype(config),
        # `initial_weights` initializes the weights, equally for every layout. Megatron-Core's initialization stays
        # enabled because it also marks sharded parameters (tensor_parallel/layers.py,
        # set_tensor_model_parallel_attributes).
        "init_method": _leave_unset,
        "output_layer_init_method": _leave_unset,
        "embedding_init_method": _leave_unset,
        **platform.transformer_config_settings(
            pipeline_size=config.parallel.pipeline_model_parallel_size,
            virtual_size=virtual_size,
            transformer_engine=transformer_engine,
        ),
        **_kernels(config.arch, platform, transformer_engine, training),
        **config.arch.upstream,
        **_frozen(config),
        "fp8": None if fp8 is None else fp8.format,
        "fp8_param": fp8 is not None and fp8.param_gather,
    }
    for field in dataclasses.fields(config_class):
        if isinstance(field.default, enum.Enum) and isinstance(settings.get(field.name), str):
            settings[field.name] = type(field.default)[settings[field.name]]  # the YAML has the member's name
    try:
        return config_class(**settings)
    except (ValueError, AssertionError, TypeError) as error:
        raise PlatformError(f"Megatron-Core rejects the model's configuration: {error}") from error


def _hides_communication(config: RunConfig, training: bool, transformer_engine: bool) -> bool:
    """Whether `tp_comm_overlap` is true and has an effect. Transformer Engine's user buffers belong to the trained
    model. The value was chosen for that model; another one may have latent attention."""
    parallel = config.parallel
    if parallel.tensor_model_parallel_size == 1 or config.arch.multi_latent_attention:
        return False
    return bool(parallel.tp_comm_overlap) and (training or not transformer_engine)


def _config_class(arch: ArchConfig) -> type[TransformerConfig]:
    from megatron.core.transformer import MLATransformerConfig

    from megatron_wrap.model.core_config import DecoderConfig, YarnDecoderConfig

    if arch.multi_latent_attention:
        return MLATransformerConfig
    return YarnDecoderConfig if derived.scales_rotary(arch) else DecoderConfig


def _frozen(config: RunConfig) -> dict[str, Any]:
    """Settings that keep the base of an adapter as it is: steps update the routers' expert biases without gradients."""
    frozen = config.adapter.adapter_type != "none" and config.arch.num_experts is not None
    return {"moe_router_bias_update_rate": 0.0} if frozen else {}


def same_named(section: Any, target: type) -> dict[str, Any]:
    """Values of the keys of a decoded section that are also fields of Megatron-Core's dataclass `target`; tuples become
    lists."""
    known = {field.name for field in dataclasses.fields(target)}
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section) if field.name in known}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _refuse_missing(fp8: Fp8Settings, platform: Platform, transformer_engine: bool) -> None:
    """Raise PlatformError if FP8 does not run here."""
    missing = platform.missing_for_fp8(fp8.recipe)
    if missing is None and not transformer_engine:
        missing = "it needs the layers of Transformer Engine (transformer_impl)"
    if missing is not None:
        raise PlatformError(
            f"megatron_lm.train.dtype.fp8 is {fp8.format} with fp8_recipe {fp8.recipe}: {missing}; choose another "
            "fp8_recipe, or set fp8: null"
        )


def _leave_unset(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """Megatron-Core's fast_gelu, in one kernel."""
    return functional.gelu(x, approximate="tanh")


def _architecture(arch: ArchConfig, config_class: type) -> dict[str, Any]:
    """Settings of dense models; only MLATransformerConfig has the fields of multi-latent attention."""
    from megatron.core.activations import fast_gelu, quick_gelu, squared_relu

    activation: Any
    if arch.swiglu:
        activation = functional.silu
    elif arch.geglu:
        activation = _tanh_gelu
    elif arch.quick_geglu:
        activation = quick_gelu
    elif arch.squared_relu:
        activation = squared_relu
    else:
        activation = fast_gelu if arch.openai_gelu else functional.gelu
    same = same_named(arch, config_class)
    linear = derived.linear_layer_pattern(arch)
    same.pop("transformer_impl", None)  # selects the layer spec; Megatron-Core's field has other values
    for name in ("mtp_num_layers", "mtp_loss_scaling_factor"):  # the layers are not Megatron-Core's own
        del same[name]
    return {
        **{name: value for name, value in same.items() if not name.startswith("moe_")},
        "ffn_hidden_size": derived.ffn_hidden_size(arch),
        "num_query_groups": derived.num_query_groups(arch),
        "kv_channels": derived.kv_channels(arch),
        "layernorm_epsilon": arch.norm_epsilon,
        # norms over all heads are those of DecoderSelfAttention
        "qk_layernorm": arch.qk_layernorm and arch.qk_layernorm_type == "per_head",
        "layernorm_zero_centered_gamma": arch.apply_layernorm_1p,
        "gated_linear_unit": derived.is_gated(arch),
        "activation_func": activation,
        "window_size": arch.window_size,  # a tuple in Megatron-Core as well
        "linear_attention_freq": list(linear) if 1 in linear else None,
        "bias_dropout_fusion": True,
    }


def _yarn(arch: ArchConfig) -> dict[str, Any]:
    """Settings of `YarnDecoderConfig`; empty for other models. Attention takes from them the factor of rotated parts,
    (0.1 mscale ln(scaling_factor) + 1) / (0.1 mscale_all_dim ln(scaling_factor) + 1); LongRoPE's has the same form."""
    if arch.rope_type == "longrope":
        mscale = 10 * (arch.longrope_attention_factor - 1)
        return {"yarn_rotary_scaling_factor": math.e, "yarn_mscale": mscale, "yarn_mscale_all_dim": 0.0}
    if not derived.has_plain_yarn(arch):
        return {}
    names = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    values = {name: getattr(arch, name) for name in (*names, "rotary_scaling_factor", "correction_range_round_to_int")}
    return {f"yarn_{name}": value for name, value in values.items()}


def _kernels(arch: ArchConfig, platform: Platform, transformer_engine: bool, training: bool) -> dict[str, Any]:
    """Settings of fused kernels, and their installation in Megatron-Core.

    Raises:
        PlatformError: Transformer Engine's cross-entropy is selected in a version that computes it wrongly.
    """
    # to ask for sums of weight gradients starts cuBLAS, which a model that is only loaded does not need
    accumulates = training or bool(arch.upstream.get("gradient_accumulation_fusion"))
    kernels, machine = layer_kernels(platform.device, accumulates), platform.machine
    platform.use_kernels(kernels)
    version, first = machine.transformer_engine, TRANSFORMER_ENGINE_CROSS_ENTROPY_FROM
    if arch.upstream.get("cross_entropy_fusion_impl") == "te" and version is not None and version < first:
        raise PlatformError(
            f"megatron_lm.model.arch.cross_entropy_fusion_impl is te, whose gradients are wrong in bf16 before "
            f"Transformer Engine {first[0]}.{first[1]}, and this is {'.'.join(map(str, version))}; write native, or "
            "install a later one"
        )
    weight_gradients = kernels.weight_gradients is not None if accumulates else None
    here = dataclasses.replace(machine, triton=kernels.rotary is not None, weight_gradients=weight_gradients)
    chosen = kernel_choices(arch, here, transformer_engine)
    return {choice.key.partition(".")[2]: choice.value for choice in chosen}


def _experts(
    config: RunConfig, config_class: type, platform: Platform, transformer_engine: bool, fp8: bool
) -> dict[str, Any]:
    """Settings of MoE models; empty for a dense model."""
    arch = config.arch
    if arch.num_experts is None:
        return {}
    grouped = experts_choice(arch, fp8).value == "transformer_engine"
    dispatcher = arch.moe_token_dispatcher_type
    platform.refuse_unsafe({"moe_grouped_gemm": grouped, "moe_token_dispatcher_type": dispatcher}, transformer_engine)
    same = same_named(arch, config_class)
    return {
        **{name: value for name, value in same.items() if name.startswith("moe_")},
        "num_moe_experts": arch.num_experts,
        "moe_ffn_hidden_size": derived.moe_ffn_hidden_size(arch),
        "moe_layer_freq": list(derived.moe_layer_pattern(arch)),
        "moe_grouped_gemm": grouped,
    }
