"""Megatron-Core's MoE layer with `SortingDispatcher`."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

from megatron_wrap.nn.experts.dispatcher import SortingDispatcher, can_sort_on_device


class GroupedMoELayer(MoELayer):
    """A layer whose experts are `GroupedExperts`. Arguments: those of `MoELayer`."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if can_sort_on_device(self.config):
            self.token_dispatcher = SortingDispatcher(
                self.num_local_experts,
                self.local_expert_indices,
                config=self.config,
                pg_collection=named.get("pg_collection") or get_default_pg_collection(),
            )
