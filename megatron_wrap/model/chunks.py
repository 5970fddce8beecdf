"""Model chunks: the parts of the model that one process holds, and the wrappers that Megatron-Core puts around them."""

from __future__ import annotations

from typing import Any

import torch


def bare_model(chunk: torch.nn.Module) -> Any:
    """The model chunk without Megatron-Core's data-parallel and half-precision wrappers."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.module import Float16Module

    model: Any = chunk
    while isinstance(model, DistributedDataParallel | Float16Module):
        model = model.module
    return model
