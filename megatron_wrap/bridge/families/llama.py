"""Llama 1 to 3.2, and models of the same architecture (transformers/models/llama). Other families use Llama's table of
weights unchanged, or parts of it: attention, dense MLPs, and experts.
"""

from collections.abc import Callable
from functools import partial

from megatron_wrap.bridge.families.common_keys import Sizes, Table, decoder_config, decoder_values
from megatron_wrap.bridge.mapping import tensors as weights
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.derived import moe_ffn_hidden_size, moe_layer_pattern
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.errors import UnsupportedModel


def _arch_values(config: Config) -> Values:
    biases = bool(config.get("attention_bias", False))
    if biases != bool(config.get("mlp_bias", False)):
        raise UnsupportedModel(
            f"attention_bias is {biases} and mlp_bias is {not biases}, but Megatron-Core has biases in both or neither"
        )
    values = decoder_values({"num_key_value_heads": None, **config}, tied=False)  # transformers' default
    return {**values, "add_bias_linear": biases}


def _config_values(arch: ArchConfig) -> Values:
    return {**decoder_config(arch), **dict.fromkeys(("attention_bias", "mlp_bias"), arch.add_bias_linear)}


LayerTable = Callable[[ArchConfig, Sizes, str, str], Table]
"""(arch, sizes, Megatron-Core's prefix, Hugging Face's prefix) -> one layer's table."""


def decoder_table(arch: ArchConfig, layer: LayerTable) -> Table:
    """The table of a Llama-like model: embedding, layers, final norm, and the output layer unless it is tied."""
    sizes = Sizes.of(arch)
    table: Table = {
        "embedding.word_embeddings.weight": weights.vocabulary("model.embed_tokens.weight", sizes.vocab, sizes.hidden)
    }
    for number in range(arch.num_layers):
        table |= layer(arch, sizes, f"decoder.layers.{number}.", f"model.layers.{number}.")
    table["decoder.final_layernorm.weight"] = weights.replicated("model.norm.weight", sizes.hidden)
    if arch.untie_embeddings_and_output_weights:
        table["output_layer.weight"] = weights.vocabulary("lm_head.weight", sizes.vocab, sizes.hidden)
    return table


def attention_table(arch: ArchConfig, sizes: Sizes, prefix: str, hf_prefix: str) -> Table:
    """Attention with separate q, k and v projections, and the norm before it."""
    prefix, projections = prefix + "self_attention.", hf_prefix + "self_attn."
    q, k, v, o = (f"{projections}{letter}_proj" for letter in "qkvo")
    inner = sizes.heads * sizes.width
    heads = (sizes.heads, sizes.groups, sizes.width)
    fused = weights.gated_query_key_value if arch.attention_output_gate else weights.query_key_value
    table = {
        prefix + "linear_qkv.weight": fused(f"{q}.weight", f"{k}.weight", f"{v}.weight", *heads, sizes.hidden),
        prefix + "linear_proj.weight": weights.row(f"{o}.weight", sizes.hidden, inner),
    }
    if arch.add_qkv_bias or arch.add_bias_linear:
        table[prefix + "linear_qkv.bias"] = fused(f"{q}.bias", f"{k}.bias", f"{v}.bias", *heads)
    if arch.add_bias_linear:
        table[prefix + "linear_proj.bias"] = weights.replicated(f"{o}.bias", sizes.hidden)
    if arch.qk_layernorm:
        for letter, count in (("q", sizes.heads), ("k", sizes.groups)):
            name = f"{projections}{letter}_norm.weight"
            of_head = arch.qk_layernorm_type == "per_head"
            norm = weights.replicated(name, sizes.width) if of_head else weights.column(name, count * sizes.width)
            table[f"{prefix}{letter}_layernorm.weight"] = norm
    return table


def mlp_table(ffn: int, arch: ArchConfig, sizes: Sizes, prefix: str, hf_prefix: str) -> Table:
    """A gated MLP of intermediate size `ffn` from gate_proj, up_proj and down_proj."""
    gate, up, down = (f"{hf_prefix}{name}_proj" for name in ("gate", "up", "down"))
    table = {
        prefix + "linear_fc1.weight": weights.gated(f"{gate}.weight", f"{up}.weight", ffn, sizes.hidden),
        prefix + "linear_fc2.weight": weights.row(f"{down}.weight", sizes.hidden, ffn),
    }
    if arch.add_bias_linear:
        table[prefix + "linear_fc1.bias"] = weights.gated(f"{gate}.bias", f"{up}.bias", ffn)
        table[prefix + "linear_fc2.bias"] = weights.replicated(f"{down}.bias", sizes.hidden)
    return table


