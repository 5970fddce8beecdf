"""A buffer in host memory that two processes share, for copies of tensors.

The memory belongs to a file without a name (memfd_create), so that it disappears with the last process that uses it,
however that ends. On CUDA it is page-locked.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_wrap.errors import CheckpointError

_ALIGNMENT = 512


@dataclass(frozen=True)
class CopiedTensor:
    """Position of a tensor's values in the buffer, where they are contiguous."""

    offset: int
    """Offset of the first value, in bytes."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the values in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def tensor(self, memory: mmap.mmap) -> Tensor:
        """The values in the buffer, with a storage of their own size."""
        if not self.num_bytes:
            return torch.empty(self.shape, dtype=self.dtype)
        values = torch.frombuffer(memory, dtype=torch.uint8, count=self.num_bytes, offset=self.offset)
        return values.view(self.dtype).view(self.shape)


class HostCopy:
    """The buffer, in the process that fills it.

    Args:
        device: of the tensors.
        processes: number of processes on this host that make such a copy at the same time.
    """

    def __init__(self, device: torch.device, processes: int) -> None:
        self._device, self._processes = device, processes
        self.descriptor = os.memfd_create("checkpoint copy")
        self.num_bytes = 0
        """Size of the buffer in bytes."""
        self._memory: mmap.mmap | None = None
        self._locked = 0
        """Address of the page-locked memory; 0: none."""

    def take(self, tensors: Sequence[Tensor]) -> list[CopiedTensor]:
        """Overwrite the buffer, which grows as needed, with copies of the tensors. When this returns, the copy is
        complete and the tensors may change.

        Raises:
            CheckpointError: the host has too little free memory.
        """
        copies, end = [], 0
        for tensor in tensors:
            copies.append(CopiedTensor(end, tuple(tensor.shape), tensor.dtype))
            end += -(-copies[-1].num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._grow(end)
        if self._memory is not None:
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.tensor(self._memory).copy_(tensor, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return copies

    def close(self) -> None:
        """Release the memory."""
        self._unlock()
        self._memory = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _grow(self, num_bytes: int) -> None:
        if num_bytes <= self.num_bytes:
            return
        needed, available = (num_bytes - self.num_bytes) * self._processes, available_memory()
        if needed > available:
            raise CheckpointError(
                f"the copy for asynchronous saves needs {needed / 2**30:.1f} GiB more memory on this host, which has "
                f"{available / 2**30:.1f} GiB available; set megatron_wrap.checkpoint.async_save: false"
            )
        self._unlock()
        os.ftruncate(self.descriptor, num_bytes)
        self._memory = mmap.mmap(self.descriptor, num_bytes)
        self.num_bytes = num_bytes
        if self._device.type == "cuda":
            address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
            if int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)) != 0:
                raise CheckpointError(
                    f"{num_bytes / 2**30:.1f} GiB of host memory for asynchronous saves cannot be page-locked; raise "
                    "the limit of locked memory (ulimit -l), or set megatron_wrap.checkpoint.async_save: false"
                )
            self._locked = address

    def _unlock(self) -> None:
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._locked)
            self._locked = 0


def available_memory() -> int:
    """Bytes that this host can provide without swapping, or its control group if that is less."""
    import psutil

    available: int = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no control group, or no limit ("max")
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(statistics.get("inactive_file", 0))
        available = min(available, int((group / "memory.max").read_text()) - used)
    return available
