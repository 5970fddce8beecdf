"""The model one part of a sequence after another, with the keys and values of earlier parts kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_wrap.engine.state import TrainingState
from megatron_wrap.parallel.collectives import broadcast_on, gather_tensors, receive, send
from megatron_wrap.platform.generation import left_padded


@contextlib.contextmanager
def cached_model(state: TrainingState, padding: Sequence[int], max_length: int) -> Iterator[CachedModel]:
    """The model with room for a batch, inside evaluation mode and `whole_sequences`.

    Args:
        padding: slots before each sequence's first token, on every process of the replica the same.
        max_length: slots of the longest sequence, its padding included, that it may grow to.
    """
    from megatron_wrap.ops.attention import TorchCoreAttention

    slots = torch.tensor(padding, device=state.platform.device)
    with contextlib.ExitStack() as changes:
        if any(padding):  # without it the kernels that take no mask serve
            changes.enter_context(left_padded(state.chunks, slots, max_length, TorchCoreAttention.masked))
        yield CachedModel(state, slots, max_length)


class CachedModel:
    """A replica's model over a batch of left-padded sequences, fed in equal parts: the first holds the padding, the
    others are one token long.

    Each attention layer keeps keys and values, [max_length, batch_size, groups / tp, width] each, in Megatron-Core's
    `StaticInferenceContext`. Pipeline stages, and the virtual stages of an interleaved pipeline in their order, take
    turns: while one computes the others wait. Context-parallel processes all compute the same. Made by `cached_model`.
    """

    def __init__(self, state: TrainingState, padding: Tensor, max_length: int) -> None:
        from megatron.core.inference.contexts import StaticInferenceContext

        self._state = state
        self._padding = padding
        self._batch_size = len(padding)
        self._context = StaticInferenceContext(self._batch_size, max_length)

    def next_logits(self, token_ids: Tensor) -> Tensor | None:
        """Feed the next part of each sequence. Collective over the replica.

        Args:
            token_ids: [batch size, s] on this device, the same on every process of the replica; any id in the padding.

        Returns:
            On the last pipeline stage the logits [batch size, V] after the last of these tokens, in fp32, the same on
            every tensor-parallel process, without the vocabulary's padding; None on other stages.
        """
        from megatron.core.utils import get_attr_wrapped_model

        state, pp, length = self._state, self._state.parallel.pp, token_ids.shape[1]
        start = self._context.sequence_len_offset
        slots = torch.arange(start, start + length, device=token_ids.device)
        position_ids = (slots - self._padding[:, None]).clamp(min=0)
        ranks = torch.distributed.get_process_group_ranks(pp.group)
        output = None
        for place, chunk in enumerate(state.chunks):
            if pp.rank > 0 or place > 0:
                hidden = self._hidden_states(length)
                receive(hidden, ranks[pp.rank - 1], pp.group)
                get_attr_wrapped_model(chunk, "set_input_tensor")(hidden)
            output = chunk(token_ids, position_ids, None, inference_context=self._context)
            if not state.parallel.is_last_stage or place < len(state.chunks) - 1:
                send(output.contiguous(), ranks[(pp.rank + 1) % pp.size], pp.group)
        self._context.sequence_len_offset += length
        if output is None or not state.parallel.is_last_stage:
            return None
        # [B, 1, V/tp]
        whole = torch.cat(gather_tensors(output, state.parallel.tp.group), dim=-1)
        return whole[:, -1, : state.shape.vocab_size].float()

    def agree(self, token_ids: Tensor | None) -> Tensor:
        """The token ids [batch size] that the process of the last stage and of rank 0 along the replica's other axes
        chose, on all its processes. Those of the last stage and tensor-parallel rank 0 give theirs, others None."""
        parallel = self._state.parallel
        shared = torch.empty(self._batch_size, dtype=torch.long, device=self._state.platform.device)
        if token_ids is not None:
            shared.copy_(token_ids)
        if parallel.is_last_stage:
            broadcast_on(shared, 0, parallel.tp.group)
            broadcast_on(shared, 0, parallel.cp.group)
        broadcast_on(shared, parallel.pp.size - 1, parallel.pp.group)
        return shared

    def _hidden_states(self, length: int) -> Tensor:
        config = self._state.transformer_config
        shape = (length, self._batch_size, config.hidden_size)
        return torch.empty(shape, dtype=config.pipeline_dtype, device=self._state.platform.device)
