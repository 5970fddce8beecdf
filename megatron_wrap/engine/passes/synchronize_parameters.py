"""Gathers updated shards of the policy's parameters, and computes their norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.parallel.state import ParallelState


def synchronize_parameters(chunks: Sequence[Any], overlap_param_gather: bool) -> None:
    """All-gather the updated parameters if the optimizer step has not done so. Collective.

    Args:
        chunks: this process's model chunks in Megatron-Core's DistributedDataParallel.
        overlap_param_gather: the all-gather is deferred to the next forward pass; if False, this function does nothing.
    """
    if overlap_param_gather:
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)


@torch.no_grad()
def quantize_parameters(optimizer: Any, chunks: Sequence[Any]) -> None:
    """Compute the FP8 parameters from the optimizer's fp32 ones, as a step does at its end. Collective.

    Parameters that were loaded in bf16 have scales that differ by bf16's rounding, so without it a resumed run would
    not be exact.

    Args:
        optimizer: `CheckedOptimizer` over Megatron-Core's distributed optimizers.
        chunks: this process's model chunks in Megatron-Core's DistributedDataParallel.
    """
    for part in optimizer.chained_optimizers:
        part._copy_main_params_to_model_params()
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)


@torch.no_grad()
def parameter_square_sum(chunks: Sequence[Any], parallel: ParallelState, device: torch.device) -> Tensor:
    """This rank's summand of the squared norm of all parameters, fp64 scalar; replicated parameters are counted on one
    rank only."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for chunk in chunks:
        for parameter in chunk.parameters():
            if not getattr(parameter, "allreduce", True):  # an expert's; see build.py
                counts = parallel.expert_dp.rank == 0
            else:
                is_slice = getattr(parameter, "tensor_model_parallel", False)
                is_copy = getattr(parameter, "shared", False)  # the tied output layer on the last stage
                counts = parallel.dp_cp.rank == 0 and (is_slice or parallel.tp.rank == 0) and not is_copy
            if counts:
                total += torch.linalg.vector_norm(parameter, dtype=torch.float64) ** 2
    return total
