"""Gathers unsharded weights and gradients from all ranks, to compare layouts parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.bridge.mapping.family import ADAPTER
from megatron_wrap.config.schema import derived
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.model.chunks import bare_model
from megatron_wrap.model.initial_weights import global_names, is_expert, split_dim
from megatron_wrap.parallel.collectives import gather_objects, gather_tensors


def gather_weights(state: TrainingState) -> dict[str, Tensor]:
    """Global name -> unsharded weight; see `gather_parameters`. Parameters must be synchronized. Collective."""
    return gather_parameters(state, lambda parameter: parameter)


def gather_gradients(state: TrainingState) -> dict[str, Tensor]:
    """Global name -> unsharded gradient; see `gather_parameters`. Collective.

    Call it between `gradients_of_batch` and the optimizer step.
    """
    if state.config.optimizer.use_distributed_optimizer:
        for chunk in state.chunks:
            _complete_buffers(chunk)
    return gather_parameters(state, lambda parameter: getattr(parameter, "main_grad", None))


def gather_parameters(state: TrainingState, read: Callable[[torch.nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
    """Global name -> unsharded tensor of a parameter, fp32 on the CPU, without vocabulary padding; on every rank.
    Collective.

    Of a parameter of several pipeline stages (tied embeddings), the last stage's tensor is returned.

    Args:
        read: returns the tensor to gather for a local parameter, of the same shape, or None to leave it out (the
            gradient of a frozen parameter); may be collective.
    """
    arch, parallel = state.config.arch, state.parallel
    of_this_rank: dict[str, Tensor] = {}
    for chunk in state.chunks:
        for parameter in global_names(bare_model(chunk), tied=not arch.untie_embeddings_and_output_weights):
            name, read_value = parameter.name, read(parameter.tensor)
            if read_value is None:
                continue
            value = parameter.of(read_value.detach()).float()
            expert = is_expert(name)
            tp, replicas = (parallel.expert_tp, parallel.expert_dp) if expert else (parallel.tp, parallel.dp_cp)
            dim = split_dim(name, parameter.tensor)
            if dim is not None:
                # an adapter has separate factors for gate and up; an expert's adapter has one factor for both
                gated = ".linear_fc1" in name and (expert or ADAPTER not in name)
                value = join_slices(gather_tensors(value, tp.group), dim, derived.is_gated(arch) and gated)
            if tp.rank or replicas.rank:
                continue  # another process contributes this parameter
            if name.startswith(("embedding.word_embeddings", "output_layer")):
                value = value[: state.flow.vocab_size]
            of_this_rank[name] = value.cpu()
    whole: dict[str, Tensor] = {}
    for rank_tensors in gather_objects(of_this_rank):
        whole |= rank_tensors
    return whole


def join_slices(parts: list[Tensor], dim: int, gated: bool) -> Tensor:
    """The unsharded matrix from its tensor-parallel shards; a shard of a gated projection contains gate and up."""
    if not gated:
        return torch.cat(parts, dim=dim)
    gates, ups = zip(*(part.chunk(2, dim=0) for part in parts), strict=True)
    return torch.cat([*gates, *ups], dim=0)


def _complete_buffers(chunk: Any) -> None:
    """All-gather the gradient buffers: with the distributed optimizer each data-parallel rank has only its shard of the
    reduced gradients."""
    for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
        for bucket in buffer.buckets:
            group = buffer.data_parallel_group
            shard = bucket.grad_data.chunk(group.size())[group.rank()]
            bucket.grad_data.copy_(torch.cat(gather_tensors(shard.clone(), group)))
