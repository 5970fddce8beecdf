"""Gradients that a layer adds to the buffer of its weight itself, instead of returning them to autograd, and gradient
buffers that are summed over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def placeholder(weight: Any) -> Tensor | None:
    """The value that an autograd function returns for a gradient that it has added to `weight.main_grad`. Autograd then
    calls the hook of Megatron-Core's DistributedDataParallel, which marks the gradient as complete and does not add the
    returned value (tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication). The value is memory
    without values, or zeros where another layer that shares the weight returns its gradient. None: the weight has no
    such hook."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


def sum_over_ranks(chunks: Iterable[Any]) -> None:
    """Make Megatron-Core's DistributedDataParallel sum the gradients of data- and context-parallel ranks. By default it
    averages them, in a pass over its buffers before their reduction."""
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            for bucket in buffer.buckets:
                bucket.gradient_scaling_factor = 1.0
