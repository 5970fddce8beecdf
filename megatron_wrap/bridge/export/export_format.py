"""The family that a run's model is exported as, and its config.json."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

from megatron_wrap.bridge.mapping.family import Family, family_of_model
from megatron_wrap.bridge.mapping.tensors import Mapping as WeightMapping
from megatron_wrap.config.hugging_face import (
    FAMILIES,
    TRAINING_KEYS,
    HuggingFaceConfig,
    family_of,
    read_hugging_face_config,
)
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.errors import UnsupportedModel
from megatron_wrap.metrics.number_format import counted

_PREFERENCE = ("llama", "qwen2", "qwen3", "mistral", "gpt2")
"""Families that are tried first, in this order; the others follow in the order of their names."""

_MODEL_FIELDS = re.compile(
    r"window_.*|softmax_.*|qk_.*|multi_latent_attention|.*_lora_rank|.*head_dim|mtp_.*|num_moe_experts|no_rope.*"
    r"|moe_(router|layer|shared|ffn|input|token_drop|expert_capacity).*|.*rotary.*|.*rope.*|activation_func_.*|glu_.*"
    r"|attention_output_gate|experimental_attention_variant|heterogeneous.*|is_hybrid_model|mamba.*|use_mup|mup_.*"
    r"|.*_multiplier"
)
"""Further fields of TransformerConfig that change the model's function; other fields choose kernels and schedules."""


WEIGHT_KEYS = ("torch_dtype", "quantization_config")
"""Keys of config.json that describe the files of the original. An export is never quantized."""


@dataclasses.dataclass(frozen=True)
class ExportFormat:
    """The format in which a run's model is written as a Hugging Face folder."""

    family: Family
    arch: ArchConfig
    """The architecture, with all sizes set."""
    original: HuggingFaceConfig | None
    """Content of config.json in the folder that the run started from; None: the run started from initial weights."""

    @functools.cached_property
    def parameters(self) -> dict[str, WeightMapping]:
        """Global name of each parameter of the model -> its Hugging Face tensors, in model order."""
        return self.family.parameters(self.arch)

    def config_json(self, dtype: str) -> dict[str, Any]:
        """The content of config.json: the original's if its family is the same, else translated from the architecture.

        Args:
            dtype: of the exported weights, such as "bfloat16".
        """
        head = {"architectures": [self.family.architecture], "dtype": dtype}
        if self.original is not None and self.original.family.model_type == self.family.model_type:
            values = {key: value for key, value in self.original.values.items() if key not in WEIGHT_KEYS}
            if self.arch.vocab_size != self.original.arch_values["vocab_size"]:  # it has grown
                values["vocab_size"] = self.arch.vocab_size
            return {**values, **self.family.exported_values(self.arch), **head}
        # transformers' default ids may be outside a small vocabulary
        special = dict.fromkeys(("bos_token_id", "eos_token_id"))
        values = {**self.family.config_values(self.arch), **self.family.exported_values(self.arch)}
        return {**head, "model_type": self.family.model_type, **special, **values}


def export_format(config: RunConfig, vocab_size: int | None = None, model_type: str | None = None) -> ExportFormat:
    """The format to export a run's model in: the family `model_type`, else the family of hf_path, else the first family
    that can express the architecture.

    Args:
        vocab_size: of the model; None: that of the configuration.

    Raises:
        UnsupportedModel: the family cannot express the architecture, or no family can; the message names the first
            obstacle.
    """
    arch = with_derived_sizes(config.arch, config.train.seq_length, vocab_size)
    hf_path = config.model_provider.hf_path
    original = None if hf_path is None else read_hugging_face_config(hf_path)
    if model_type is None and original is not None:
        model_type = original.family.model_type
    return ExportFormat(family_of_model(config, _choose_family(arch, model_type)), arch, original)


def _choose_family(arch: ArchConfig, model_type: str | None) -> Family:
    if model_type is not None:
        family: Family = family_of(model_type)
        reason = obstacle(family, arch)
        if reason is not None:
            raise UnsupportedModel(f"the model cannot be exported as {model_type}: {reason}")
        return family
    obstacles, names = [], FAMILIES.keys()
    for name in (*_PREFERENCE, *(name for name in names if name not in _PREFERENCE)):
        family = family_of(name)
        reason = obstacle(family, arch)
        if reason is None:
            return family
        obstacles.append(f"{name} ({reason})")
    raise UnsupportedModel(f"no Hugging Face family can express this architecture: {'; '.join(obstacles)}")


def obstacle(family: Family, arch: ArchConfig) -> str | None:
    """The reason why a family cannot express an architecture; None if it can.

    The translation to config.json and back must return the same architecture, so a family cannot omit a key.
    """
    try:
        returned = family.arch_values(family.config_values(arch))
    except UnsupportedModel as error:
        return str(error)
    if (arch.mtp_num_layers or 0) > family.max_prediction_layers:
        layers = counted(family.max_prediction_layers, "layer")
        return f"it has {layers} for multi-token prediction, and mtp_num_layers is {arch.mtp_num_layers}"
    values: dict[str, Any] = {**{f.name: getattr(arch, f.name) for f in dataclasses.fields(arch)}, **arch.upstream}
    for key, value in returned.items():
        if key not in TRAINING_KEYS and not _equal(values.get(key), value):
            return f"{key} would be {value} and is {values.get(key)}"
    lost = [
        key for key, value in arch.upstream.items() if key not in returned and value and _MODEL_FIELDS.fullmatch(key)
    ]
    return f"it has no {lost[0]}, which is {arch.upstream[lost[0]]}" if lost else None


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, tuple | list) and isinstance(other, tuple | list):
        return list(value) == list(other)
    return bool(value == other)


def with_derived_sizes(arch: ArchConfig, seq_length: int, vocab_size: int | None = None) -> ArchConfig:
    """The architecture with derived values instead of null.

    Args:
        seq_length: of the run, in tokens; for max_position_embeddings.
        vocab_size: of the model; None: that of `arch`.
    """
    patterns: dict[str, Any] = {}
    if arch.num_experts is not None:
        patterns["moe_layer_freq"] = derived.moe_layer_pattern(arch)
        patterns["moe_ffn_hidden_size"] = derived.moe_ffn_hidden_size(arch)
    if arch.experimental_attention_variant is not None:
        patterns["linear_attention_freq"] = derived.linear_layer_pattern(arch)
    return dataclasses.replace(
        arch,
        **patterns,
        ffn_hidden_size=derived.ffn_hidden_size(arch),
        num_query_groups=derived.num_query_groups(arch),
        kv_channels=derived.kv_channels(arch),
        max_position_embeddings=derived.max_position_embeddings(arch, seq_length),
        vocab_size=arch.vocab_size if vocab_size is None else vocab_size,
    )
