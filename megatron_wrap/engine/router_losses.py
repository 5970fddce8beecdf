"""Auxiliary losses of the MoE routers as metrics, under Megatron-LM's names, and the load of the experts.

The routers attach these losses to the backward pass themselves (nn/experts/router.py), and the schedule gives each
micro-batch of each replica the same weight. They are not part of the objective that the step reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.parallel.collectives import reduce_in_place
from megatron_wrap.platform.megatron_core.versions import BALANCE_LOSSES, router_loss_values

if TYPE_CHECKING:
    from megatron_wrap.nn.experts.router import Router
    from megatron_wrap.parallel.state import Axis


def router_loss_names(arch: ArchConfig) -> list[str]:
    """Names of the router losses that a model reports as metrics."""
    names = [BALANCE_LOSSES[kind] for kind in derived.load_balancing_coefficients(arch)]
    return [*names, "z_loss"] if arch.num_experts is not None and arch.moe_z_loss_coeff else names


def reset_router_losses(arch: ArchConfig) -> None:
    """Reset this process's sums of router losses to zero; nothing to do for a dense model."""
    if arch.num_experts is not None:
        for values in router_loss_values().values():
            values.zero_()


def router_losses(arch: ArchConfig, num_microbatches: int, dp_size: int, device: torch.device) -> dict[str, Tensor]:
    """This rank's summand of each router loss since `reset_router_losses`, without its coefficient; the sum over all
    ranks is the mean over MoE layers, micro-batches and replicas. Empty for a dense model.

    Args:
        num_microbatches: of one replica.
        dp_size: number of replicas.
    """
    if arch.num_experts is None:
        return {}
    values = router_loss_values()
    count = sum(derived.moe_layer_pattern(arch)) * num_microbatches * dp_size
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return {name: values[name].double().sum() / count if name in values else zero for name in router_loss_names(arch)}


def record_expert_load(chunks: Sequence[torch.nn.Module]) -> None:
    """Let the routers start counting, from zero, the load that `expert_load` reports."""
    for router in _routers(chunks):
        router.record_load()


def expert_load(chunks: Sequence[torch.nn.Module], arch: ArchConfig, world: Axis) -> dict[str, float]:
    """`experts/layer_N/NAME` of each layer N with experts (counted from 0), over the tokens of all ranks since
    `record_expert_load`: `busiest`, the busiest expert's tokens over the mean of all experts; `entropy`, the mean
    entropy in nats of the router's scores of a token; `dropped`, assignments without an expert. Collective over all
    ranks."""
    pattern = derived.moe_layer_pattern(arch)
    table = torch.zeros(len(pattern), (arch.num_experts or 0) + 3)
    for router in _routers(chunks):
        assert router.load is not None
        assert router.layer_number is not None
        table = table.to(router.load.device)
        table[router.layer_number - 1] += router.load
    reduce_in_place(table, "sum", world.group)
    metrics: dict[str, float] = {}
    for layer in (number for number, with_experts in enumerate(pattern) if with_experts):
        *counts, tokens, entropy, dropped = table[layer].tolist()
        name = f"experts/layer_{layer}"
        metrics[f"{name}/busiest"] = max(counts) * len(counts) / max(sum(counts), 1.0)
        metrics[f"{name}/entropy"] = entropy / max(tokens, 1.0)
        metrics[f"{name}/dropped"] = dropped
    return metrics


def _routers(chunks: Sequence[torch.nn.Module]) -> Iterator[Router]:
    """The routers of the decoder; those of the layers for multi-token prediction have no layer number."""
    from megatron_wrap.nn.experts.router import Router

    for chunk in chunks:
        routers = (module for module in chunk.modules() if isinstance(module, Router))
        yield from (router for router in routers if router.layer_number is not None)
