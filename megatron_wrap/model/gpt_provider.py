"""The providers `gpt_model` and `gpt_value_model`: decoders like Llama and GPT-2, dense or MoE."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_wrap.config.schema import derived
from megatron_wrap.errors import ConfigError
from megatron_wrap.model.gpt_model import BatchFirstGPTModel, GPTValueModel, PredictionLayers
from megatron_wrap.model.request import ModelRequest
from megatron_wrap.nn.attention import choose_core_attention, choose_self_attention
from megatron_wrap.nn.experts.dispatcher import graph_ends_before_exchange
from megatron_wrap.nn.experts.router import Router
from megatron_wrap.nn.layers.norm import NormBeforeAdd, norm_class
from megatron_wrap.nn.linear_attention.layer import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron_wrap.ops.deferred_logits import is_deferred
from megatron_wrap.plan.context_exchange import can_use_attention_of_transformer_engine
from megatron_wrap.platform.megatron_core import versions


def gpt_model_provider(request: ModelRequest) -> BatchFirstGPTModel:
    """One chunk of a GPT model on this process's device, with uninitialized weights.

    Logits are [B, S/cp, V/tp]; vocabulary padding is masked to probability 0.
    """
    tied = not request.config.arch.untie_embeddings_and_output_weights
    model = BatchFirstGPTModel(
        **_gpt_arguments(request),
        share_embeddings_and_output_weights=tied,
        defers_logits=request.defers_logits,
        prediction=_prediction_layers(request),
    )
    if request.post_process:
        _mask_padded_vocabulary(model, request)
    return model


def gpt_value_model_provider(request: ModelRequest) -> GPTValueModel:
    """One chunk of a value model on this process's device, with uninitialized weights.

    The output is [B, S/cp, 1], equal on all tensor-parallel ranks: a linear function without bias of the last hidden
    state, as in transformers' models for sequence classification. It is not tied to the embedding.
    """
    return GPTValueModel(**_gpt_arguments(request))


def _mask_padded_vocabulary(model: BatchFirstGPTModel, request: ModelRequest) -> None:
    """Mask the padding columns of the vocabulary, so that the loss does not depend on the amount of padding, which
    grows with the tensor-parallel size."""
    tp = request.state.tp
    columns = request.padded_vocab_size // tp.size
    first_padded = max(0, request.vocab_size - tp.rank * columns)
    if first_padded >= columns:
        return
    if model.defers_logits:
        model.output_layer.unpadded = first_padded

    def mask(_module: Any, _inputs: Any, outputs: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        logits, bias = outputs
        if is_deferred(logits):
            return outputs
        logits[..., first_padded:] = torch.finfo(logits.dtype).min / 2
        return logits, bias

    model.output_layer.register_forward_hook(mask)


def _gpt_arguments(request: ModelRequest) -> dict[str, Any]:
    """Arguments of both models, without `share_embeddings_and_output_weights`."""
    arch = request.config.arch
    return {
        "config": request.transformer_config,
        "transformer_layer_spec": _block_spec(request),
        "vocab_size": request.padded_vocab_size,
        "max_sequence_length": derived.max_position_embeddings(arch, request.config.train.seq_length),
        "pre_process": request.pre_process,
        "post_process": request.post_process,
        "parallel_output": True,
        "position_embedding_type": "yarn" if derived.has_plain_yarn(arch) else arch.position_embedding_type,
        "rotary_percent": arch.rotary_percent,
        "rotary_base": arch.rotary_base,
        "rope_scaling": arch.use_rope_scaling,
        "rope_scaling_factor": arch.rope_scaling_factor,
        "rotary_factors": derived.longrope_factors(arch, request.config.train.seq_length),
        "window_rotary_base": arch.window_rotary_base,
        "embedding_multiplier": arch.embedding_multiplier,
        "final_logit_softcapping": arch.final_logit_softcapping,
        "seq_len_interpolation_factor": arch.rotary_seq_len_interpolation_factor,
        "vp_stage": request.virtual_stage,
    }


def _block_spec(request: ModelRequest) -> Any:
    """The spec of this chunk's layers; whether a layer is dense or MoE, and whether its attention is linear, depends on
    its global layer number."""
    config = request.transformer_config
    layers = get_num_layers_to_build(config, vp_stage=request.virtual_stage)
    first = get_transformer_layer_offset(config, vp_stage=request.virtual_stage)
    arch = request.config.arch
    kinds = list(zip(derived.moe_layer_pattern(arch), derived.linear_layer_pattern(arch), strict=True))
    kinds = kinds[first : first + layers]
    specs = {kind: _layer_spec(request, with_experts=bool(kind[0])) for kind in set(kinds)}
    for (_, is_linear), spec in specs.items():
        if is_linear:
            _use_linear_attention(spec, _norm(request), request.transformer_engine)
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in kinds], layer_norm=_norm(request))


def _prediction_layers(request: ModelRequest) -> PredictionLayers | None:
    """The layers for multi-token prediction, each of the kind of the decoder's last layer."""
    arch = request.config.arch
    if arch.mtp_num_layers is None:
        return None
    spec = _layer_spec(request, with_experts=bool(derived.moe_layer_pattern(arch)[-1]))
    trained = derived.trained_prediction_layers(arch) > 0
    return PredictionLayers(arch.mtp_num_layers, spec, _norm(request), trained)


