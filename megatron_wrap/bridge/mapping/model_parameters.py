"""This process's parameters, each with its mapping, and views of their parts in Hugging Face's layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.bridge.mapping.family import ADAPTER, Family
from megatron_wrap.bridge.mapping.tensors import Mapping, Piece, Region
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.errors import CheckpointError
from megatron_wrap.model.initial_weights import global_names, is_expert, named_layers
from megatron_wrap.parallel.state import ParallelState

BLOCK_BYTES = 32 * 2**20
"""Largest size in bytes of a block of a tensor that is read, sent or written at once: memory in addition to the
model's."""

ADAPTER_FACTORS = (f"{ADAPTER}.lora_", f"{ADAPTER}.initial_", f"{ADAPTER}.token_rows")
"""Parts of the names of adapters' factors, which a base's family does not have."""

SEPARATE_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
}
"""Name of a norm that Transformer Engine fuses into the following linear layer -> its name in the mapping."""


def mapped_parameters(
    chunk: torch.nn.Module, family: Family, arch: ArchConfig
) -> Iterator[tuple[str, Tensor, Mapping]]:
    """Global name, tensor and mapping of each parameter of a bare model chunk and of each router's expert bias, which
    is a buffer; of an adapter's family, each factor. The output layer of a tied model has the embedding's name.

    Raises:
        CheckpointError: the family lacks a parameter, because the provider builds another model.
    """
    table = family.parameters(arch)
    named = global_names(chunk, tied=not arch.untie_embeddings_and_output_weights)
    tensors = ((name, tensor if index is None else tensor.detach()[index]) for name, tensor, index in named)
    for name, parameter in itertools.chain(tensors, _router_biases(chunk)):
        for fused, separate in SEPARATE_NORMS.items():
            name = name.replace(fused, separate)
        if name not in table and (family.is_adapter or any(part in name for part in ADAPTER_FACTORS)):
            continue
        if name not in table:
            raise CheckpointError(
                f"the parameter {name} of this model does not exist in Hugging Face's {family.model_type}; check that "
                "the model provider builds the model that config.json describes"
            )
        yield name, parameter, table[name]


def _router_biases(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, layer in named_layers(chunk).values():
        router: Any = getattr(layer.mlp, "router", None)
        if router is not None and router.expert_bias is not None:
            router._maintain_float32_expert_bias()  # Megatron-Core calls it in its forward pass and its checkpoints
            yield f"{name}.mlp.router.expert_bias", router.expert_bias


def local_pieces(name: str, parameter: Tensor, mapping: Mapping, parallel: ParallelState) -> list[Piece]:
    """The pieces of this rank's shard of a parameter.

    Raises:
        CheckpointError: its shape does not match the mapping.
    """
    axis = parallel.expert_tp if is_expert(name) else parallel.tp
    try:
        return mapping.pieces(parameter.shape, axis.rank, axis.size)
    except ValueError as error:
        raise CheckpointError(
            f"the parameter {name} cannot be loaded from Hugging Face weights: {error}; check that the model provider "
            "builds the model that config.json describes"
        ) from error


def blocks(region: Region, element_size: int) -> list[Region]:
    """Split a region of a Hugging Face tensor along its first dimension into blocks of at most `BLOCK_BYTES`."""
    (start, stop), *rest = region
    row_bytes = element_size * math.prod(high - low for low, high in rest)
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    return [((first, min(first + step, stop)), *rest) for first in range(start, stop, step)]


def view_of(parameter: Tensor, piece: Piece, block: Region) -> Tensor:
    """The view of the local parameter that corresponds to `block`, rows of the piece's region, in Hugging Face's
    layout; of an interleaved piece, the dimension of these rows is [n, 2] instead of [2 n]. If they are the first
    dimension, the block has whole pairs."""
    view = parameter[tuple(slice(start, stop) for start, stop in piece.local)]
    if piece.interleaved:
        view = view.unflatten(0, (2, -1)).transpose(0, 1)
    if piece.transposed:
        view = view.movedim(-1, 0)
    if piece.depthwise:
        view = view[:, None]
    if piece.stacked:
        view = view[None]
    start, rows = piece.region[0][0], 2 if piece.interleaved and not (piece.transposed or piece.stacked) else 1
    return view[(block[0][0] - start) // rows : (block[0][1] - start) // rows]
