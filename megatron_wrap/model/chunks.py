"""Model chunks: the parts of the model on one process, and Megatron-Core's wrappers around them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def bare_model(chunk: torch.nn.Module) -> Any:
    """The model chunk without Megatron-Core's data-parallel and half-precision wrappers."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.module import Float16Module

    model: Any = chunk
    while isinstance(model, DistributedDataParallel | Float16Module):
        model = model.module
    return model


def remove_gather_hooks(chunks: Sequence[torch.nn.Module]) -> None:
    """Remove the hooks with which Megatron-Core's wrapper gathers parameters in the forward pass
    (`overlap_param_gather`): with them model, gradients and optimizer are not freed until the process ends."""
    from megatron.core.distributed import DistributedDataParallel

    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.remove_forward_pre_hook_handles:
            chunk.disable_forward_pre_hook(param_sync=False)


def router_biases(chunks: Sequence[torch.nn.Module]) -> list[Tensor]:
    """The expert biases of this process's routers for load balancing, each [experts]: buffers that each step updates
    without a gradient. Empty for a model without them."""
    return [buffer for chunk in chunks for name, buffer in chunk.named_buffers() if name.endswith("router.expert_bias")]


@contextlib.contextmanager
def restored_on_error(tensors: Sequence[Tensor]) -> Iterator[Callable[[], None]]:
    """Restore the values of the tensors bit for bit if the body raises, or calls the yielded function."""
    saved = [tensor.clone() for tensor in tensors]

    def restore() -> None:
        for tensor, value in zip(tensors, saved, strict=True):
            tensor.copy_(value)

    try:
        yield restore
    except BaseException:
        restore()
        raise


def weight_lines(chunks: Sequence[torch.nn.Module]) -> Iterator[str]:
    """Name, local shape and dtype of each parameter of a process's model chunks."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            yield f"{name} {tuple(parameter.shape)} {parameter.dtype}"