def experts_table(
    arch: ArchConfig,
    sizes: Sizes,
    prefix: str,
    hf_prefix: str,
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "shared_expert",
) -> Table:
    """The MLP of an MoE layer: router, experts, and shared experts if there are any.

    Args:
        ours, theirs: prefixes of the MLP in Megatron-Core and Hugging Face.
        names: of an expert's gate, up and down projections.
        shared: name of the shared experts; their gate is `{shared}_gate`.
    """
    assert arch.num_experts is not None
    table: Table = {
        prefix + "router.weight": weights.replicated(hf_prefix + "gate.weight", arch.num_experts, sizes.hidden)
    }
    if arch.moe_router_enable_expert_bias:
        bias = weights.replicated(hf_prefix + "gate.e_score_correction_bias", arch.num_experts)
        table[prefix + "router.expert_bias"] = weights.in_fp32(bias)
    ffn = moe_ffn_hidden_size(arch)
    for number in range(arch.num_experts):
        gate, up, down = (f"{hf_prefix}experts.{number}.{name}.weight" for name in names)
        expert = f"{prefix}experts.{number}."
        table[expert + "linear_fc1.weight"] = weights.gated(gate, up, ffn, sizes.hidden)
        table[expert + "linear_fc2.weight"] = weights.row(down, sizes.hidden, ffn)
    shared_ffn = arch.moe_shared_expert_intermediate_size
    if shared_ffn is not None:
        table |= mlp_table(shared_ffn, arch, sizes, prefix + "shared_experts.", f"{hf_prefix}{shared}.")
        if arch.moe_shared_expert_gate:
            gate = f"{hf_prefix}{shared}_gate.weight"
            table[prefix + "shared_experts.gate_weight"] = weights.replicated(gate, 1, sizes.hidden)
    return table


def mlp_of_layer(
    arch: ArchConfig, sizes: Sizes, prefix: str, hf_prefix: str, *, shared: str = "shared_expert"
) -> Table:
    """The MLP of the layer with the prefixes `prefix` and `hf_prefix`, dense or MoE; `shared` as for `experts_table`.
    Layers for multi-token prediction are like the decoder's last."""
    ours_mlp, theirs_mlp = prefix + "mlp.", hf_prefix + "mlp."
    if moe_layer_pattern(arch)[int(prefix.split(".")[2]) if prefix.startswith("decoder.") else -1]:
        return experts_table(arch, sizes, ours_mlp, theirs_mlp, shared=shared)
    return mlp_table(sizes.ffn, arch, sizes, ours_mlp, theirs_mlp)


def norm_table(sizes: Sizes, prefix: str, hf_prefix: str) -> Table:
    """The two norms of a layer, before attention and MLP."""
    return {
        prefix + "input_layernorm.weight": weights.replicated(hf_prefix + "input_layernorm.weight", sizes.hidden),
        prefix + "pre_mlp_layernorm.weight": weights.replicated(
            hf_prefix + "post_attention_layernorm.weight", sizes.hidden
        ),
    }


def norm_after_table(sizes: Sizes, prefix: str, hf_prefix: str) -> Table:
    """The two norms of a layer for the outputs of attention and MLP."""
    attention, mlp = hf_prefix + "post_attention_layernorm.weight", hf_prefix + "post_feedforward_layernorm.weight"
    return {
        prefix + "self_attn_bda.norm.weight": weights.replicated(attention, sizes.hidden),
        prefix + "mlp_bda.norm.weight": weights.replicated(mlp, sizes.hidden),
    }


def decoder_layer(
    arch: ArchConfig,
    sizes: Sizes,
    prefix: str,
    hf_prefix: str,
    *,
    norms: Callable[[Sizes, str, str], Table] = norm_table,
    attention: LayerTable = attention_table,
    mlp: LayerTable = mlp_of_layer,
) -> Table:
    """The table of a layer; a family passes the parts in which it differs from Llama."""
    return {
        **norms(sizes, prefix, hf_prefix),
        **attention(arch, sizes, prefix, hf_prefix),
        **mlp(arch, sizes, prefix, hf_prefix),
    }


llama_table = partial(decoder_table, layer=decoder_layer)
"""The weight table of Llama, Mistral and Qwen."""

FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    arch_values=_arch_values,
    config_values=_config_values,
    parameters=llama_table,
    ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)
