"""Parameters on all ranks: gathered after an update, their norm, and the check that copies are
bit for bit the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.errors import TrainingError
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.model.chunks import bare_model
from megatron_wrap.model.fp8_parameters import in_high_precision
from megatron_wrap.model.initial_weights import global_names, is_expert, split_dim
from megatron_wrap.parallel.collectives import gather_objects
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
            if not getattr(parameter, "allreduce", True):  # an expert's; see setup/model_chunks.py
                counts = parallel.expert_dp.rank == 0
            else:
                is_slice = getattr(parameter, "tensor_model_parallel", False)
                is_copy = getattr(parameter, "shared", False)  # the tied output layer on the last stage
                counts = parallel.dp_cp.rank == 0 and (is_slice or parallel.tp.rank == 0) and not is_copy
            if counts:
                total += torch.linalg.vector_norm(parameter, dtype=torch.float64) ** 2
    return total


_WORDS = 2**22
"""Number of 8-byte words that are added up at once."""
Shard = tuple[str, int]
"""Global name of a parameter, and index of its tensor-parallel shard."""


def refuse_differing_copies(chunks: Sequence[Any], config: RunConfig, parallel: ParallelState, iteration: int) -> None:
    """Compare the checksums of all copies of each parameter: those of data- and context-parallel replicas, and those of
    tensor-parallel ranks where a parameter is not split. Collective.

    Args:
        chunks: this process's model chunks in Megatron-Core's DistributedDataParallel.
        iteration: the one that has ended, for the message.

    Raises:
        TrainingError: on every rank, if copies differ; it names the parameter and the ranks of the smaller part.
    """
    synchronize_parameters(chunks, bool(config.ddp.overlap_param_gather))
    copies: dict[Shard, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, sums in enumerate(gather_objects(_checksums(chunks, config, parallel))):
        for shard, value in sums.items():
            copies[shard][value].append(rank)
    differing = {shard: list(by_value.values()) for shard, by_value in copies.items() if len(by_value) > 1}
    if not differing:
        return
    (name, _), groups = next(iter(differing.items()))
    *smaller, most = sorted(groups, key=len)
    fewer = sorted(rank for group in smaller for rank in group)
    further = f" and {counted(len(differing) - 1, 'other parameter')}" if len(differing) > 1 else ""
    raise TrainingError(
        f"after iteration {iteration} copies of {name}{further} differ: {_ranks(fewer)} against "
        f"{_ranks(most)}; faulty memory, or a flow that changes weights on some processes; resume from the newest "
        "checkpoint, without the machine of the smaller part if it happens again"
    )


def _checksums(chunks: Sequence[Any], config: RunConfig, parallel: ParallelState) -> dict[Shard, int]:
    """Checksum of each of this process's parameters."""
    tied = not config.arch.untie_embeddings_and_output_weights
    sums: dict[Shard, Tensor] = {}
    for chunk in map(bare_model, chunks):
        for parameter in global_names(chunk, tied):
            split = split_dim(parameter.name, parameter.tensor) is not None
            axis = parallel.expert_tp if is_expert(parameter.name) else parallel.tp
            values = parameter.of(in_high_precision(parameter.tensor).detach())
            sums[parameter.name, axis.rank if split else 0] = checksum(values)
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}


def checksum(values: Tensor) -> Tensor:
    """Checksum of a tensor's bytes, int64 scalar on the same device: the sum modulo 2^64 of its 8-byte words, each
    times an odd number of its position. One changed word always changes it, since odd numbers are invertible there."""
    octets = values.contiguous().reshape(-1).view(torch.uint8)
    words = functional.pad(octets, (0, -len(octets) % 8)).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for number, part in enumerate(words.split(_WORDS)):
        first = number * _WORDS
        factors = 2 * torch.arange(first, first + len(part), device=values.device) + 1
        total += (part * factors).sum()
    return total


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
