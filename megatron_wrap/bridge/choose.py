"""Choice of the family that a model is exported as, and its config.json."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from megatron_wrap.bridge.family import Family
from megatron_wrap.config import derived
from megatron_wrap.config.hugging_face import FAMILIES, TRAINING_KEYS, family_of, read_hugging_face_config
from megatron_wrap.config.schema import ArchConfig
from megatron_wrap.errors import UnsupportedModel

_PREFERENCE = ("llama", "qwen2", "qwen3", "mistral", "gpt2")
"""Families that are tried first, in this order; the others follow by name."""

_MODEL_FIELDS = re.compile(
    r"window_.*|softmax_.*|qk_.*|multi_latent_attention|.*_lora_rank|.*head_dim|mtp_.*|num_moe_experts|no_rope.*"
    r"|moe_(router|layer|shared|ffn|input|token_drop|expert_capacity).*|.*rotary.*|.*rope.*|activation_func_.*|glu_.*"
    r"|attention_output_gate|experimental_attention_variant|heterogeneous.*|is_hybrid_model|mamba.*|use_mup|mup_.*"
    r"|.*_multiplier"
)
"""Further fields of TransformerConfig that change the model's function; other fields choose kernels and schedules."""


def choose_family(arch: ArchConfig, hf_path: str | None = None, model_type: str | None = None) -> Family:
    """The family to export as: `model_type`, else that of hf_path, else the first that can express the architecture.

    Args:
        arch: from `complete`.
        hf_path: folder or hub id that the run started from.

    Raises:
        UnsupportedModel: the family, or no family, can express the architecture; the message gives the first obstacle.
    """
    if model_type is None and hf_path is not None:
        model_type = read_hugging_face_config(hf_path).family.model_type
    if model_type is not None:
        family: Family = family_of(model_type)
        obstacle = what_differs(family, arch)
        if obstacle is not None:
            raise UnsupportedModel(f"the model cannot be exported as {model_type}: {obstacle}")
        return family
    obstacles = []
    for name in sorted(FAMILIES.keys(), key=lambda key: (*(key != kept for kept in _PREFERENCE), key)):
        family = family_of(name)
        obstacle = what_differs(family, arch)
        if obstacle is None:
            return family
        obstacles.append(f"{name} ({obstacle})")
    raise UnsupportedModel(f"no Hugging Face family can express this architecture: {'; '.join(obstacles)}")


def config_json(family: Family, arch: ArchConfig, dtype: str, hf_path: str | None = None) -> dict[str, Any]:
    """The content of config.json: that of hf_path with the weights' dtype, else the family's translation of the
    architecture.

    Args:
        arch: from `complete`.
        dtype: of the exported weights, such as "bfloat16".
        hf_path: folder or hub id that the run started from.
    """
    if hf_path is not None:
        found = read_hugging_face_config(hf_path)
        if found.family.model_type == family.model_type:
            values = {key: value for key, value in found.values.items() if key != "torch_dtype"}
            return {**values, **family.exported_values, "architectures": [family.architecture], "dtype": dtype}
    values = family.config_values(arch)
    # transformers' defaults may be outside a small vocabulary
    special = dict.fromkeys(("bos_token_id", "eos_token_id"))
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **special,
        **values,
        **family.exported_values,
        "dtype": dtype,
    }


def complete(arch: ArchConfig, seq_length: int, vocab_size: int | None = None) -> ArchConfig:
    """The architecture with null values replaced by the derived ones.

    Args:
        seq_length: of the run, in tokens; for max_position_embeddings.
        vocab_size: of the model; None: that of `arch`.
    """
    experts: dict[str, Any] = {}
    if arch.num_experts is not None:
        experts["moe_layer_freq"] = derived.moe_layer_pattern(arch)
        experts["moe_ffn_hidden_size"] = derived.moe_ffn_hidden_size(arch)
    return dataclasses.replace(
        arch,
        **experts,
        ffn_hidden_size=derived.ffn_hidden_size(arch),
        num_query_groups=derived.num_query_groups(arch),
        kv_channels=derived.kv_channels(arch),
        max_position_embeddings=derived.max_position_embeddings(arch, seq_length),
        vocab_size=arch.vocab_size if vocab_size is None else vocab_size,
    )


def what_differs(family: Family, arch: ArchConfig) -> str | None:
    """Why a family cannot express an architecture; None if it can.

    The translation to config.json and back must return the same architecture, so a family cannot omit a key.
    """
    try:
        back = family.arch_values(family.config_values(arch))
    except UnsupportedModel as error:
        return str(error)
    given: dict[str, Any] = {**{f.name: getattr(arch, f.name) for f in dataclasses.fields(arch)}, **arch.upstream}
    for key, value in back.items():
        if key not in TRAINING_KEYS and not _same(given.get(key), value):
            return f"{key} would be {value} and is {given.get(key)}"
    lost = [key for key, value in arch.upstream.items() if key not in back and value and _MODEL_FIELDS.fullmatch(key)]
    return f"it has no {lost[0]}, which is {arch.upstream[lost[0]]}" if lost else None


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, tuple | list) and isinstance(theirs, tuple | list):
        return list(ours) == list(theirs)
    return bool(ours == theirs)
