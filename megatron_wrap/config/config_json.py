"""config.json of a Hugging Face folder: reading, the types of its values, and its quantized weights. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_wrap.config.reading.yaml_nodes import describe, shown_path
from megatron_wrap.config.schema.keys import Mismatch, check_value
from megatron_wrap.errors import ConfigError, MegatronWrapError, UnsupportedModel, special_file

MAX_BYTES = 1 << 28
"""Largest size of a file. The index of the weights of the largest models has about 10 MiB."""


def read_json(path: Path, advice: str, error_type: type[MegatronWrapError] = ConfigError) -> Any:
    """The content of a JSON file.

    Args:
        advice: the end of the message about a damaged file.
        error_type: class of the errors.

    Raises:
        MegatronWrapError: an `error_type`: the file is missing, a folder, pipe or device, larger than MAX_BYTES, or is
            not JSON.
    """
    shown = shown_path(path)
    if reason := special_file(path):
        raise error_type(reason)
    try:
        if (size := os.path.getsize(path)) > MAX_BYTES:
            raise error_type(f"{shown}: {size:,} bytes, more than the {MAX_BYTES:,} that are read; {advice}")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise error_type(f"{shown}: cannot be read ({error.strerror or error}); {advice}") from error
    except ValueError as error:
        raise error_type(f"{shown}: not JSON ({error}); {advice}") from error
    except RecursionError as error:
        raise error_type(f"{shown}: not JSON (nested too deeply); {advice}") from error


MAX_INTEGER = (1 << 31) - 1
_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"),
    *("query_pre_attn_scalar", "max_position_embeddings", "n_embd", "n_head", "n_layer", "n_positions"),
    *("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
_INTEGERS = (
    *("original_max_position_embeddings", "num_key_value_heads", "head_dim", "sliding_window", "n_inner"),
    *("n_shared_experts", "shared_expert_intermediate_size", "q_lora_rank", "n_group", "topk_group", "rotary_dim"),
    "sliding_window_pattern",
)
_INTERVALS = ("decoder_sparse_step", "no_rope_layer_interval", "full_attention_interval")
_NUMBERS = (
    *("rms_norm_eps", "rope_theta", "partial_rotary_factor", "attention_dropout", "rope_local_base_freq"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
)
_DEFAULTED_NUMBERS = (
    *("initializer_range", "layer_norm_epsilon", "resid_pdrop", "embd_pdrop", "attn_pdrop", "routed_scaling_factor"),
    *("residual_dropout", "swiglu_alpha", "swiglu_limit"),
)
_FLAGS = (
    *("attention_bias", "mlp_bias", "qkv_bias", "tie_word_embeddings", "use_sliding_window", "norm_topk_prob"),
    *("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention", "is_decoder"),
    *("attention_out_bias", "use_qk_norm", "attn_output_gate"),
)
_ROPE_NUMBERS = (
    *("factor", "rope_theta", "partial_rotary_factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("original_max_position_embeddings", "mscale", "mscale_all_dim", "attention_factor", "llama_4_scaling_beta"),
)
_TYPES: Mapping[str, Any] = {
    **dict.fromkeys((*_SIZES, *_INTEGERS), int),
    **dict.fromkeys((*_INTERVALS, "first_k_dense_replace"), int),
    **dict.fromkeys(_NUMBERS, float),
    **dict.fromkeys(_DEFAULTED_NUMBERS, float),
    **dict.fromkeys(_FLAGS, bool),
    **dict.fromkeys(("layer_types", "mlp_layer_types", "mlp_only_layers", "no_rope_layers"), list[str | int]),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), dict),
}
"""Key -> type of its value."""
_NOT_NULL = frozenset((*_INTERVALS, "first_k_dense_replace", *_DEFAULTED_NUMBERS))
"""Keys that may be missing but not null."""
_ROPE_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(_ROPE_NUMBERS, float),
    **dict.fromkeys(("short_factor", "long_factor"), list[float]),
    **dict.fromkeys(("rope_type", "type"), str),
}
"""Key of rotary parameters -> type of its value."""
_LAYER_KINDS = ("full_attention", "sliding_attention")
"""Kinds of layers, the keys of their rotary parameters (OLMo 3, Gemma 3)."""
_LOOPS: Mapping[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 10_000),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 10_000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), 100_000),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 100_000),
}
"""Key -> largest number of parts that a model is built of."""


def check_types(values: Mapping[str, Any]) -> None:
    """Refuse values of a wrong type or size.

    Raises:
        ConfigError: with the key and the value.
    """
    _check_each(values, _TYPES)
    for name in ("rope_scaling", "rope_parameters"):
        rope = values.get(name) or {}
        _check_each(rope, {**_ROPE_TYPES, **dict.fromkeys(_LAYER_KINDS, dict)}, f"{name}.")
        for kind in _LAYER_KINDS:
            _check_each(rope.get(kind) or {}, _ROPE_TYPES, f"{name}.{kind}.")


def _check_each(values: Mapping[str, Any], types: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse values that are not of their types; `prefix` is the beginning of the keys in messages."""
    for name, hint in types.items():
        value: Any = values.get(name)
        if value is None and not (name in values and name in _NOT_NULL):
            continue
        numbers = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int | float)]
        if not all(abs(number) <= 1e30 for number in numbers):
            raise ConfigError(f"{prefix}{name} must be a finite number, not {describe(value)}")
        try:
            check_value(value, hint)
        except Mismatch as mismatch:
            raise ConfigError(f"{prefix}{name} {mismatch}, not {describe(value)}") from None
        if hint is int:
            least, most = int(name in (*_SIZES, *_INTERVALS)), _LOOPS.get(name, MAX_INTEGER)
            if not least <= value <= most:
                rule = f"must be at least {least} and at most {most:,}"
                raise ConfigError(f"{prefix}{name} {rule}, not {describe(value)}")


