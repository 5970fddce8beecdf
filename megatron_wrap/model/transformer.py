"""From the configuration tree to Megatron-Core's `TransformerConfig`."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from megatron_wrap.config import derived
from megatron_wrap.config.schema import ArchConfig, RunConfig
from megatron_wrap.errors import PlatformError

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron_wrap.parallel.state import ParallelState
    from megatron_wrap.platform.base import Platform


def parameter_dtype(config: RunConfig) -> torch.dtype:
    """Type of weights and activations."""
    return torch.bfloat16 if config.dtype.bf16 else torch.float16 if config.dtype.fp16 else torch.float32


def use_transformer_engine(config: RunConfig, platform: Platform) -> bool:
    """Whether the layers come from Transformer Engine.

    Raises:
        PlatformError: `transformer_engine` is asked for where it cannot run.
    """
    wanted = config.arch.transformer_impl
    if wanted == "torch":
        return False
    available = platform.has_transformer_engine
    if wanted == "transformer_engine" and not available:
        raise PlatformError(
            f"megatron_lm.model.arch.transformer_impl is transformer_engine, but it cannot be used on the "
            f"{platform.name} platform here: install transformer-engine[pytorch] on a GPU machine, or set auto or torch"
        )
    return available


def transformer_config(config: RunConfig, state: ParallelState, platform: Platform) -> TransformerConfig:
    """Megatron-Core's configuration of the model on this layout; fields of `arch.upstream` come last.

    Raises:
        PlatformError: Megatron-Core refuses the combination; the message is its own.
    """
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    transformer_engine = use_transformer_engine(config, platform)
    settings: dict[str, Any] = {
        **_architecture(config.arch),
        **_latent_attention(config.arch),
        **_experts(config, platform, transformer_engine),
        **_parallelism(config),
        **_recompute(config),
        "params_dtype": parameter_dtype(config),
        "pipeline_dtype": parameter_dtype(config),
        "bf16": config.dtype.bf16,
        "fp16": config.dtype.fp16,
        # `initial_weights` fills the weights, alike for every layout. Initialization stays on, since it also marks
        # which parameters are slices (tensor_parallel/layers.py, set_tensor_model_parallel_attributes).
        "init_method": _leave_unset,
        "output_layer_init_method": _leave_unset,
        "embedding_init_method": _leave_unset,
        # a tenth of a step's time on an H200; the platform takes it back where its kernel is not there
        "apply_rope_fusion": transformer_engine and _has_fused_rope(config.arch),
        **platform.transformer_config_settings(
            pipeline_size=state.pp.size, virtual_size=state.virtual_size, transformer_engine=transformer_engine
        ),
        **config.arch.upstream,
    }
    config_class = MLATransformerConfig if config.arch.multi_latent_attention else TransformerConfig
    for field in dataclasses.fields(config_class):
        if isinstance(field.default, enum.Enum) and isinstance(settings.get(field.name), str):
            settings[field.name] = type(field.default)[settings[field.name]]  # the YAML gives a member's name
    try:
        return config_class(**settings)
    except (ValueError, AssertionError, TypeError) as error:
        raise PlatformError(f"Megatron-Core refuses the model's configuration: {error}") from error


def _leave_unset(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _architecture(arch: ArchConfig) -> dict[str, Any]:
    from megatron.core.activations import fast_gelu, squared_relu

    activation: Any
    if arch.swiglu:
        activation = functional.silu
    elif arch.squared_relu:
        activation = squared_relu
    else:
        activation = fast_gelu if arch.openai_gelu else functional.gelu
    return {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "ffn_hidden_size": derived.ffn_hidden_size(arch),
        "num_attention_heads": arch.num_attention_heads,
        "num_query_groups": derived.num_query_groups(arch),
        "kv_channels": derived.kv_channels(arch),
        "normalization": arch.normalization,
        "layernorm_epsilon": arch.norm_epsilon,
        "layernorm_zero_centered_gamma": arch.apply_layernorm_1p,
        "qk_layernorm": arch.qk_layernorm,
        "gated_linear_unit": arch.swiglu,
        "activation_func": activation,
        "add_bias_linear": arch.add_bias_linear,
        "add_qkv_bias": arch.add_qkv_bias,
        "hidden_dropout": arch.hidden_dropout,
        "attention_dropout": arch.attention_dropout,
        "init_method_std": arch.init_method_std,
        "attention_softmax_in_fp32": arch.attention_softmax_in_fp32,
        "fp32_residual_connection": arch.fp32_residual_connection,
        "rotary_interleaved": arch.rotary_interleaved,
        "window_size": arch.window_size,
        "window_attn_skip_freq": _list(arch.window_attn_skip_freq),
        # the fused form of GELU is the tanh one whatever is asked for (fusions/fused_bias_gelu.py)
        "bias_activation_fusion": arch.swiglu,
        "bias_dropout_fusion": True,
    }


def _has_fused_rope(arch: ArchConfig) -> bool:
    if arch.multi_latent_attention:
        return False  # its kernel takes yarn alone, and no fp32 (fusions/fused_mla_yarn_rope_apply.py)
    return arch.position_embedding_type == "rope"


def _latent_attention(arch: ArchConfig) -> dict[str, Any]:
    if not arch.multi_latent_attention:
        return {}
    names = (
        *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
        *("rope_type", "rotary_base", "rotary_percent", "rotary_scaling_factor", "original_max_position_embeddings"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    )
    return {name: getattr(arch, name) for name in names}


def _experts(config: RunConfig, platform: Platform, transformer_engine: bool) -> dict[str, Any]:
    arch = config.arch
    if arch.num_experts is None:
        return {}
    grouped = transformer_engine if arch.moe_grouped_gemm is None else arch.moe_grouped_gemm
    dispatcher = arch.moe_token_dispatcher_type
    platform.refuse_unsafe({"moe_grouped_gemm": grouped, "moe_token_dispatcher_type": dispatcher}, transformer_engine)
    same = (
        *("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
        *("moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias"),
        *("moe_router_bias_update_rate", "moe_router_dtype", "moe_z_loss_coeff", "moe_shared_expert_gate"),
        *("moe_shared_expert_intermediate_size",),
    )
    return {
        **{name: getattr(arch, name) for name in same},
        "num_moe_experts": arch.num_experts,
        "moe_ffn_hidden_size": derived.moe_ffn_hidden_size(arch),
        "moe_layer_freq": list(derived.moe_layer_pattern(arch)),
        "moe_router_load_balancing_type": _list(arch.moe_router_load_balancing_type),
        "moe_aux_loss_coeff": _list(arch.moe_aux_loss_coeff),
        "moe_grouped_gemm": grouped,
        "moe_token_dispatcher_type": dispatcher,
    }


def _list(value: Any) -> Any:
    """Megatron-Core asks for lists where the decoded configuration has tuples."""
    return list(value) if isinstance(value, tuple) else value


def _parallelism(config: RunConfig) -> dict[str, Any]:
    parallel = config.parallel
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": derived.virtual_pipeline_size(config),
        "context_parallel_size": parallel.context_parallel_size,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
        "sequence_parallel": derived.sequence_parallel(parallel),
        "num_layers_in_first_pipeline_stage": parallel.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": parallel.decoder_last_pipeline_num_layers,
    }


def _recompute(config: RunConfig) -> dict[str, Any]:
    recompute = config.recompute
    settings: dict[str, Any] = {
        "recompute_granularity": recompute.recompute_granularity,
        "recompute_method": recompute.recompute_method,
        "recompute_num_layers": recompute.recompute_num_layers,
        "distribute_saved_activations": recompute.distribute_saved_activations,
    }
    if recompute.recompute_modules is not None:
        settings["recompute_modules"] = list(recompute.recompute_modules)
    return settings
