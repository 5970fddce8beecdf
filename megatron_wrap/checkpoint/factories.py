"""Parameters that a checkpoint stores in several parts, such as the halves of a fused SwiGLU weight.

Megatron-Core's ShardedTensorFactory describes each part as a view of the parameter, and a load reads directly into
these views. Megatron-Core then still concatenates the parts in a new tensor and copies it to the parameter. The
functions here leave out both copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory


def merged_in_place(sharded_state: Mapping[str, Any]) -> dict[str, Any]:
    """The sharded state for a load. Its factories return the parameter itself if all of its parts were read into it,
    and otherwise merge the parts as before."""
    return dict(dict_list_map_outplace(_in_place, sharded_state))


def _in_place(entry: Any) -> Any:
    if not isinstance(entry, ShardedTensorFactory):
        return entry
    functions = _Functions(entry)
    return replace(entry, build_fn=functions.build, merge_fn=functions.merge)


class _Functions:
    """`build_fn` and `merge_fn` of a factory, which is the inverse of `build_fn`."""

    def __init__(self, factory: ShardedTensorFactory) -> None:
        self._factory = factory
        self._whole: torch.Tensor | None = None
        self._parts: list[Any] = []

    def build(self, key: str, tensor: torch.Tensor, *further: Any) -> Any:
        """The descriptions of the parts of a tensor."""
        built = self._factory.build_fn(key, tensor, *further)
        self._whole, self._parts = tensor, [getattr(entry, "data", None) for entry in nested_values(built)]
        return built

    def merge(self, loaded: Any) -> torch.Tensor:
        """The tensor with the parts that were read."""
        whole, parts, self._whole, self._parts = self._whole, self._parts, None, []
        read = list(nested_values(loaded))
        are_tensors = all(isinstance(part, torch.Tensor) for part in [*parts, *read])
        if whole is not None and are_tensors and _are_all_of(whole, parts) and _are_same(read, parts):
            return whole
        return self._factory.merge_fn(loaded)


def _are_all_of(whole: torch.Tensor, parts: list[torch.Tensor]) -> bool:
    """Whether the parts are views of the tensor that cover all of its elements."""
    storage = whole.untyped_storage().data_ptr()
    return sum(part.numel() for part in parts) == whole.numel() and all(
        part.untyped_storage().data_ptr() == storage for part in parts
    )


def _are_same(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether two lists of tensors have the same memory and the same shapes."""

    def views(of: list[torch.Tensor]) -> list[Any]:
        return [(tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride()) for tensor in of]

    return views(tensors) == views(others)
