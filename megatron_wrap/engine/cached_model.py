"""Incremental decoding with a KV cache."""

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
    """The model with an empty KV cache for one batch; use it inside evaluation mode and `whole_sequences`.

    Args:
        padding: number of padding slots on the left of each sequence, the same on every process of the replica.
        max_length: slots of each sequence in the cache, padding and new tokens included.
    """
    from megatron_wrap.ops.attention import TorchCoreAttention

    slots = torch.tensor(padding, device=state.platform.device)
    with contextlib.ExitStack() as changes:
        if any(padding):  # otherwise the kernels without a mask are enough
            changes.enter_context(left_padded(state.chunks, slots, max_length, TorchCoreAttention.masked))
        yield CachedModel(state, slots, max_length)


class CachedModel:
    """Incremental decoding of a batch of left-padded sequences on one replica. The first call processes the padded
    prompts, each further call one token per sequence. Created by `cached_model`.

    The KV cache is Megatron-Core's `StaticInferenceContext`; each attention layer stores keys and values of shape
    [max_length, batch_size, groups / tp, width]. Pipeline stages, and the virtual stages of an interleaved pipeline,
    run one after another while the others wait. All context-parallel processes compute the same.
    """

    def __init__(self, state: TrainingState, padding: Tensor, max_length: int) -> None:
        from megatron.core.inference.contexts import StaticInferenceContext

        self._state = state
        self._padding = padding
        self._batch_size = len(padding)
        self._context = StaticInferenceContext(self._batch_size, max_length)

    def next_logits(self, token_ids: Tensor) -> Tensor | None:
        """Process the next tokens of each sequence and extend the KV cache. Collective over the replica.

        Args:
            token_ids: [batch size, s] on this device, the same on every process of the replica; any id in the padding.

        Returns:
            On the last pipeline stage, the logits [batch size, V] of the token that follows, fp32, without the
            vocabulary's padding, the same on every tensor-parallel process; None on other stages.
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

    def broadcast_chosen(self, token_ids: Tensor | None) -> Tensor:
        """Broadcast the chosen token ids [batch size] to all processes of the replica. Collective over the replica.

        Args:
            token_ids: the chosen ids on the last stage's tensor-parallel rank 0 (those of context-parallel rank 0 are
                used), None elsewhere.
        """
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
