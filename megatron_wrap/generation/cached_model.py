"""Incremental decoding with a KV cache."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.nn.linear_attention.gated_delta_rule import RecurrentState
from megatron_wrap.parallel.collectives import broadcast_on, gather_tensors, receive, send
from megatron_wrap.platform.megatron_core.generation import (
    left_padded,
    masked_slots,
    with_cache,
    with_recurrent_states,
)
from megatron_wrap.utils.garbage import delayed_collection


class KeyValueCache:
    """The keys, with their rotary embedding, and values of every attention layer of this process.

    For each layer two tensors [max_length, batch size, groups / tp, width]. It replaces the cache in Megatron-Core's
    `Attention._adjust_key_value_for_inference`, which keeps keys without rotary embedding and applies it to all of them
    for each new token, allocates a sequence for each prompt, and counts the tokens on the host.

    Args:
        max_length: slots of each sequence.
        sources: [batch size], for each sequence the index of its prompt in the first pass.
    """

    def __init__(self, max_length: int, sources: Tensor) -> None:
        self.max_length = max_length
        self._sources = sources
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.slot: Tensor | None = None
        """Slot [1] into which the next token of each sequence is written; all slots are then returned, and the caller
        masks those that are not filled. None: append at the context's offset and return the filled slots."""

    def update(
        self,
        attention: Any,
        context: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary_pos_emb: Any,
        *_: Any,
        **__: Any,
    ) -> tuple[Tensor, Tensor, Tensor, None, Any, None]:
        """Add the keys and values of a pass, instead of `_adjust_key_value_for_inference` of `attention`.

        Args:
            context: Megatron-Core's; its `sequence_len_offset` is the number of filled slots.
            query: [s, b, heads / tp, width]; s is the prompts' length in the first pass and 1 in the others. b is the
                number of prompts in the first pass, then the number of sequences.
            key, value: [s, b, groups / tp, width].
            rotary_pos_emb: None, or the angles of all slots for queries and for keys, each [slots, 1 or b, 1, width].

        Returns:
            Query, keys and values to attend, no angles because they have been applied, the mask type, and None.
        """
        from megatron.core.transformer.enums import AttnMaskType

        start = context.sequence_len_offset
        if rotary_pos_emb is not None:
            query, key = (
                _rotated(attention, tensor, self._of_pass(angles, start, len(tensor)))
                for tensor, angles in zip((query, key), rotary_pos_emb, strict=True)
            )
        cached = self._layer(attention.layer_number, key, value)
        if self.slot is not None:
            for cache, new in zip(cached, (key, value), strict=True):
                cache.index_copy_(0, self.slot, new)
            return query, *cached, None, AttnMaskType.no_mask, None
        stop = start + len(key)
        if start == 0:
            for cache, new in zip(cached, (key, value), strict=True):
                cache[:stop] = new[:, self._sources]
            return query, key, value, None, attention.attn_mask_type, None
        for cache, new in zip(cached, (key, value), strict=True):
            cache[start:stop] = new
        return query, cached[0][:stop], cached[1][:stop], None, AttnMaskType.no_mask, None

    def _of_pass(self, angles: Tensor, start: int, length: int) -> Tensor:
        return angles[start : start + length] if self.slot is None else angles.index_select(0, self.slot)

    def _layer(self, number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if number not in self._layers:
            shape = (self.max_length, len(self._sources))
            self._layers[number] = (key.new_zeros(*shape, *key.shape[2:]), value.new_zeros(*shape, *value.shape[2:]))
        return self._layers[number]


def _rotated(attention: Any, tensor: Tensor, angles: Tensor) -> Tensor:
    """The tensor with the rotary embedding that Megatron-Core's attention would apply (transformer/attention.py,
    forward)."""
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
        _yarn_get_concentration_factor_from_config,
    )

    factor = _yarn_get_concentration_factor_from_config(attention.config)
    group = attention.pg_collection.cp
    return apply_rotary_pos_emb(tensor, angles, config=attention.config, mscale=factor, cp_group=group)


class ConstantShapeDecoding:
    """Passes of one token per sequence, in which each layer attends to all slots of the cache with a mask.

    Args:
        run: (token ids [b, 1], position ids [b, 1]) -> logits [b, V], with `masked` as the masked slots of every layer.
        cache: filled up to slot `start`.
        masked: [b, max_length], True: no query attends to the slot; it is changed in place.
        padding: [b], number of slots on the left of each sequence to which no query attends.
        start: the slot of the next token.
    """

    def __init__(
        self, run: Callable[[Tensor, Tensor], Tensor], cache: KeyValueCache, masked: Tensor, padding: Tensor, start: int
    ) -> None:
        self._run, self._cache, self._masked, self._padding = run, cache, masked, padding
        self._slot = torch.tensor([start], device=padding.device)
        self._ids = torch.zeros((len(padding), 1), dtype=torch.long, device=padding.device)
        self._reset(start)
        self._replay: Callable[[], Tensor] = self._compute

    def capture(self) -> None:
        """Record the pass as a CUDA graph, which later calls replay. Only for a model whose pass has no data-dependent
        shape and asks the device for no value."""
        start = int(self._slot)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # kernels are loaded and workspaces allocated outside of the graph
                self._compute()
                self._reset(start)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # other threads, such as those that pin batches, continue; a collection of garbage could end an earlier graph or
        # a communicator of this thread, which CUDA refuses during a capture
        with delayed_collection(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits = self._compute()

        def replay() -> Tensor:
            graph.replay()
            return logits

        self._replay = replay

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Logits [b, V] after the tokens [b, 1]; the next call overwrites them."""
        self._ids.copy_(token_ids)
        return self._replay()

    def _compute(self) -> Tensor:
        self._masked.index_fill_(1, self._slot, False)
        self._cache.slot = self._slot
        logits = self._run(self._ids, self._slot - self._padding[:, None])
        self._slot += 1
        return logits

    def _reset(self, start: int) -> None:
        self._slot.fill_(start)
        slots = torch.arange(self._masked.shape[1], device=self._masked.device)
        self._masked.copy_((slots < self._padding[:, None]) | (slots >= start))


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
