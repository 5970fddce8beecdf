"""Frozen weights of linear layers in 4 or 8 bits, as in QLoRA (Dettmers et al., arXiv:2305.14314).

The parameter stays in its layer, so names, shapes and dtype are those of an ordinary one, but it has no values: its
memory is one element. The values are computed when the layer's forward pass begins and again when its backward pass
needs them, and freed after each; everything else in the layer, Megatron-Core's exchange included, is as without
quantization. A rank quantizes its own shard.

- nf4: blocks of 64 elements in the 16 levels of torchao's NF4Tensor, scales in int8 by groups of 256 blocks: 4.13 bits
- fp8: float8_e4m3fn with an fp32 scale for each block of 128 elements: 8.25 bits
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_parameter_registration_hook

from megatron_wrap.errors import ConfigError

QuantizedKind = Literal["fp8", "nf4"]

_NF4_BLOCK, _NF4_GROUP = 64, 256
"""Elements that share a scale, and scales that share a scale, as in QLoRA."""
_FP8_BLOCK = 128
_CHUNK = 2**24
"""Elements that are converted at once, a multiple of both numbers above; bounds the memory of the fp32 values."""
_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


class QuantizedWeight:
    """The values of a matrix, quantized.

    Args:
        shape: shape of the matrix on this rank.
        dtype: dtype of `values()`.
    """

    def __init__(self, kind: QuantizedKind, shape: torch.Size, dtype: torch.dtype) -> None:
        self.kind = kind
        self._shape, self._dtype = shape, dtype
        self._chunks: list[tuple[Tensor, ...]] = []

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """Replace the values by those of a tensor of the same shape, on whose device they stay."""
        quantize = _nf4 if self.kind == "nf4" else _fp8
        self._chunks = [quantize(chunk) for chunk in values.detach().reshape(-1).split(_CHUNK)]

    @torch.no_grad()
    def values(self) -> Tensor:
        """A new tensor with the values."""
        dequantize = _from_nf4 if self.kind == "nf4" else _from_fp8
        if not self._chunks:
            raise RuntimeError("a quantized weight was read before its values were written")
        result = torch.empty(self._shape, dtype=self._dtype, device=self._chunks[0][0].device)
        for part, chunk in zip(result.view(-1).split(_CHUNK), self._chunks, strict=True):
            part.copy_(dequantize(*chunk)[: len(part)])
        return result

    @property
    def nbytes(self) -> int:
        """Size of the quantized values and their scales, in bytes."""
        return sum(tensor.numel() * tensor.element_size() for chunk in self._chunks for tensor in chunk)


def _padded(values: Tensor, multiple: int) -> Tensor:
    """Values in fp32, repeated from the beginning up to a number of elements that is a multiple of `multiple`."""
    missing = -len(values) % multiple
    return torch.cat([values, values.repeat(math.ceil(missing / len(values)))[:missing]]).float()


def _nf4(values: Tensor) -> tuple[Tensor, ...]:
    """(two elements in each byte, int8 scale of each block, steps of each group's scales, the scales' mean).

    A block of zeros has the level of zero, where torchao divides by its scale.
    """
    padded, blocks = _padded(values, _NF4_BLOCK * _NF4_GROUP), math.ceil(len(values) / _NF4_BLOCK)
    made = _nf4_tensor().from_tensor(padded, _NF4_BLOCK, _NF4_GROUP)
    packed = made.quantized_data.view(-1, _NF4_BLOCK // 2)[:blocks].clone()
    packed[padded.view(-1, _NF4_BLOCK)[:blocks].abs().amax(1) == 0] = 0x77
    return packed, made.quantized_scalers[:blocks].clone(), made.quantization_factor, made.scaler_mean


def _from_nf4(packed: Tensor, scales: Tensor, steps: Tensor, mean: Tensor) -> Tensor:
    """Values in fp32, as NF4Tensor.get_original_weight."""
    of_block = scales / steps.repeat_interleave(_NF4_GROUP)[: len(scales)] + mean
    pairs = _pairs_of_levels(packed.device).index_select(0, packed.view(-1).int())
    return pairs.view(len(packed), -1).mul_(of_block[:, None]).view(-1)


_LEVELS: dict[torch.device, Tensor] = {}


def _pairs_of_levels(device: torch.device) -> Tensor:
    """The two levels of each byte, [256, 2]."""
    if device not in _LEVELS:
        levels = _nf4_tensor().from_tensor(torch.ones(_NF4_BLOCK * _NF4_GROUP), _NF4_BLOCK, _NF4_GROUP).nf4
        bytes_ = torch.arange(256)
        _LEVELS[device] = torch.stack([levels[bytes_ >> 4], levels[bytes_ & 15]], dim=1).to(device)
    return _LEVELS[device]


def _nf4_tensor() -> Any:
    """torchao's class NF4Tensor."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it warns of each of its extensions for other GPUs
    try:
        from torchao.quantization import NF4Tensor
    except ImportError as error:
        raise ConfigError(
            f"megatron_wrap.adapter.base_weights: nf4 needs torchao, which cannot be imported ({error}); run "
            "pip install 'megatron-wrap[qlora]', or write fp8"
        ) from None
    finally:
        logging.disable(disabled)
    return NF4Tensor


