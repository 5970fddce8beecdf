"""config.json of a Hugging Face folder: reading, the types of its values, and its quantized weights. No torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_wrap.config.reading.yaml_nodes import describe, shown_path
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
"""Keys of sizes, which are at least 1."""
_INTEGERS = (
    *(
        "original_max_position_embeddings",
        "num_key_value_heads",
        "head_dim",
        "sliding_window",
        "n_inner",
        "n_shared_experts",
    ),
    *("shared_expert_intermediate_size", "q_lora_rank", "n_group", "topk_group", "rotary_dim"),
    *("sliding_window_pattern",),
)
_DEFAULTED_INTEGERS: Mapping[str, int] = {
    **{"decoder_sparse_step": 1, "first_k_dense_replace": 0, "no_rope_layer_interval": 1},
    "full_attention_interval": 1,
}
"""Key -> its smallest value. These keys have a default if they are missing, and may not be null."""
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
    *("original_max_position_embeddings", "mscale", "mscale_all_dim", "attention_factor"),
    "llama_4_scaling_beta",
)
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
    """Refuse values of a wrong type.

    Raises:
        ConfigError: with the key and the value.
    """
    for names, least in ((_SIZES, 1), (_INTEGERS, 0)):
        for name in names:
            if values.get(name) is not None:
                _check_integer(name, values[name], least, _LOOPS.get(name, MAX_INTEGER))
    for name, least in _DEFAULTED_INTEGERS.items():
        if name in values:
            _check_integer(name, values[name], least, MAX_INTEGER)
    for name in _NUMBERS:
        _check_number(name, values.get(name))
    for name in _DEFAULTED_NUMBERS:
        if name in values and values[name] is None:
            raise ConfigError(f"{name} must be a number, not null")
        _check_number(name, values.get(name))
    for name in _FLAGS:
        if not isinstance(values.get(name), bool | None):
            raise ConfigError(f"{name} must be true or false, not {describe(values[name])}")
    for name in ("layer_types", "mlp_layer_types", "mlp_only_layers", "no_rope_layers"):
        items = values.get(name)
        if items is not None and not (isinstance(items, list) and all(isinstance(item, str | int) for item in items)):
            raise ConfigError(f"{name} must be a list of names or numbers, not {describe(items)}")
    for name in ("rope_scaling", "rope_parameters"):
        _check_rope(name, values.get(name))
        for kind in _LAYER_KINDS:
            _check_rope(f"{name}.{kind}", (values.get(name) or {}).get(kind))


def _check_rope(name: str, rope: Any) -> None:
    if not isinstance(rope, dict | None):
        raise ConfigError(f"{name} must be a mapping, not {describe(rope)}")
    for key in _ROPE_NUMBERS:
        _check_number(f"{name}.{key}", (rope or {}).get(key))
    for key in ("short_factor", "long_factor"):
        factors = (rope or {}).get(key)
        if not isinstance(factors, list | None):
            raise ConfigError(f"{name}.{key} must be a list of numbers, not {describe(factors)}")
        for factor in factors or ():
            if factor is None:
                raise ConfigError(f"{name}.{key} must be a list of numbers, not {describe(factors)}")
            _check_number(f"{name}.{key}", factor)
    for key in ("rope_type", "type"):
        if not isinstance((rope or {}).get(key), str | None):
            raise ConfigError(f"{name}.{key} must be a name, not {describe((rope or {})[key])}")


def _check_integer(name: str, value: Any, at_least: int, at_most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, not {describe(value)}")
    if not at_least <= value <= at_most:
        raise ConfigError(f"{name} must be at least {at_least} and at most {at_most:,}, not {describe(value)}")


def _check_number(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number, not {describe(value)}")
    if abs(value) > 1e30 or math.isnan(value):
        raise ConfigError(f"{name} must be a finite number, not {describe(value)}")


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
    stored_as = section.get("format", "float-quantized")
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ConfigError("quantization_config of compressed-tensors has no config_groups; download config.json again")
    kinds: set[Quantization] = set()
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        weights = weights if isinstance(weights, dict) else {}
        number = (weights.get("type"), weights.get("num_bits"))
        strategy = weights.get("strategy")
        if stored_as not in ("float-quantized", "naive-quantized") or number != ("float", 8):
            name = _NOT_READ.get(str(stored_as), f"compressed-tensors {stored_as} ({number[0]}, {number[1]} bits)")
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
