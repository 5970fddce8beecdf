"""Quantized tensors of a Hugging Face folder, dequantized slice by slice.

FP8: a weight in float8 and the scales of its blocks, by which the values are multiplied. MXFP4 (Open Compute Project,
OCP Microscaling Formats 1.0): blocks of 32 values of 4 bits along a row with one exponent. The dequantized values are
computed in fp32 and rounded once to the parameter's dtype; those of MXFP4 are exact in fp32 and in bf16. transformers
does the same (integrations/finegrained_fp8.py, Fp8Dequantize; integrations/mxfp4.py, convert_moe_packed_tensors).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_wrap.bridge.loading.folder_tensors import FolderTensor
from megatron_wrap.bridge.mapping.tensors import Region
from megatron_wrap.config.config_json import Quantization
from megatron_wrap.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_FP8 = ("F8_E4M3", "F8_E5M2")
_SCALES = ("F32", "BF16", "F16", "F64", "F8_E8M0", "U8")
_EXPONENTS = ("F8_E8M0", "U8")
"""Dtypes of scales that are powers of two, a byte each: 2^(byte - 127), and NaN for 255."""
_BLOCKS, _BLOCK_SCALES = "_blocks", "_scales"
_BYTES, _VALUES = 16, 32
"""Number of bytes and number of values of a block of MXFP4."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of E2M1 by the lower 3 of its 4 bits; the highest bit is the sign."""
_UNREAD = ("activation_scale", "input_scale", "output_scale", "k_scale", "v_scale")
"""Names of scales of activations, which only kernels in FP8 use."""
_ADVICE = "download the folder again, or use weights in bf16"


@dataclass(frozen=True)
class QuantizedTensor(FolderTensor):
    """A tensor that is computed from two tensors of files. `name`, `shape` and `dtype` are those of the
    dequantized tensor."""

    values: FolderTensor
    scales: FolderTensor


def with_quantized(folder_tensors: Mapping[str, FolderTensor], quantization: Quantization) -> dict[str, FolderTensor]:
    """The tensors of a folder by their names, with each pair of values and scales as one `QuantizedTensor`.

    Raises:
        CheckpointError: scales are missing, or have another shape or dtype.
    """
    tensors = {name: entry for name, entry in folder_tensors.items() if name.rpartition(".")[2] not in _UNREAD}
    for name, entry in folder_tensors.items():
        if quantization.method == "mxfp4" and name.endswith(_BLOCKS):
            whole = name.removesuffix(_BLOCKS)
            scales = _scales(folder_tensors, name, whole + _BLOCK_SCALES)
            pair = _mxfp4(whole, entry, scales)
        elif quantization.method != "mxfp4" and entry.dtype in _FP8:
            scales = _scales(folder_tensors, name, name + quantization.scale_suffix)
            _check_shape(entry, scales, *_scale_shapes(entry.shape, quantization))
            whole, pair = name, QuantizedTensor(entry.file, entry.name, "F32", entry.shape, entry, scales)
        else:
            continue
        del tensors[name]
        del tensors[scales.name]
        tensors[whole] = pair
    return tensors


def file_slices(
    tensor: QuantizedTensor, region: Region, quantization: Quantization
) -> tuple[tuple[FolderTensor, tuple[slice, ...]], ...]:
    """The slices of the values and of the scales that `dequantized` needs for a region of the dequantized tensor."""
    if quantization.method == "mxfp4":
        experts, rows, columns = region
        index = _index((experts, columns, _covering(rows, _VALUES)))
        return (tensor.values, (*index, slice(0, _BYTES))), (tensor.scales, index)
    single, dimensions = slice(0, 1), len(tensor.scales.shape)
    if quantization.scaling == "tensor":
        index = (single,) * dimensions
    elif quantization.scaling == "channel":
        index = (*_index(region[:-1]), *(single,) * (dimensions + 1 - len(region)))
    else:
        assert quantization.block is not None
        blocks = [_covering(part, width) for part, width in zip(region[-2:], quantization.block, strict=False)]
        index = _index((*region[:-2], *blocks))
    return (tensor.values, _index(region)), (tensor.scales, index)


