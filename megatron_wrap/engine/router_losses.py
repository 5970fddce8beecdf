"""Auxiliary losses of the MoE routers as metrics, under Megatron-LM's names.

The routers attach these losses to the backward pass themselves (model/router.py), and the schedule gives each
micro-batch of each replica the same weight. They are not part of the objective that the step reports.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.platform.megatron_core.versions import router_loss_values

_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def router_loss_names(arch: ArchConfig) -> list[str]:
    """Names of the router losses that a model reports as metrics."""
    names = [_NAMES[kind] for kind in derived.load_balancing_coefficients(arch)]
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
