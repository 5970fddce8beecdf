"""Memory into which blocks of files are read, reused for later blocks."""

from __future__ import annotations

import contextlib
import mmap

import torch


class BlockMemory:
    """Buffers of the same size, for use from any thread.

    New memory pages cost as much time as the reading, so memory is reused, and has large pages where the system permits
    them.

    Args:
        num_bytes: the size of a buffer.
        device: if it is a GPU, the memory is page-locked, so that the device copies from it without the processor.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._num_bytes, self._device = num_bytes, device
        self._free: list[memoryview] = []
        self._locked: list[int] = []
        """Addresses of page-locked memory."""

    def take(self) -> memoryview:
        """A buffer that is not in use, with arbitrary content."""
        try:
            return self._free.pop()
        except IndexError:
            return self._allocate()

    def give_back(self, memory: memoryview) -> None:
        """Return memory that is no longer used."""
        self._free.append(memory)

    def close(self) -> None:
        """Release all memory, none of which may be in use."""
        for address in self._locked:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._locked.clear()
        self._free.clear()

    def _allocate(self) -> memoryview:
        pages = mmap.mmap(-1, self._num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):  # a system without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        if self._device.type == "cuda":
            self._lock(torch.frombuffer(pages, dtype=torch.uint8).data_ptr())
        return memoryview(pages)

    def _lock(self, address: int) -> None:
        """Page-lock memory. If that fails, copies are slower, but correct."""
        with torch.cuda.device(self._device):  # the one of this thread is GPU 0
            if int(torch.cuda.cudart().cudaHostRegister(address, self._num_bytes, 0)) == 0:
                self._locked.append(address)
                return
            with contextlib.suppress(RuntimeError):  # CUDA keeps the error until it is asked for
                torch.zeros(1, device=self._device)
