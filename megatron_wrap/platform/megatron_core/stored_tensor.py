"""Reading of a tensor that `torch.save` wrote into memory that exists.

torch.load allocates memory for what it reads. The pages of new memory can cost more than the reading, and the tensor is
copied from there once more.
"""

from __future__ import annotations

import collections
import io
import os
import pickle
import sys
from dataclasses import dataclass
from typing import IO, Any

import torch

from megatron_wrap.platform.megatron_core import restricted_pickle

_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
"""Class of a storage in a pickle -> its dtype."""


def read_into(target: torch.Tensor, file: IO[bytes], saved: IO[bytes], offset: int, length: int) -> bool:
    """Read a tensor into `target`, without a further copy.

    Args:
        target: contiguous, on the CPU.
        file: its bytes from `offset` on, `length` of them, are what `torch.save` wrote.
        saved: these bytes as a stream.

    Returns:
        Whether it was read; if not, `torch.load` can read what was saved, or refuse it: it is no tensor of the dtype
        and shape of `target`, its elements are not one after the other in row-major order, or the file is damaged.

    Raises:
        OSError: the file cannot be read.
    """
    begin = _begin_of(saved, target)
    if begin is None or begin + target.nbytes > length:
        return False
    elements: Any = target.view(-1).view(torch.uint8).numpy()
    memory, position = memoryview(elements), offset + begin
    while memory:
        size = os.preadv(file.fileno(), [memory], position)
        if not size:
            return False
        memory, position = memory[size:], position + size
    return True


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: torch.dtype
    num_elements: int


@dataclass(frozen=True)
class _Stored:
    """A tensor in a pickle, with its elements in row-major order from an element of a storage on."""

    storage: _Storage
    first: int
    size: tuple[int, ...]


def _begin_of(saved: IO[bytes], target: torch.Tensor) -> int | None:
    """Position of the first element of the saved tensor in the stream."""
    try:
        archive: Any = torch._C.PyTorchFileReader(saved)  # which torch.load uses; its stub lacks methods
        if archive.has_record("byteorder") and archive.get_record("byteorder").decode() != sys.byteorder:
            return None
        content = restricted_pickle.load(io.BytesIO(archive.get_record("data.pkl")), _names, _storage)
        if not isinstance(content, _Stored) or content.size != tuple(target.size()):
            return None
        if content.storage.dtype != target.dtype or content.first + target.numel() > content.storage.num_elements:
            return None
        record = int(archive.get_record_offset(f"data/{content.storage.key}"))
        return record + content.first * target.itemsize
    except Exception:  # a damaged pickle or archive raises almost any exception; torch.load raises it with its reason
        return None


def _names(module: str, name: str) -> Any:
    """What a pickle of a tensor refers to."""
    if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
        return _tensor
    if (module, name) == ("collections", "OrderedDict"):  # the hooks
        return collections.OrderedDict
    return _DTYPES.get(name) if module == "torch" else None


def _storage(saved: Any) -> _Storage:
    kind, dtype, key, _, num_elements = saved
    if kind != "storage" or not isinstance(dtype, torch.dtype) or type(key) is not str or type(num_elements) is not int:
        raise pickle.UnpicklingError("it refers to something else than a storage")
    return _Storage(key, dtype, num_elements)


def _tensor(
    storage: Any, first: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, bits: Any = None
) -> _Stored:
    """As torch's function of the name in the pickle, which creates the tensor.

    Args:
        bits: such as that of a tensor whose elements are negated when they are used.
    """
    if type(storage) is not _Storage or type(first) is not int or first < 0 or not _is_row_major(size, stride) or bits:
        raise pickle.UnpicklingError("its elements are not in row-major order")
    return _Stored(storage, first, tuple(size))


def _is_row_major(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    following = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1 and step != following:
            return False
        following *= length
    return True
