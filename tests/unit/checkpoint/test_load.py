"""Parameters whose parts were read directly into them are not concatenated again; Megatron-Core merges the others."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_wrap.platform import choose_platform

choose_platform("cpu").install()

from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import (  # noqa: E402
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory  # noqa: E402

from megatron_wrap.checkpoint.load import merged_in_place  # noqa: E402


def loaded(state: dict[str, Any], values: list[torch.Tensor], in_place: bool) -> torch.Tensor:
    """The merged tensor of a load that read these values."""
    factories = {**state}
    apply_factories(state)
    parts = [entry.data for entry in nested_values(state)]
    tensors = parts if in_place else [torch.empty_like(part) for part in parts]
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
    return apply_factory_merges({"weight": tensors}, factories)["weight"]


@pytest.mark.parametrize("in_place", [True, False])
def test_halves_of_a_fused_weight(in_place: bool) -> None:
    halves = list(torch.randn(2, 6, 5))
    factory = apply_swiglu_sharded_factory(ShardedTensor.from_rank_offsets("weight", torch.zeros(12, 5)), ())
    weight = torch.zeros(12, 5)  # a state of the optimizer has the functions of its parameter and other data
    request = {"weight": replace(factory, data=weight)}
    merged = loaded(merged_in_place(request), halves, in_place)
    torch.testing.assert_close(merged, factory.merge_fn(halves), rtol=0, atol=0)
    assert (merged is weight) == in_place
    assert request["weight"].merge_fn is factory.merge_fn


def test_views_that_are_a_part_of_the_tensor_are_merged_as_before() -> None:
    def build(key: str, tensor: torch.Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        return [ShardedTensor.from_rank_offsets(key, tensor[:2], replica_id=replica_id)]

    def merge(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([*parts, torch.full((1, 3), 7.0)])

    weight, value = torch.zeros(3, 3), torch.randn(2, 3)
    state = merged_in_place({"weight": ShardedTensorFactory("weight", weight, build, merge)})
    torch.testing.assert_close(loaded(state, [value], in_place=True), merge([value]), rtol=0, atol=0)
