"""Definition of a Hugging Face family: translation of its config.json to `megatron_lm.model.arch` and back, and the
mapping of its weights; and the same family with a scalar head, transformers' model for sequence classification with one
label."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_wrap.bridge.mapping.tensors import Mapping as WeightMapping
from megatron_wrap.bridge.mapping.tensors import replicated, tensor_shapes
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.errors import UnsupportedModel

EMBEDDING = "embedding.word_embeddings.weight"
"""Global name of the embedding."""
HEAD = "output_layer.weight"
"""Global name of the output layer, or of the scalar head."""
SCORE = "score.weight"
"""Hugging Face's name of the scalar head."""
ADAPTER = "_adapter"
"""Suffix of the name of an adapter's module, after the name of its linear layer."""
_ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
WITH_SCALAR_HEAD = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose sequence classification model is the decoder with a linear head without bias (transformers'
modeling_layers.py, GenericForSequenceClassification)."""

Config = Mapping[str, Any]
"""Keys of a config.json, or of a part of it, and their values."""
Values = dict[str, Any]
"""Keys of `megatron_lm.model.arch`, or of a config.json that is written, and their values."""


@dataclass(frozen=True)
class Family:
    """One `model_type` of transformers. Both directions of the translation are pure functions of the values, so the
    family can express an architecture if and only if `arch_values(config_values(arch))` returns it unchanged."""

    model_type: str
    architecture: str
    """transformers' class of the causal language model, written into `architectures`."""
    arch_values: Callable[[Config], Values]
    """config.json -> keys of `megatron_lm.model.arch`, including further fields of Megatron-Core's TransformerConfig.
    Raises `UnsupportedModel` for values that Megatron-Core cannot express."""
    config_values: Callable[[ArchConfig], Values]
    """Keys of `megatron_lm.model.arch` -> config.json, without the keys that every family has (`architectures`,
    `model_type`, `dtype`)."""
    parameters: Callable[[ArchConfig], dict[str, WeightMapping]]
    """Global name of each parameter of the model -> its Hugging Face tensors, in model order."""
    base_prefix: str = "model."
    """Prefix that is missing in files saved from transformers' base model (without the output layer)."""
    ignored: tuple[str, ...] = ()
    """Patterns (full match) of buffers that older files contain; they are not read."""
    left_out: Callable[[ArchConfig], dict[str, str]] = lambda arch: {}
    """Patterns (full match) of tensors of parts that the model is built without -> a warning for the user."""
    new_if_missing: tuple[str, ...] = ()
    """Tensors that a folder may lack; the model then keeps its initial weights of them."""
    exported_values: Callable[[ArchConfig], Config] = lambda arch: {}
    """Values of an exported config.json that replace those of the original."""
    copies: Callable[[ArchConfig], Mapping[str, str]] = lambda arch: {}
    """Name of a further tensor -> the tensor that it copies: written beside it, and not read."""
    max_prediction_layers: int = 0
    """Largest number of layers for multi-token prediction (`mtp_num_layers`) in the table."""

    splits_stacks: bool = False
    """Whether a folder may have the experts of a layer in one tensor; `parameters` names the tensors of each expert."""

    is_adapter: bool = False
    """Whether the files contain an adapter, so that they lack the parameters of the base."""

    def shapes(self, arch: ArchConfig) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every Hugging Face tensor of the architecture, in model order."""
        return tensor_shapes(self.parameters(arch))


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
    if family.model_type not in WITH_SCALAR_HEAD:
        raise UnsupportedModel(
            f"a value model of {family.model_type} has no supported Hugging Face folder; supported are "
            f"{', '.join(WITH_SCALAR_HEAD)}"
        )

    def parameters(arch: ArchConfig) -> dict[str, WeightMapping]:
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
