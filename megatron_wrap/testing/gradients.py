"""The whole model's weights and gradients from those of its parts, to compare layouts parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.engine.state import TrainingState
from megatron_wrap.model.initial_weights import global_names, is_expert, split_dim
from megatron_wrap.parallel.collectives import gather_objects, gather_tensors


def gather_weights(state: TrainingState) -> dict[str, Tensor]:
    """Global name -> whole weight, as `gather_parameters` has it. Not while an overlapped gathering is pending."""
    return gather_parameters(state, lambda parameter: parameter)


def gather_gradients(state: TrainingState) -> dict[str, Tensor]:
    """Global name -> whole gradient, as `gather_parameters` has it.

    Call it between `compute_gradients` and the optimizer's step.
    """
    if state.config.optimizer.use_distributed_optimizer:
        for chunk in state.chunks:
            _complete_buffers(chunk)
    return gather_parameters(state, lambda parameter: getattr(parameter, "main_grad"))  # noqa: B009 - Megatron sets it


def gather_parameters(state: TrainingState, read: Callable[[torch.nn.Parameter], Tensor]) -> dict[str, Tensor]:
    """Global name -> `read` of the whole parameter, fp32 on the CPU, without vocabulary padding; on every rank.

    Of a parameter that several pipeline stages hold (tied embeddings), the last stage's.

    Args:
        read: what to take of a parameter: a tensor of its shape, the same slice of the whole. Collective, like this.
    """
    arch, parallel = state.config.arch, state.parallel
    mine: dict[str, Tensor] = {}
    for chunk in state.chunks:
        for name, parameter in global_names(unwrapped(chunk), tied=not arch.untie_embeddings_and_output_weights):
            value = read(parameter).detach().float()
            tp, copies = (parallel.tp, parallel.dp_cp)
            if is_expert(name):
                tp, copies = parallel.expert_tp, parallel.expert_dp
            dim = split_dim(name, parameter)
            if dim is not None:
                value = join_slices(gather_tensors(value, tp.group), dim, arch.swiglu and ".linear_fc1." in name)
            if tp.rank or copies.rank:
                continue  # another process speaks
            if name.startswith(("embedding.word_embeddings", "output_layer")):
                value = value[: state.flow.vocab_size]
            mine[name] = value.cpu()
    whole: dict[str, Tensor] = {}
    for of_rank in gather_objects(mine):
        whole |= of_rank
    return whole


def unwrapped(chunk: Any) -> Any:
    """The provider's model inside Megatron-Core's DistributedDataParallel and Float16Module."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def join_slices(parts: list[Tensor], dim: int, gated: bool) -> Tensor:
    """The whole matrix from its tensor-parallel slices; each slice of a gated one holds gate and up halves."""
    if not gated:
        return torch.cat(parts, dim=dim)
    gates, ups = zip(*(part.chunk(2, dim=0) for part in parts), strict=True)
    return torch.cat([*gates, *ups], dim=0)


def _complete_buffers(chunk: Any) -> None:
    """The distributed optimizer leaves each data-parallel rank its shard of the reduced gradients; gather them."""
    for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
        for bucket in buffer.buckets:
            group = buffer.data_parallel_group
            shard = bucket.grad_data.chunk(group.size())[group.rank()]
            bucket.grad_data.copy_(torch.cat(gather_tensors(shard.clone(), group)))
