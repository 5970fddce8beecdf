"""Families of models with a scalar head: transformers' models for sequence classification with one label."""

from __future__ import annotations

from dataclasses import replace

from megatron_wrap.bridge.mapping.family import Family
from megatron_wrap.bridge.mapping.tensors import Mapping, replicated
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.errors import UnsupportedModel

SCORE = "score.weight"
"""Hugging Face's name of the head."""
HEAD = "output_layer.weight"
"""Global name of the head."""
_ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose sequence classification model is the decoder with a linear head without bias (transformers'
modeling_layers.py, GenericForSequenceClassification)."""


def family_of_model(config: RunConfig, family: Family) -> Family:
    """The family as the run's provider builds its models: unchanged, or with a scalar head.

    Raises:
        UnsupportedModel: the family has no supported model for sequence classification.
    """
    return with_scalar_head(family) if derived.has_value_head(config) else family


def has_scalar_head(family: Family) -> bool:
    """Whether a family is a result of `with_scalar_head`."""
    return SCORE in family.new_if_missing


def with_scalar_head(family: Family) -> Family:
    """The family's sequence classification model with one label. A folder of the causal language model starts one: its
    `lm_head` is not read, and the head has initial weights.

    Raises:
        UnsupportedModel: it is not supported.
    """
    if family.model_type not in SUPPORTED:
        raise UnsupportedModel(
            f"a value model of {family.model_type} has no supported Hugging Face folder; supported are "
            f"{', '.join(SUPPORTED)}"
        )

    def parameters(arch: ArchConfig) -> dict[str, Mapping]:
        table = {name: mapping for name, mapping in family.parameters(arch).items() if name != HEAD}
        return {**table, HEAD: replicated(SCORE, 1, arch.hidden_size)}

    return replace(
        family,
        architecture=family.architecture.replace("ForCausalLM", "ForSequenceClassification"),
        parameters=parameters,
        ignored=(*family.ignored, r"lm_head\.weight"),
        new_if_missing=(SCORE,),
        exported_values=lambda arch: {**family.exported_values(arch), **_ONE_LABEL},
    )
