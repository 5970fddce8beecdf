"""Rows of the vocabulary that are trained while embedding and output layer are frozen (peft's trainable_token_indices).

The trained rows [N, hidden_size] are one parameter, whole on every tensor-parallel rank. They replace rows of the
embedding's output and columns of the logits; no weight changes, so the model without them is bitwise the base. A model
with tied weights has one parameter for both, or one each on the first and the last pipeline stage, whose gradients are
added up after the backward pass (`setup/adapter.py`). Import this module only after the platform is
installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

ROWS = "token_rows"
"""Name of the parameter in its module."""


class EmbeddingRows(torch.nn.Module):
    """The trained rows of one vocabulary-parallel weight [V/tp, hidden_size].

    Args:
        weight: local weight of the embedding or the output layer.
        indices: global ids of the trained rows, in the order of peft's file.
        rank: tensor-parallel rank of this process.
        sequence_parallel: whether a rank has a part of the tokens; Megatron-Core then adds up the ranks' gradients.
        adapter_name: name of the adapter that the rows belong to.
        is_copy: whether this is the last stage's copy of the first stage's rows.
    """

    row_of_token: Tensor
    """Index of each token's trained row, or -1, int64 [largest index + 1]."""
    owned: Tensor
    """Indices of the trained rows that are on this rank, int64."""
    local: Tensor
    """Indices of the `owned` rows in the local weight, int64."""

    def __init__(
        self,
        weight: Tensor,
        indices: Sequence[int],
        rank: int,
        sequence_parallel: bool,
        adapter_name: str,
        tied_over_stages: bool = False,
        is_copy: bool = False,
    ) -> None:
        super().__init__()
        self.adapter_name, self.enabled = adapter_name, True
        self.sequence_parallel, self.is_copy, self.tied_over_stages = sequence_parallel, is_copy, tied_over_stages
        self.base_weight = lambda: weight  # not a parameter of this module, which would list it twice
        local = torch.tensor(indices, device=weight.device) - rank * len(weight)
        row_of_token = torch.full((int(max(indices)) + 1,), -1, device=weight.device)
        row_of_token[list(indices)] = torch.arange(len(indices), device=weight.device)
        owned = ((local >= 0) & (local < len(weight))).nonzero().squeeze(1)
        self.register_buffer("row_of_token", row_of_token, persistent=False)
        self.register_buffer("owned", owned, persistent=False)
        self.register_buffer("local", local[owned], persistent=False)
        parameter: Any = torch.nn.Parameter(self._original_rows(weight.detach(), len(indices)))
        parameter.sequence_parallel = sequence_parallel
        if tied_over_stages:
            parameter.shared_embedding = True  # a bucket of its own, whose shards agree between the stages
            parameter.shared = is_copy  # the gradient norm counts it once
        self.register_parameter(ROWS, parameter)

    def _original_rows(self, weight: Tensor, count: int) -> Tensor:
        """The weight's rows, [N, hidden_size]. Collective over tensor-parallel ranks."""
        rows = weight.new_zeros(count, weight.shape[1])
        rows[self.owned] = weight[self.local]
        with torch.no_grad():
            whole: Tensor = reduce_from_tensor_model_parallel_region(rows)
        return whole.clone()

    def forward(self) -> Tensor:
        """The trained rows. Megatron-Core waits until they are gathered, as before the forward pass of any module."""
        return self.get_parameter(ROWS)

    def beside_embedding(self, embedding: torch.nn.Module) -> None:
        """Replace rows of the output of Megatron-Core's `VocabParallelEmbedding`, before anything else changes it."""
        embedding.register_forward_hook(self._after_embedding, prepend=True)

    def beside_output_layer(self, output_layer: torch.nn.Module) -> None:
        """Replace columns of the output of a column-parallel output layer, [..., V/tp]."""
        output_layer.register_forward_hook(self._after_output_layer, prepend=True)

    def merged(self, weight: Tensor) -> Tensor:
        """The local weight with the trained rows, in fp32."""
        result = weight.float().clone()
        result[self.local] = self.get_parameter(ROWS).detach()[self.owned].float()
        return result

    def _after_embedding(self, embedding: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """The embedding's output with trained rows: [B, S, H], or with `reduce_scatter_embeddings` this rank's part
        [S/tp, B, H]."""
        if not self.enabled:
            return output
        ids, rows = inputs[0], self()
        known = ids < len(self.row_of_token)
        row_indices = torch.where(known, self.row_of_token[torch.where(known, ids, 0)], -1)
        group = embedding.tp_group
        if embedding.reduce_scatter_embeddings:
            row_indices = row_indices.t().chunk(group.size())[group.rank()].contiguous()
        values = rows[row_indices.clamp(min=0)]
        if self.sequence_parallel and not embedding.reduce_scatter_embeddings:
            # every rank gets the gradient of all tokens, and the ranks' gradients are added up: each counts its own
            ranks = torch.arange(group.size(), device=ids.device).repeat_interleave(ids.shape[1] // group.size())
            values = torch.where((ranks == group.rank())[None, :, None], values, values.detach())
        return torch.where((row_indices >= 0)[..., None], values, output)

    def _after_output_layer(self, _layer: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> Any:
        if not self.enabled:
            return output
        product = torch.nn.functional.linear(inputs[0], self())
        if self.sequence_parallel:
            product = gather_from_sequence_parallel_region(product)
        else:
            product = copy_to_tensor_model_parallel_region(product)
        return output[0].index_copy(-1, self.local, product.index_select(-1, self.owned)), *output[1:]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Megatron-Core's description of the rows for checkpoints; the last stage's copy is not saved a second time."""
        entries = make_sharded_tensors_for_checkpoint(self.state_dict(prefix="", keep_vars=True), prefix)
        if not self.is_copy:
            return entries
        key = f"embedding.word_embeddings_adapter.{ROWS}"
        return {name: replace(entry, key=key, replica_id=(1, *entry.replica_id[1:])) for name, entry in entries.items()}


def embedding_rows_of(chunks: Sequence[torch.nn.Module]) -> list[EmbeddingRows]:
    """The trained rows in a process's model chunks."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, EmbeddingRows)]