def dequantized(
    tensor: QuantizedTensor,
    region: Region,
    slices: Sequence[Tensor],
    quantization: Quantization,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A slice of the dequantized tensor, on the device of the slices.

    Args:
        region: of the dequantized tensor.
        slices: those of its `file_slices`.
        dtype: the one that the caller needs. The slice is in bf16 if the caller needs bf16 and the values are exact in
            it, else in fp32.
    """
    values, scales = slices
    if quantization.method == "mxfp4":
        return _from_mxfp4(values, scales, region[1], dtype)
    return _from_fp8(values.float(), _factors(scales), region, quantization)


def _scales(folder_tensors: Mapping[str, FolderTensor], name: str, scale_name: str) -> FolderTensor:
    entry = folder_tensors[name]
    if scale_name not in folder_tensors:
        raise CheckpointError(f"{entry.file}: {name} is quantized, and its scales {scale_name} are missing; {_ADVICE}")
    scales = folder_tensors[scale_name]
    if scales.dtype not in _SCALES:
        raise CheckpointError(f"{scales.file}: {scale_name} has dtype {scales.dtype}, which no scales have; {_ADVICE}")
    return scales


def _scale_shapes(shape: tuple[int, ...], quantization: Quantization) -> tuple[tuple[int, ...], ...]:
    """Shapes that the scales of an FP8 weight may have."""
    if quantization.scaling == "tensor":
        return (), (1,), (1,) * len(shape)
    if quantization.scaling == "channel":
        return (*shape[:-1], 1), shape[:-1]
    assert quantization.block is not None
    blocks = (-(-size // width) for size, width in zip(shape[-2:], quantization.block, strict=False))
    return ((*shape[:-2], *blocks),)


def _check_shape(entry: FolderTensor, scales: FolderTensor, *allowed: tuple[int, ...]) -> None:
    if scales.shape not in allowed:
        raise CheckpointError(
            f"{scales.file}: {scales.name} has shape {list(scales.shape)}, but the scales of {entry.name} "
            f"{list(entry.shape)} have {list(allowed[0])} by quantization_config of config.json; {_ADVICE}"
        )


def _mxfp4(name: str, blocks: FolderTensor, scales: FolderTensor) -> QuantizedTensor:
    """The matrices [experts, rows, columns] that are stored transposed, in bytes [experts, columns, rows / 32, 16]."""
    if blocks.dtype != "U8" or len(blocks.shape) != 4 or blocks.shape[-1] != _BYTES:
        raise CheckpointError(
            f"{blocks.file}: {blocks.name} has shape {list(blocks.shape)} and dtype {blocks.dtype}, but blocks of "
            f"MXFP4 are 4-dimensional, {_BYTES} bytes each; {_ADVICE}"
        )
    _check_shape(blocks, scales, blocks.shape[:-1])
    if scales.dtype not in _EXPONENTS:
        raise CheckpointError(f"{scales.file}: {scales.name} has dtype {scales.dtype}, not U8; {_ADVICE}")
    experts, columns, count, _ = blocks.shape
    return QuantizedTensor(blocks.file, name, "F32", (experts, count * _VALUES, columns), blocks, scales)


def _from_fp8(values: Tensor, factors: Tensor, region: Region, quantization: Quantization) -> Tensor:
    if quantization.scaling == "tensor":
        return values * factors.reshape(())
    if quantization.scaling == "channel":
        return values * factors.reshape(*values.shape[:-1], 1)
    assert quantization.block is not None
    for offset, ((start, stop), width) in enumerate(zip(region[-2:], quantization.block, strict=False)):
        along = offset - len(quantization.block)
        factors = factors.repeat_interleave(width, along).narrow(along, start % width, stop - start)
    return values * factors


def _from_mxfp4(codes: Tensor, scales: Tensor, rows: tuple[int, int], needed: torch.dtype | None) -> Tensor:
    import torch

    dtype = torch.bfloat16 if needed == torch.bfloat16 else torch.float32
    factors = _factors(scales).to(dtype)
    # the two values of a byte are looked up as one number
    pairs = _pairs(codes.device, dtype).index_select(0, codes.int().flatten()).view(dtype)
    values = pairs.view(*factors.shape, _VALUES).mul_(factors[..., None]).flatten(-2)
    return values.narrow(-1, rows[0] % _VALUES, rows[1] - rows[0]).transpose(1, 2)


@functools.cache
def _pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The two values of each byte of MXFP4, in 256 integers whose bits are those of both."""
    import torch

    numbers = (*_FP4, *(-value for value in _FP4))
    pairs = [(low, high) for high in numbers for low in numbers]  # the first value is in the lower bits
    wide = torch.int32 if dtype == torch.bfloat16 else torch.int64
    return torch.tensor(pairs, dtype=dtype, device=device).view(wide).flatten()


def _factors(scales: Tensor) -> Tensor:
    import torch

    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        return scales.float()
    exponents = scales.view(torch.uint8).int()
    # the bits of 2^(exponent - 127) in fp32, which is a subnormal number for 0; not every device's exp2 is exact
    bits = torch.where(exponents == 0, 1 << 22, exponents << 23)
    return torch.where(exponents == 255, torch.nan, bits.view(torch.float32))


def _covering(part: tuple[int, int], width: int) -> tuple[int, int]:
    """The blocks of `width` that contain the indices from `part[0]` to `part[1]`."""
    return part[0] // width, -(-part[1] // width)


def _index(region: Region) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in region)
