"""GPT-2: learned positions, biases, and linear layers stored transposed (transformers/models/gpt2, Conv1D)."""

from megatron_wrap.bridge.families.common_keys import PLAIN, Sizes, Table, hidden_dropout, need, refuse_unless
from megatron_wrap.bridge.mapping import tensors as weights
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.derived import ffn_hidden_size
from megatron_wrap.config.schema.model import ArchConfig

_GELU = {"gelu_new": True, "gelu_pytorch_tanh": True, "gelu": False}
"""Value of activation_function -> whether it is the tanh approximation."""


def _arch_values(config: Config) -> Values:
    refuse_unless(
        config,
        activation_function=tuple(_GELU),
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    hidden, heads = need(config, "n_embd"), need(config, "n_head")
    return {
        **PLAIN,
        "num_layers": need(config, "n_layer"),
        "hidden_size": hidden,
        "ffn_hidden_size": config.get("n_inner") or 4 * hidden,
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": hidden // heads,
        "vocab_size": need(config, "vocab_size"),
        "max_position_embeddings": need(config, "n_positions"),
        "position_embedding_type": "learned_absolute",
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", True),
        "normalization": "LayerNorm",
        "norm_epsilon": float(config.get("layer_norm_epsilon", 1e-5)),
        "swiglu": False,
        "openai_gelu": _GELU[config.get("activation_function", "gelu_new")],
        "add_bias_linear": True,
        "hidden_dropout": hidden_dropout(config, 0.1),
        "attention_dropout": float(config.get("attn_pdrop", 0.1)),
        "init_method_std": float(config.get("initializer_range", 0.02)),
    }


def _config_values(arch: ArchConfig) -> Values:
    return {
        "n_layer": arch.num_layers,
        "n_embd": arch.hidden_size,
        "n_inner": ffn_hidden_size(arch),
        "n_head": arch.num_attention_heads,
        "n_positions": arch.max_position_embeddings,
        "vocab_size": arch.vocab_size,
        "activation_function": "gelu_new" if arch.openai_gelu else "gelu",
        "layer_norm_epsilon": arch.norm_epsilon,
        "tie_word_embeddings": not arch.untie_embeddings_and_output_weights,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop"), arch.hidden_dropout),
        "attn_pdrop": arch.attention_dropout,
        "initializer_range": arch.init_method_std,
    }


def _table(arch: ArchConfig) -> Table:
    sizes = Sizes.of(arch)
    hidden, ffn = sizes.hidden, sizes.ffn
    positions = arch.max_position_embeddings
    assert positions is not None
    table: Table = {
        "embedding.word_embeddings.weight": weights.vocabulary("transformer.wte.weight", sizes.vocab, hidden),
        "embedding.position_embeddings.weight": weights.replicated("transformer.wpe.weight", positions, hidden),
    }

    def norm(prefix: str, hf_prefix: str) -> None:
        for kind in ("weight", "bias"):
            table[f"{prefix}.{kind}"] = weights.replicated(f"{hf_prefix}.{kind}", hidden)

    def column(prefix: str, hf_prefix: str) -> None:
        table[f"{prefix}.weight"] = weights.transposed(weights.column(f"{hf_prefix}.weight", ffn, hidden))
        table[f"{prefix}.bias"] = weights.column(f"{hf_prefix}.bias", ffn)

    def row(prefix: str, hf_prefix: str, columns: int) -> None:
        table[f"{prefix}.weight"] = weights.transposed(weights.row(f"{hf_prefix}.weight", hidden, columns))
        table[f"{prefix}.bias"] = weights.replicated(f"{hf_prefix}.bias", hidden)

    heads = (sizes.heads, sizes.groups, sizes.width)
    for number in range(arch.num_layers):
        prefix, hf_prefix = f"decoder.layers.{number}.", f"transformer.h.{number}."
        norm(prefix + "input_layernorm", hf_prefix + "ln_1")
        qkv, fused = prefix + "self_attention.linear_qkv", hf_prefix + "attn.c_attn"
        weight = weights.query_key_value(*(3 * (f"{fused}.weight",)), *heads, hidden)
        table[f"{qkv}.weight"] = weights.transposed(weight)
        table[f"{qkv}.bias"] = weights.query_key_value(*(3 * (f"{fused}.bias",)), *heads)
        row(prefix + "self_attention.linear_proj", hf_prefix + "attn.c_proj", hidden)
        norm(prefix + "pre_mlp_layernorm", hf_prefix + "ln_2")
        column(prefix + "mlp.linear_fc1", hf_prefix + "mlp.c_fc")
        row(prefix + "mlp.linear_fc2", hf_prefix + "mlp.c_proj", ffn)
    norm("decoder.final_layernorm", "transformer.ln_f")
    if arch.untie_embeddings_and_output_weights:
        table["output_layer.weight"] = weights.vocabulary("lm_head.weight", sizes.vocab, hidden)
    return table


FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    arch_values=_arch_values,
    config_values=_config_values,
    parameters=_table,
    base_prefix="transformer.",
    # causal masks that transformers 4 kept as buffers
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),
)
