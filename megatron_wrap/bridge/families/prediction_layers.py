"""Tables of the layers for multi-token prediction, which have the same parameters in all families that publish them,
under two sets of names."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_wrap.bridge.families.common_keys import Sizes, Table
from megatron_wrap.bridge.families.llama import LayerTable
from megatron_wrap.bridge.mapping import tensors as weights
from megatron_wrap.bridge.mapping.family import Values
from megatron_wrap.config.schema.model import ArchConfig

ANY_NUMBER = 100
"""Largest number of layers in families whose prediction layers each have all parameters: the limit of
`mtp_num_layers`."""


def prediction_table(arch: ArchConfig, layer: LayerTable) -> Table:
    """The table of the layers that follow the decoder's (`model.layers.61.` in DeepSeek V3). The norm after each is
    `shared_head.norm`.

    Args:
        layer: as for `decoder_table`.
    """
    table: Table = {}
    for number in range(arch.mtp_num_layers or 0):
        hf_prefix = f"model.layers.{arch.num_layers + number}."
        names = {name: hf_prefix + name for name in ("enorm", "hnorm", "eh_proj")}
        table |= _table(arch, layer, number, hf_prefix, {**names, "final_layernorm": hf_prefix + "shared_head.norm"})
    return table


def prediction_copies(arch: ArchConfig) -> dict[str, str]:
    """The copies of embedding and output layer in each layer that follows the decoder's -> the originals."""
    prefixes = [f"model.layers.{arch.num_layers + number}." for number in range(arch.mtp_num_layers or 0)]
    head = "lm_head.weight" if arch.untie_embeddings_and_output_weights else "model.embed_tokens.weight"
    return {
        prefix + copy: original
        for prefix in prefixes
        for copy, original in (("embed_tokens.weight", "model.embed_tokens.weight"), ("shared_head.head.weight", head))
    }


def prediction_config(arch: ArchConfig) -> Values:
    """Values of an exported config.json about the layers that follow the decoder's."""
    return {"num_nextn_predict_layers": arch.mtp_num_layers or 0}


def single_prediction_table(arch: ArchConfig, layer: LayerTable) -> Table:
    """The table of the one layer of Qwen3-Next and Qwen3.5 (`mtp.`), with its projection and norms."""
    if not arch.mtp_num_layers:
        return {}
    names = {
        **{"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden"},
        **{"eh_proj": "mtp.fc", "final_layernorm": "mtp.norm"},
    }
    return _table(arch, layer, 0, "mtp.layers.0.", names)


def _table(arch: ArchConfig, layer: LayerTable, number: int, hf_prefix: str, names: Mapping[str, str]) -> Table:
    """The table of one layer.

    Args:
        hf_prefix: prefix of the transformer layer's tensors.
        names: Megatron-Core's name -> Hugging Face's name of each norm and of the projection.
    """
    sizes, prefix = Sizes.of(arch), f"mtp_block.layers.{number}."

    def norm(name: str) -> Table:
        return {f"{prefix}{name}.weight": weights.replicated(f"{names[name]}.weight", sizes.hidden)}

    projection = weights.column(f"{names['eh_proj']}.weight", sizes.hidden, 2 * sizes.hidden)
    return {
        **norm("enorm"),
        **norm("hnorm"),
        f"{prefix}eh_proj.weight": projection,
        **layer(arch, sizes, f"{prefix}transformer_layer.", hf_prefix),
        **norm("final_layernorm"),
    }


def prediction_layers_left_out(
    arch: ArchConfig, *, named: str | None = None, advice: str = "; megatron_lm.model.arch.mtp_num_layers: 1 loads them"
) -> dict[str, str]:
    """Patterns of the tensors of layers that a run does not build -> the warning that they are left out.

    Args:
        named: pattern of their tensors; None: those of the layer after the decoder's last.
        advice: the end of the warning; empty for a family that cannot have such layers.
    """
    if arch.mtp_num_layers is not None:
        return {}
    text = f"the layers for multi-token prediction are not loaded: not trained, and not exported{advice}"
    return {named or rf"model\.layers\.{arch.num_layers}\..*": text}
