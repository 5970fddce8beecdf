"""`quantization_config` of config.json: the quantized weights of a Hugging Face folder that can be read. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_wrap.config.reading.yaml_nodes import describe
from megatron_wrap.errors import ConfigError, UnsupportedModel

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
        return Quantization(method, "tensor") if block is None else Quantization(method, "block", _block(block))
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
        block = _block(weights.get("block_structure")) if strategy == "block" else None
        kinds.add(Quantization("compressed-tensors", strategy, block))
    if len(kinds) > 1:
        raise UnsupportedModel(f"config_groups of quantization_config differ in their scales; {_ADVICE}")
    return kinds.pop()


def _block(size: Any) -> tuple[int, int]:
    if (
        not isinstance(size, list | tuple)
        or len(size) != 2
        or not all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in size)
    ):
        raise ConfigError(f"a block of FP8 weights must be two positive integers, not {describe(size)}")
    return size[0], size[1]
