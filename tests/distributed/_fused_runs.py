"""A training run whose self-attention is that of GPUs, with the kernel's result computed by torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import _dpo_runs as runs
from _started import started
from torch import Tensor


def split_rotary(
    mixed: Tensor, angles: Tensor, queries: int, width: int, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """What `megatron_wrap.ops.fused.split_rotary` computes, by Megatron-Core's unfused rotation."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    parts = mixed.unflatten(-1, (queries + 2, width)).split((queries, 1, 1), dim=-2)
    query, key, value = (part.flatten(2, 3) for part in parts)
    rotated = (_apply_rotary_pos_emb_bshd(part, angles, rotary_interleaved=interleaved) for part in (query, key))
    return (*rotated, value)


def train_and_generate(
    overrides: Sequence[str], samples: Sequence[Any], fused: bool
) -> tuple[list[tuple[float, float]], list[list[int]], int]:
    """(loss, gradient norm) of two steps, then completions, and the number of layers that were fused."""
    from megatron_wrap.model import self_attention

    changed = 0
    with started(runs.CONFIG, [*overrides]) as wrap:
        if fused:
            original, self_attention.split_rotary = self_attention.split_rotary, split_rotary
            for chunk in wrap.state.chunks:
                for module in chunk.modules():
                    if type(module) is self_attention.SelfAttention:
                        module.__class__ = self_attention.FusedSelfAttention
                        changed += 1
        try:
            taken = [wrap.train(samples) for _ in range(2)]
            completions = wrap.generate([[5, 6, 7], [8, 9]], max_new_tokens=4)
        finally:
            if fused:
                self_attention.split_rotary = original
    return [(step["loss"], step["grad_norm"]) for step in taken], [one["token_ids"] for one in completions], changed
