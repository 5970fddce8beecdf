"""Incremental decoding with a KV cache."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_wrap.engine.generation.decoding import ConstantShapeDecoding
from megatron_wrap.engine.generation.kv_cache import KeyValueCache
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.nn.linear_attention.gated_delta_rule import RecurrentState
from megatron_wrap.parallel.collectives import broadcast_on, gather_tensors, receive, send
from megatron_wrap.platform.megatron_core.generation import (
    left_padded,
    masked_slots,
    with_cache,
    with_recurrent_states,
)

SLOT_MULTIPLE = 16
"""Number of which the cache's slots per sequence are a multiple, because attention with a mask is slower where rows are
not aligned."""
MIN_RECORDED_PASSES = 8
"""Smallest number of passes for which a CUDA graph is recorded; recording takes as long as some passes without one."""


class CachedModel(contextlib.ExitStack):
    """Incremental decoding of a batch of left-padded sequences on one replica, with an empty KV cache; a context
    manager, which restores the model, for use inside evaluation mode and `whole_sequences`. The first call of
    `next_logits` processes the padded prompts, each further call one token per sequence.

    Pipeline stages, and the virtual stages of an interleaved pipeline, run one after another while the others wait. All
    context-parallel processes compute the same. Where `_constant_shapes` allows it, the passes after the first are a
    CUDA graph.

    Args:
        padding: number of padding slots on the left of each prompt, the same on every process of the replica.
        max_length: slots of each sequence in the cache, padding and new tokens included.
        sources: for each sequence the index of its prompt; None: one sequence for each prompt.
    """

    def __init__(
        self, state: TrainingState, padding: Sequence[int], max_length: int, sources: Sequence[int] | None = None
    ) -> None:
        from megatron.core.inference.contexts import StaticInferenceContext

        super().__init__()
        self._state = state
        sources = range(len(padding)) if sources is None else sources
        self._padding = torch.tensor(padding, device=state.platform.device)
        self._sources = torch.tensor(sources, device=state.platform.device)
        self._max_length = max_length
        self._length = -(-max_length // SLOT_MULTIPLE) * SLOT_MULTIPLE
        self._is_padded = any(padding)  # otherwise the kernels without a mask are enough
        self._cache = KeyValueCache(self._length, self._sources)
        self._context = StaticInferenceContext(len(sources), self._length)
        self._decoding: ConstantShapeDecoding | None = None
        self.callback(self._end_decoding)
        self.enter_context(with_cache(state.chunks, self._cache.update))
        new_state = functools.partial(RecurrentState, self._padding, self._sources)
        self.enter_context(with_recurrent_states(state.chunks, new_state))

    def _end_decoding(self) -> None:
        """Release graph and cache now: they refer to this object, so only a garbage collection would release them."""
        self._decoding = None

    def next_logits(self, token_ids: Tensor) -> Tensor | None:
        """Process the next tokens of each sequence and extend the KV cache. Collective over the replica.

        Args:
            token_ids: [prompts, s] in the first call, then [batch size, 1], on this device, the same on every process
                of the replica; any id in the padding.

        Returns:
            On the last pipeline stage, the logits [batch size, V] of the token that follows, fp32, without the
            vocabulary's padding, the same on every tensor-parallel process, valid until the next call; None on other
            stages.
        """
        start, length = self._context.sequence_len_offset, token_ids.shape[1]
        if self._decoding is not None:
            logits: Tensor | None = self._decoding(token_ids)
        else:
            slots = torch.arange(start, start + length, device=token_ids.device)
            with self._left_padded() if start == 0 else contextlib.nullcontext():
                logits = self._pass(token_ids, (slots - self._padding[:, None]).clamp(min=0))
        self._context.sequence_len_offset += length
        if start == 0:
            logits = None if logits is None else logits[self._sources]
            self._padding = self._padding[self._sources]
            self.enter_context(self._left_padded())
            self._decode_with_constant_shapes()
        return logits

    def _pass(self, token_ids: Tensor, position_ids: Tensor) -> Tensor | None:
        """Run one pass through all stages."""
        from megatron.core.utils import get_attr_wrapped_model

        state, pp = self._state, self._state.parallel.pp
        ranks = torch.distributed.get_process_group_ranks(pp.group)
        output = None
        for index, chunk in enumerate(state.chunks):
            if pp.rank > 0 or index > 0:
                hidden = self._hidden_states(*token_ids.shape)
                receive(hidden, ranks[pp.rank - 1], pp.group)
                get_attr_wrapped_model(chunk, "set_input_tensor")(hidden)
            output = chunk(token_ids, position_ids, None, inference_context=self._context)
            if not state.parallel.is_last_stage or index < len(state.chunks) - 1:
                send(output.contiguous(), ranks[(pp.rank + 1) % pp.size], pp.group)
        if output is None or not state.parallel.is_last_stage:
            return None
        # [B, 1, V/tp]
        whole = torch.cat(gather_tensors(output, state.parallel.tp.group), dim=-1)
        return whole[:, -1, : state.shape.vocab_size].float()

    def _left_padded(self) -> contextlib.AbstractContextManager[None]:
        from megatron_wrap.nn.attention.torch_attention import TorchCoreAttention

        if not self._is_padded:
            return contextlib.nullcontext()
        return left_padded(self._state.chunks, self._padding, self._length, TorchCoreAttention.masked)

    def _decode_with_constant_shapes(self) -> None:
        from megatron_wrap.nn.attention.torch_attention import TorchCoreAttention

        start = self._context.sequence_len_offset
        if self._max_length - start < MIN_RECORDED_PASSES or not _constant_shapes(self._state):
            return
        masked = torch.empty(len(self._padding), self._length, dtype=torch.bool, device=self._padding.device)
        self.enter_context(masked_slots(self._state.chunks, masked, TorchCoreAttention.masked))
        self._decoding = ConstantShapeDecoding(self._logits, self._cache, masked, self._padding, start)
        if self._padding.is_cuda:
            self._decoding.capture()

    def _logits(self, token_ids: Tensor, position_ids: Tensor) -> Tensor:
        logits = self._pass(token_ids, position_ids)
        assert logits is not None  # there is one stage
        return logits

    def broadcast_chosen(self, token_ids: Tensor | None) -> Tensor:
        """Broadcast the chosen token ids [batch size] to all processes of the replica. Collective over the replica.

        Args:
            token_ids: the chosen ids on the last stage's tensor-parallel rank 0 (those of context-parallel rank 0 are
                used), None elsewhere.
        """
        shared = torch.empty(len(self._sources), dtype=torch.long, device=self._state.platform.device)
        return self._broadcast(token_ids, shared)

    def broadcast_log_probs(self, of_steps: Sequence[Tensor], max_steps: int) -> Tensor:
        """Broadcast the log-probabilities of the chosen tokens. Collective over the replica.

        Args:
            of_steps: [batch size] for each step, at most `max_steps`; those of the last stage's tensor-parallel rank 0
                are used.

        Returns:
            [batch size, max_steps] fp32, 0 after the last step.
        """
        shared = torch.zeros(len(self._sources), max_steps, device=self._state.platform.device)
        if not of_steps:
            return self._broadcast(None, shared)
        return self._broadcast(F.pad(torch.stack(list(of_steps), dim=1), (0, max_steps - len(of_steps))), shared)

    def _broadcast(self, values: Tensor | None, shared: Tensor) -> Tensor:
        """Broadcast `values` of the last stage's tensor-parallel rank 0 into `shared` of all processes of the
        replica."""
        parallel = self._state.parallel
        if values is not None:
            shared.copy_(values)
        if parallel.is_last_stage:
            broadcast_on(shared, 0, parallel.tp.group)
            broadcast_on(shared, 0, parallel.cp.group)
        broadcast_on(shared, parallel.pp.size - 1, parallel.pp.group)
        return shared

    def _hidden_states(self, batch_size: int, length: int) -> Tensor:
        config = self._state.transformer_config
        shape = (length, batch_size, config.hidden_size)
        return torch.empty(shape, dtype=config.pipeline_dtype, device=self._state.platform.device)


def _constant_shapes(state: TrainingState) -> bool:
    """Whether decoding with constant shapes is possible and faster. It needs a GPU, one pipeline stage, and layers that
    depend on no count of tokens on the host; experts, latent attention, sliding windows and the scaling of queries do.
    All layers must also write in place, which linear attention does not."""
    config = state.transformer_config
    counted = config.num_moe_experts or config.multi_latent_attention or config.window_size is not None
    counted = counted or state.config.arch.query_scaling_beta is not None
    counted = counted or state.config.arch.experimental_attention_variant is not None
    alone = state.parallel.pp.size == 1 and len(state.chunks) == 1 and state.parallel.tp.size == 1
    return state.platform.device.type == "cuda" and alone and not counted