_READ = "FP8 (quant_method fp8 or compressed-tensors) and MXFP4 are read"
_ADVICE = "use weights in bf16, fp16 or fp32"
_NOT_READ: Mapping[str, str] = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "pack-quantized": "compressed-tensors INT4 (pack-quantized)",
    "int-quantized": "compressed-tensors INT8 (int-quantized)",
    "nvfp4-pack-quantized": "compressed-tensors NVFP4",
    "mxfp4-pack-quantized": "compressed-tensors MXFP4",
    "marlin-24": "compressed-tensors Marlin",
}
"""quant_method, or format of compressed-tensors -> its name in messages."""


@dataclass(frozen=True)
class Quantization:
    """Storage format of the quantized weights of a folder. Weights without scales are stored unquantized."""

    method: str
    """`quant_method` of config.json."""
    scaling: str
    """Unit that shares one scale: tensor, channel (a row of the weight), or block; for mxfp4, 32 values of a row."""
    block: tuple[int, int] | None = None
    """(rows, columns) of a block; None: `scaling` is not block."""

    @property
    def scale_suffix(self) -> str:
        """Ending of a scale's name, appended to the name of its FP8 weight."""
        return "_scale" if self.method == "compressed-tensors" else "_scale_inv"

    @property
    def shown(self) -> str:
        """Name of the format for messages."""
        if self.method == "mxfp4":
            return "MXFP4"
        size = "" if self.block is None else f" of {self.block[0]} x {self.block[1]}"
        return f"FP8 ({self.method}, a scale for each {self.scaling}{size})"


def read_quantization(values: Mapping[str, Any]) -> Quantization | None:
    """The quantization of a folder, from the values of its config.json; None: its weights are not quantized.

    Raises:
        UnsupportedModel: a method that is not read; the message names it.
        ConfigError: a damaged quantization_config.
    """
    section = values.get("quantization_config")
    if not section:
        return None
    method = section.get("quant_method") if isinstance(section, dict) else None
    if not isinstance(method, str):
        raise ConfigError(f"quantization_config has no quant_method: {describe(section)}; {_READ}")
    if method == "fp8":
        if section.get("expert_dtype", "fp8") != "fp8":
            raise UnsupportedModel(f"quantization_config has experts in {section['expert_dtype']}; {_READ}")
        block = section.get("weight_block_size", (128, 128))
        return Quantization(method, "tensor") if block is None else Quantization(method, "block", _block_size(block))
    if method == "mxfp4":
        return Quantization(method, "block")
    if method == "compressed-tensors":
        return _compressed(section)
    raise UnsupportedModel(
        f"the weights are quantized with {_NOT_READ.get(method, f'the unknown quant_method {method!r}')}, which is not "
        f"read; {_ADVICE} ({_READ})"
    )


def _compressed(section: Mapping[str, Any]) -> Quantization:
    """Scaling and block from the values of compressed-tensors (compressed_tensors/quantization/quant_config.py and
    quant_args.py)."""
    weight_format = section.get("format", "float-quantized")
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ConfigError("quantization_config of compressed-tensors has no config_groups; download config.json again")
    kinds: set[Quantization] = set()
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        weights = weights if isinstance(weights, dict) else {}
        number = (weights.get("type"), weights.get("num_bits"))
        strategy = weights.get("strategy")
        if weight_format not in ("float-quantized", "naive-quantized") or number != ("float", 8):
            name = _NOT_READ.get(
                str(weight_format), f"compressed-tensors {weight_format} ({number[0]}, {number[1]} bits)"
            )
            raise UnsupportedModel(f"the weights are quantized with {name}, which is not read; {_ADVICE} ({_READ})")
        if strategy not in ("tensor", "channel", "block"):
            raise UnsupportedModel(f"FP8 weights have the strategy {strategy!r}; tensor, channel and block are read")
        block = _block_size(weights.get("block_structure")) if strategy == "block" else None
        kinds.add(Quantization("compressed-tensors", strategy, block))
    if len(kinds) > 1:
        raise UnsupportedModel(f"config_groups of quantization_config differ in their scales; {_ADVICE}")
    return kinds.pop()


def _block_size(size: Any) -> tuple[int, int]:
    if (
        not isinstance(size, list | tuple)
        or len(size) != 2
        or not all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in size)
    ):
        raise ConfigError(f"a block of FP8 weights must be two positive integers, not {describe(size)}")
    return size[0], size[1]