def _fp8(values: Tensor) -> tuple[Tensor, ...]:
    """(float8_e4m3fn values, fp32 scale of each block)."""
    blocks = _padded(values, _FP8_BLOCK).view(-1, _FP8_BLOCK)
    scales = blocks.abs().amax(1) / _LARGEST_FP8
    scales[scales == 0] = 1.0
    return (blocks / scales[:, None]).to(torch.float8_e4m3fn), scales


def _from_fp8(quantized: Tensor, scales: Tensor) -> Tensor:
    """Values in fp32."""
    return quantized.float().mul_(scales[:, None]).view(-1)


def quantized_of(parameter: Tensor) -> QuantizedWeight | None:
    """The values of a parameter that is kept quantized; None: it is an ordinary one."""
    return getattr(parameter, "quantized", None)


@contextlib.contextmanager
def weights_without_memory() -> Iterator[None]:
    """Within the context the weights of Megatron-Core's new linear layers have the memory of one element, so that a
    model that is quantized while it is loaded never has all of its weights. `keep_quantized` or `allocate` must follow
    for each."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    def replace(module: Any, name: str, parameter: Any) -> Any:
        if name != "weight" or parameter is None or not isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            return None
        return torch.nn.Parameter(_placeholder(parameter.data), requires_grad=False)

    handle = register_module_parameter_registration_hook(replace)
    try:
        yield
    finally:
        handle.remove()


def _placeholder(values: Tensor) -> Tensor:
    return values.new_zeros(1).expand(values.shape)


def allocate(layer: torch.nn.Module) -> None:
    """Give the weight of a layer of `weights_without_memory` uninitialized memory."""
    weight: Any = layer.weight
    if weight.untyped_storage().nbytes() < weight.nbytes:
        weight.data = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        weight.requires_grad_(True)


def keep_quantized(layer: torch.nn.Module, kind: QuantizedKind) -> None:
    """Keep the weight of a linear layer, [outputs, inputs], quantized; its values must then be written
    (`QuantizedWeight.write`)."""
    weight: Any = layer.weight
    weight.requires_grad_(False)
    weight.data = _placeholder(weight.data)
    weight.quantized = QuantizedWeight(kind, weight.shape, weight.dtype)
    around = _ValuesInForward(weight)
    layer.register_forward_pre_hook(around.enter, prepend=True)
    layer.register_forward_hook(around.leave, prepend=True, always_call=True)


class _ValuesInForward:
    """Gives a weight its values in its layer's forward pass; values that the pass saves for the backward pass are
    computed again there."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        self._weight, self._placeholder = weight, weight.data
        self._hooks: saved_tensors_hooks | None = None

    def enter(self, *_arguments: Any) -> None:
        quantized = quantized_of(self._weight)
        assert quantized is not None
        values = quantized.values()
        self._placeholder, self._weight.data = self._weight.data, values
        memory = values.untyped_storage().data_ptr()
        del values

        def pack(saved: Tensor) -> Any:
            if saved.untyped_storage().data_ptr() != memory:
                return saved
            return quantized, (saved.size(), saved.stride(), saved.storage_offset())

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else packed[0].values().as_strided(*packed[1])

        self._hooks = saved_tensors_hooks(pack, unpack)
        self._hooks.__enter__()

    def leave(self, *_arguments: Any) -> None:
        if self._hooks is not None:
            self._hooks.__exit__()
            self._weight.data, self._hooks = self._placeholder, None
