"""Keys and values of the tokens that a model has processed during generation."""

from __future__ import annotations

from typing import Any

from torch import Tensor


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
