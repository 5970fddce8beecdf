"""Selects the parameters that Muon updates, and describes the layout of each."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor

from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.engine.state.muon import MatrixLayout
from megatron_wrap.model.chunks import bare_model
from megatron_wrap.model.initial_weights import is_expert, split_dim
from megatron_wrap.parallel.state import ParallelState

_ENDS = ("embedding.", "output_layer.", "output_layer_adapter.")
"""Prefixes of the names of parameters at the model's ends, whose rows are tokens: Muon is not made for them."""


def is_muon_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon updates a parameter of a bare chunk: matrices of the layers and their adapters, as in Megatron-Core
    (optimizer/muon.py). AdamW updates the rows of new tokens and everything else."""
    is_matrix = parameter.dim() == 2 or (parameter.dim() == 3 and is_expert(name))
    is_bias = name.rsplit(".", 1)[-1].startswith("bias")
    ends = name.startswith(_ENDS) or getattr(parameter, "is_embedding_or_output_parameter", False)
    return is_matrix and not (is_bias or ends or "token_rows" in name)


def muon_layouts(config: RunConfig, chunks: Sequence[Any], parallel: ParallelState) -> dict[Tensor, MatrixLayout]:
    """The trained parameters of this process that Muon updates, with their layouts."""
    return {
        parameter: _layout(config, name, parameter, parallel)
        for chunk in chunks
        for name, parameter in bare_model(chunk).named_parameters()
        if parameter.requires_grad and is_muon_matrix(name, parameter)
    }


def _layout(config: RunConfig, name: str, parameter: Tensor, parallel: ParallelState) -> MatrixLayout:
    experts = is_expert(name)
    tp, replicas = (parallel.expert_tp, parallel.expert_dp) if experts else (parallel.tp, parallel.dp_cp)
    # the rule for names of one expert's parameters, whose end is "weight" however the experts are stored
    dim = split_dim(name.rstrip("0123456789"), parameter)
    whole_rows = parameter.shape[-2] * (tp.size if dim == 0 else 1)
    if name.endswith("self_attention.linear_qkv.weight") and config.optimizer.muon_split_qkv:
        groups, head = derived.num_query_groups(config.arch), derived.kv_channels(config.arch)
        queries = whole_rows // groups - 2 * head  # with the gate of the output, as Hugging Face's q_proj has it
        return MatrixLayout(tp, dim, replicas, groups, (queries, head, head))
    if ".linear_fc1.weight" in name and derived.is_gated(config.arch):
        half = parameter.shape[-2] // 2  # each shard contains its part of the gate, then its part of up
        return MatrixLayout(tp, dim, replicas, tp.size if dim == 0 else 1, (half, half))
    return MatrixLayout(tp, dim, replicas)


@contextlib.contextmanager
def left_out(parameters: Collection[Tensor]) -> Iterator[None]:
    """Context in which these parameters require no gradient, so that Megatron-Core builds an optimizer of the
    others."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
