"""Reading of a tensor that `torch.save` wrote, into existing memory, from a file or from bytes in memory.

torch.load allocates memory for the tensor. The pages of new memory can cost more than the reading, and the tensor is
copied from there once more.
"""

from __future__ import annotations

import collections
import io
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
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


class BytesInMemory(io.RawIOBase):
    """A stream of bytes in several arrays, in their order.

    Args:
        pieces: one-dimensional, uint8.
    """

    def __init__(self, pieces: Sequence[np.ndarray]) -> None:
        self._pieces, self._position = pieces, 0
        self._size = sum(piece.size for piece in pieces)

    def readable(self) -> bool:
        """Whether the stream can be read: always, as for a file."""
        return True

    def seekable(self) -> bool:
        """Whether the position can be set: always."""
        return True

    def tell(self) -> int:
        """Position in the stream, in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Set the position, and return it."""
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Fills the buffer, unless the stream ends; a copy of many bytes does not hold Python's lock."""
        target, filled = np.frombuffer(buffer, np.uint8), 0
        for piece in self.slices(self._position, target.size):
            np.copyto(target[filled : filled + piece.size], piece)
            filled += piece.size
        self._position += filled
        return filled

    def slices(self, begin: int, length: int) -> list[np.ndarray]:
        """Views of the `length` bytes from `begin` on, or of as many as the stream has there."""
        pieces, first = [], 0
        for piece in self._pieces:
            part = piece[max(0, begin - first) : max(0, begin + length - first)]
            if part.size:
                pieces.append(part)
            first += piece.size
        return pieces


def read_into(target: torch.Tensor, saved: IO[bytes] | BytesInMemory) -> bool:
    """Read a tensor into `target`, without a further copy.

    Args:
        target: contiguous, on the CPU.
        saved: what `torch.save` wrote, from the stream's beginning to its end.

    Returns:
        Whether the tensor was read. If not, it has another dtype or shape than `target`, its elements are not
        contiguous in row-major order, or the file is damaged; `torch.load` can read or refuse it.

    Raises:
        OSError: the file cannot be read.
    """
    begin = _begin_of(saved, target)
    if begin is None:
        return False
    elements: Any = _bytes_of(target).numpy()
    memory = memoryview(elements)
    saved.seek(begin)
    while memory:
        size = saved.readinto(memory)  # type: ignore[union-attr]
        if not size:
            return False
        memory = memory[size:]
    return True


@dataclass(frozen=True)
class ElementsInMemory:
    """The elements of a saved tensor, as bytes in several arrays."""

    slices: Sequence[np.ndarray]

    def copy_to(self, target: torch.Tensor) -> None:
        """Copy the elements to a contiguous tensor of their dtype and number."""
        memory, first = _bytes_of(target), 0
        for part in self.slices:
            memory[first : first + part.size].copy_(torch.from_numpy(part))
            first += part.size


def elements_of(target: torch.Tensor, saved: BytesInMemory) -> ElementsInMemory | None:
    """The elements for `target`, which may be on any device; None where `read_into` returns False."""
    begin = _begin_of(saved, target)
    if begin is None:
        return None
    slices = saved.slices(begin, target.nbytes)
    return ElementsInMemory(slices) if sum(part.size for part in slices) == target.nbytes else None


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: torch.dtype
    num_elements: int


@dataclass(frozen=True)
class _TensorInPickle:
    """A tensor in a pickle whose elements are contiguous in row-major order in a storage, from element `first` on."""

    storage: _Storage
    first: int
    size: tuple[int, ...]


def _begin_of(saved: IO[bytes] | BytesInMemory, target: torch.Tensor) -> int | None:
    """Position of the first element of the saved tensor in the stream."""
    try:
        reader: Any = torch._C.PyTorchFileReader  # which torch.load uses; its stub lacks methods
        archive = reader(saved)
        if archive.has_record("byteorder") and archive.get_record("byteorder").decode() != sys.byteorder:
            return None
        content = restricted_pickle.load(io.BytesIO(archive.get_record("data.pkl")), _names, _storage)
        if not isinstance(content, _TensorInPickle) or content.size != tuple(target.size()):
            return None
        if content.storage.dtype != target.dtype or content.first + target.numel() > content.storage.num_elements:
            return None
        record = int(archive.get_record_offset(f"data/{content.storage.key}"))
        return record + content.first * target.itemsize
    except Exception:  # a damaged pickle or archive raises almost any exception; torch.load raises it with its reason
        return None


def _names(module: str, name: str) -> Any:
    """The class or function that a name means in the pickle of a tensor; None: refused."""
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
) -> _TensorInPickle:
    """Replaces torch's function of this name in the pickle, which creates the tensor.

    Args:
        bits: flags of the tensor, such as that its elements are negated when they are used; tensors with flags are
            refused.
    """
    if type(storage) is not _Storage or type(first) is not int or first < 0 or not _is_row_major(size, stride) or bits:
        raise pickle.UnpicklingError("its elements are not in row-major order")
    return _TensorInPickle(storage, first, tuple(size))


def _is_row_major(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    following = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1 and step != following:
            return False
        following *= length
    return True
