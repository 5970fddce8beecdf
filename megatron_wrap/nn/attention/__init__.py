"""Attention: which implementation is on, when, and why.

The classes of a layer, chosen when the model is built (`choose_core_attention` and `choose_self_attention` below):

| part | implementation | when | why |
| --- | --- | --- | --- |
| scores and values | `PackedDotProductAttention` (`transformer_engine.py`) | layers of Transformer Engine, one of whose kernels supports the configuration (`plan/context_exchange.py`) | its kernels, also in FP8 |
| scores and values | `TorchCoreAttention` (`torch_attention.py`) | otherwise: on CPUs, scaled queries, capped scores, most windows and sinks over context-parallel ranks | supports everything |
| queries, keys, values | `LatentAttention`, `LocalLatentAttention` (`self_attention.py`) | `multi_latent_attention`; local where norms are modules of their own | corrects Megatron-Core's; one kernel where Triton is |
| queries, keys, values | `DecoderSelfAttention` (`self_attention.py`) | norms over all heads, or other rotary angles in layers with a window | Megatron-Core has neither |
| queries, keys, values | `FusedSelfAttention` (`self_attention.py`) | `apply_rope_fusion`, Triton, no norms of heads but RMS norms | split, norms and rotation in one kernel |
| queries, keys, values | Megatron-Core's `SelfAttention` | otherwise | |
| all of it | `GatedDeltaNet` (`nn/linear_attention/`) | `linear_layer_pattern` | no softmax |

The computation of `TorchCoreAttention`, chosen in each call by shape, dtype and device (`choice.py`):

| part | implementation | when | why |
| --- | --- | --- | --- |
| context-parallel ranks | heads exchanged (`parallel/head_exchange.py`) | `cp_comm_type: a2a` | fewest bytes with many ranks |
| context-parallel ranks | keys around a ring (`ring.py`) | `p2p`, without window, cap and dropout | transfers overlap with computation |
| context-parallel ranks | keys gathered (`attend.py`) | otherwise | supports everything |
| a packed row | torch's flash attention of all sequences (`attend.py`, `attend_packed`) | half precision on a GPU, causal, without cap and dropout | one kernel for the row |
| a packed row | one sequence after the other (`attend.py`, `attend_over_context`) | otherwise | supports everything |
| one sequence | flash attention with sinks (`flash.py`) | sinks on a GPU, causal, half precision | stores no scores |
| one sequence | all scores stored (`flash.py`, `attend.py`) | other sinks; capped scores | no kernel supports them |
| one sequence | blocks of queries (`attend.py`) | windows | work and memory grow with the window |
| one sequence | torch's `scaled_dot_product_attention`: cuDNN | lengths that are multiples of 512 on Hopper or later, without dropout | fastest |
| one sequence | torch's `scaled_dot_product_attention`: torch's own choice | otherwise | |
"""  # noqa: E501

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_wrap.config.schema.model import ArchConfig


def choose_core_attention(arch: ArchConfig, by_transformer_engine: bool) -> Any:
    """The class, or the spec, of the core attention of a layer; call it after the platform is installed.

    Args:
        by_transformer_engine: whether Transformer Engine computes the attention of this configuration
            (`can_use_attention_of_transformer_engine`).
    """
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_wrap.nn.attention.torch_attention import TorchCoreAttention

    if by_transformer_engine:
        from megatron_wrap.nn.attention.transformer_engine import PackedDotProductAttention

        return PackedDotProductAttention
    changed: dict[str, Any] = {}
    if arch.query_scaling_beta is not None:
        changed["query_scaling"] = arch.query_scaling_beta, arch.original_max_position_embeddings
    if arch.attn_logit_softcapping is not None:
        changed["softcap"] = arch.attn_logit_softcapping
    return ModuleSpec(module=TorchCoreAttention, params=changed) if changed else TorchCoreAttention


def choose_self_attention(
    arch: ArchConfig, separate_norms: bool, apply_rope_fusion: bool
) -> tuple[type, dict[str, Any]] | None:
    """The class of the attention of a layer, and its further arguments; None: Megatron-Core's. Call it after the
    platform is installed.

    Args:
        separate_norms: whether norms are modules of their own, not parts of Transformer Engine's linear layers.
        apply_rope_fusion: value in Megatron-Core's configuration.
    """
    from megatron_wrap.nn.attention import self_attention as classes
    from megatron_wrap.nn.kernels.available import has_triton

    per_layer_norms = arch.qk_layernorm and arch.qk_layernorm_type == "per_layer"
    by_window = arch.window_rotary_base is not None
    in_one_kernel = not arch.attention_output_gate and (arch.normalization == "RMSNorm" or not arch.qk_layernorm)
    if arch.multi_latent_attention:
        latent = classes.LocalLatentAttention if separate_norms else classes.LatentAttention
        return latent, {"latent_norm_epsilon": arch.latent_norm_epsilon}
    if per_layer_norms or by_window:
        return classes.DecoderSelfAttention, {"per_layer_norms": per_layer_norms, "by_window": by_window}
    if apply_rope_fusion and has_triton() and in_one_kernel:
        return classes.FusedSelfAttention, {}
    return None