def _layer_spec(request: ModelRequest, with_experts: bool) -> Any:
    arch = request.config.arch
    arguments: dict[str, Any] = {"qk_layernorm": request.transformer_config.qk_layernorm, "num_experts": None}
    if arch.multi_latent_attention:
        arguments["multi_latent_attention"] = True
    if with_experts:
        arguments["num_experts"] = arch.num_experts
        arguments["moe_grouped_gemm"] = request.transformer_config.moe_grouped_gemm
    deterministic = torch.are_deterministic_algorithms_enabled()
    by_transformer_engine = request.transformer_engine and can_use_attention_of_transformer_engine(
        request.config, deterministic
    )
    core_attention = choose_core_attention(arch, by_transformer_engine)
    # an adapter needs the input of its linear layer, which a layer that includes the norm does not show
    separate_norms = not request.transformer_engine or request.config.adapter.adapter_type != "none"
    separate_norms = separate_norms or arch.norm_placement == "after"  # linear layers without a norm
    if separate_norms:
        kind = arch.normalization
        layer = versions.local_layer_spec(
            norm=norm_class(kind), core_attention=core_attention, normalization=kind, **arguments
        )
        if request.transformer_engine:
            # hooks of a linear layer see its normalized input
            versions.use_linears(layer, *versions.linear_layers(transformer_engine=True))
        elif request.transformer_config.tp_comm_overlap:
            from megatron_wrap.nn.layers import overlapped_communication as overlapped

            linears = overlapped.GatheringColumnParallelLinear, overlapped.ScatteringRowParallelLinear
            versions.use_linears(layer, *linears, in_mlp=not with_experts)
    else:
        layer = versions.te_layer_spec(**arguments)
        layer.submodules.self_attention.submodules.core_attention = core_attention
    if chosen := choose_self_attention(arch, separate_norms, request.transformer_config.apply_rope_fusion):
        attention = layer.submodules.self_attention
        attention.module, further = chosen
        attention.params.update(further)
    _place_norms(layer, request)
    if with_experts:
        router = partial(Router, group_score_experts=arch.moe_router_group_score_experts)
        versions.expert_submodules(layer).router = router
        if request.experts_impl == "grouped_mm":
            from megatron_wrap.nn.experts.grouped import GroupedExperts
            from megatron_wrap.nn.experts.layer import GroupedMoELayer

            versions.expert_submodules(layer).experts = GroupedExperts
            versions.use_moe_layer(layer, GroupedMoELayer)
            if derived.captures_graphs(arch) and graph_ends_before_exchange(request.transformer_config):
                layer.module = _partly_captured_layer()
    return layer


def _partly_captured_layer() -> type:
    if versions.check_version() < (0, 19):
        raise ConfigError(
            "megatron_lm.model.arch.cuda_graph_impl: local needs Megatron-Core 0.19 for layers with experts, "
            f"and {versions.version()} is installed; write none"
        )
    from megatron_wrap.nn.experts.layer import PartlyCapturedLayer

    return PartlyCapturedLayer


def _use_linear_attention(layer: Any, norm: Any, transformer_engine: bool) -> None:
    """Build the attention of a layer spec as `GatedDeltaNet`, after a norm that is a module of its own."""
    linear_layers = GatedDeltaNetSubmodules(*versions.linear_layers(transformer_engine))
    versions.use_attention(layer, ModuleSpec(module=GatedDeltaNet, submodules=linear_layers), norm)


def _place_norms(layer: Any, request: ModelRequest) -> None:
    """Change the spec of a layer with norms before attention and MLP as `norm_placement` defines it."""
    placement, parts = request.config.arch.norm_placement, layer.submodules
    if placement == "before":
        return
    added = {"config": request.transformer_config, "norm": _norm(request)}
    parts.self_attn_bda = ModuleSpec(module=NormBeforeAdd, params=added)
    parts.mlp_bda = ModuleSpec(module=NormBeforeAdd, params=added)
    if placement == "after":
        parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp


def _norm(request: ModelRequest) -> Any:
    """The class of norms that are modules of their own."""
    if request.transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm
    return norm_class(request.config.arch.normalization)
