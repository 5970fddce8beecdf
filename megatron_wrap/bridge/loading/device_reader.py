"""Slices of tensor files on a GPU.

A thread reads bytes into page-locked memory and continues to read while they are copied to the device; nothing waits
for the device until everything is read. The device computes whether the values are finite, and the host reads the
result once, at the end.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Iterator
from io import FileIO

import torch
from torch import Tensor

from megatron_wrap.bridge.loading.folder_tensors import FolderTensor, not_finite
from megatron_wrap.errors import CheckpointError

_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
}
_BUFFERS = 2
"""Number of buffers per thread: one is filled while the other is copied."""
_BUFFER_BYTES = 8 * 2**20
_LEAST_BYTES = 2**16
"""Smallest size in bytes of a contiguous range, if a slice has several."""


class DeviceReader:
    """Reads for one device, from any number of threads.

    The copies, and what the caller computes `on_stream`, are on the stream that is current in the thread that creates
    the reader. Host memory: 16 MiB for each thread.

    Args:
        device: a GPU; on the CPU the memory is not page-locked.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._buffers: dict[int, Iterator[_Buffer]] = {}
        """Identity of a thread -> its buffers, in turn."""
        self._extremes: list[tuple[FolderTensor, Tensor]] = []

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Context in which the calling thread uses the device and the reader's stream."""
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            yield

    def read(self, entry: FolderTensor, index: tuple[slice, ...]) -> Tensor | None:
        """A slice on the device, complete once the stream has executed its copy. None if the slice is not contiguous in
        the file for each index of its first dimension, if its ranges are so small that a memory map is faster, or if
        the file has another format.

        Raises:
            CheckpointError: the file is shorter than its header requires.
            OSError: it cannot be read.
        """
        dtype, ranges = _DTYPES.get(entry.dtype), _ranges(entry.shape, index)
        if entry.start is None or dtype is None or not ranges:
            return None
        shape = tuple(len(range(*part.indices(size))) for part, size in zip(index, entry.shape, strict=True))
        size = math.prod(shape) * dtype.itemsize
        if len(ranges) > 1 and size < len(ranges) * _LEAST_BYTES:
            return None
        values = torch.empty(size, dtype=torch.uint8, device=self.device)
        buffers = self._of_this_thread()
        with entry.file.open("rb", buffering=0) as file:
            for first, target in zip(ranges, values.chunk(len(ranges)), strict=True):
                file.seek(entry.start + first * dtype.itemsize)
                for part in target.split(_BUFFER_BYTES):
                    next(buffers).pass_on(file, part, self._stream)
        return values.view(dtype).view(shape)

    def check_later(self, entry: FolderTensor, values: Tensor) -> None:
        """Let `finish` raise if a value is NaN or infinity."""
        if values.numel():  # NaN is propagated; isfinite().all() reads and writes five times as much memory
            self._extremes.append((entry, torch.stack(values.aminmax())))

    def finish(self) -> None:
        """Wait for what was read.

        Raises:
            CheckpointError: a tensor contains NaN or infinity.
        """
        checked, self._extremes = self._extremes, []
        flags = torch.stack([extremes for _, extremes in checked]).isfinite().tolist() if checked else []
        for (entry, _), are_finite in zip(checked, flags, strict=True):
            if not all(are_finite):
                raise not_finite(entry)

    def _of_this_thread(self) -> Iterator[_Buffer]:
        thread = threading.get_ident()
        if thread not in self._buffers:
            buffers = [_Buffer(is_pinned=self._stream is not None) for _ in range(_BUFFERS)]
            self._buffers[thread] = itertools.cycle(buffers)
        return self._buffers[thread]


class _Buffer:
    """Host memory that is filled again once its last content has been copied to the device."""

    def __init__(self, is_pinned: bool) -> None:
        self._memory = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
        self._copied = torch.cuda.Event(blocking=True) if is_pinned else None

    def pass_on(self, file: FileIO, target: Tensor, stream: torch.cuda.Stream | None) -> None:
        """Read the bytes of `target` from the position of the file, and queue their copy."""
        if self._copied is not None:
            self._copied.synchronize()  # returns at once before the first copy
        content = self._memory[: target.numel()]
        _read_into(content.numpy().data, file)
        target.copy_(content, non_blocking=True)
        if self._copied is not None:
            self._copied.record(stream)


def _read_into(memory: memoryview, file: FileIO) -> None:
    position = 0
    while position < len(memory):
        count = file.readinto(memory[position:])
        if not count:
            raise CheckpointError(f"{file.name} is shorter than its header says; download the file again")
        position += count


def _ranges(shape: tuple[int, ...], index: tuple[slice, ...]) -> list[int]:
    """First element of each range of equal length that a slice has in its tensor: one range for each index of its first
    dimension, or one range in all. Empty if the slice has more ranges."""
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    lengths = [max(0, stop - start) for start, stop in bounds]
    partial = [dim for dim, (length, size) in enumerate(zip(lengths, shape, strict=True)) if length != size]
    last = partial[-1] if partial else 0
    if any(length != 1 for length in lengths[1:last]):
        return []
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(start * stride for (start, _), stride in zip(bounds, strides, strict=True))
    return [first] if last == 0 else [first + number * strides[0] for number in range(lengths[0])]
