"""Gradients of the whole model from those of its parts, to compare layouts parameter by parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_wrap.core.model.initial_weights import global_names
from megatron_wrap.engine.state import TrainingState
from megatron_wrap.parallel.collectives import gather_objects, gather_tensors


def gather_gradients(state: TrainingState) -> dict[str, Tensor]:
    """Global name -> whole gradient, fp32 on the CPU, without vocabulary padding; on every rank.

    Call it between `compute_gradients` and the optimizer's step.
    """
    arch, tp = state.config.arch, state.parallel.tp
    mine: dict[str, Tensor] = {}
    for chunk in state.chunks:
        if state.config.optimizer.use_distributed_optimizer:
            _complete_buffers(chunk)
        model: Any = chunk.module
        while hasattr(model, "module"):
            model = model.module
        for name, parameter in global_names(model, tied=not arch.untie_embeddings_and_output_weights):
            gradient = getattr(parameter, "main_grad").detach().float()  # noqa: B009 - Megatron-Core sets it
            if getattr(parameter, "tensor_model_parallel", False):
                parts = gather_tensors(gradient, tp.group)
                gated = arch.swiglu and name.endswith("linear_fc1.weight")
                gradient = join_slices(parts, getattr(parameter, "partition_dim"), gated)  # noqa: B009
            if name.startswith(("embedding.word_embeddings", "output_layer")):
                gradient = gradient[: state.flow.vocab_size]
            mine[name] = gradient.cpu()
    speaks = state.parallel.tp.rank == 0 and state.parallel.dp_cp.rank == 0
    whole: dict[str, Tensor] = {}
    for of_rank in gather_objects(mine if speaks else {}):
        whole |= of_rank
    return whole


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
