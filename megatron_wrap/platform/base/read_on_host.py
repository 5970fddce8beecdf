"""Copies from the device to the host that overlap with later work in the queue."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def start_host_copy(tensor: Tensor) -> Callable[[], Tensor]:
    """Queue a copy to page-locked memory after the work of the current stream; calling the result waits for this copy
    only.

    Args:
        tensor: a tensor of any shape and dtype; a tensor on the host is not copied.
    """
    if not tensor.is_cuda:
        return lambda: tensor
    on_host, copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True), torch.cuda.Event()
    on_host.copy_(tensor, non_blocking=True)
    copied.record()

    def wait() -> Tensor:
        copied.synchronize()
        return on_host

    return wait
