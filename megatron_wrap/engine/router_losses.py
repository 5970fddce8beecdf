"""The losses of the experts' routers as metrics, under Megatron-LM's names.

The routers attach them to the backward pass themselves (model/router.py), where the schedule gives each
micro-batch of each replica the same weight; they are no part of the objective that the step reports.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_wrap.config import derived
from megatron_wrap.config.schema import ArchConfig
from megatron_wrap.engine.state import TrainingState
from megatron_wrap.platform.versions import take_router_losses

_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def router_loss_names(arch: ArchConfig) -> list[str]:
    """Names of the metrics that a model's routers report."""
    names = [_NAMES[kind] for kind in derived.load_balancing_coefficients(arch)]
    return [*names, "z_loss"] if arch.num_experts is not None and arch.moe_z_loss_coeff else names


def router_losses(state: TrainingState, num_microbatches: int) -> dict[str, Tensor]:
    """This rank's part of each loss since the last call, without its coefficient; the sum over all ranks is the mean
    over layers with experts, micro-batches and replicas."""
    arch = state.config.arch
    if arch.num_experts is None:
        return {}
    taken = take_router_losses()
    count = sum(derived.moe_layer_pattern(arch)) * num_microbatches * state.parallel.dp.size
    zero = torch.zeros((), dtype=torch.float64, device=state.platform.device)
    return {name: taken[name].double().sum() / count if name in taken else zero for name in router_loss_names(arch)}
