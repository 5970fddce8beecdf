"""What generation changes in a model while it lasts: sequences stay whole, and a batch's rows begin at any slot."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron_wrap.platform.replacements import Replacements

if TYPE_CHECKING:
    from torch import Tensor


@contextlib.contextmanager
def whole_sequences(chunks: Sequence[Any]) -> Iterator[None]:
    """Model chunks of which each process computes whole sequences, without sequence and context parallelism: a single
    token cannot be cut. Context-parallel processes then all compute the same.

    Megatron-Core's own switch (`transformer/utils.py`, set_model_to_sequence_parallel) keeps what it found under the
    model's address, so a later model there gets the modules of an earlier one; and it does not say what was on before.
    """
    changed = Replacements()
    for module in (module for chunk in chunks for module in chunk.modules()):
        for owner in (module, getattr(module, "config", None)):  # shared experts have a copy of the model's config
            for name in ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings"):
                if getattr(owner, name, False) is True:
                    changed.set(owner, name, False)
        # rotary embeddings and core attention cut and join sequences over the group that they keep
        if getattr(module, "cp_group", None) is not None:
            changed.set(module, "cp_group", None)
            # and remember what they cut for a length, not the group (rotary_pos_embedding.py, lru_cache of forward)
            forget = getattr(type(module).forward, "cache_clear", None)
            if forget is not None:
                forget()
                changed.on_undo(forget)
    try:
        yield
    finally:
        changed.undo()


@contextlib.contextmanager
def left_padded(
    chunks: Sequence[Any], padding: Tensor, max_length: int, masked: Callable[[Any, Tensor], Any]
) -> Iterator[None]:
    """Model chunks over a batch whose row b begins after padding[b] slots that hold no token of it. Each row gets the
    rotary angles that it would get alone, and attends none of those slots.

    Megatron-Core's static cache knows one position for the whole batch, and turns its masks off after the first part
    (`transformer/attention.py`, _adjust_key_value_for_inference).

    Args:
        padding: [batch size], int, on the model's device.
        max_length: slots of the cache.
        masked: (attention layer, bool [batch size, max_length], True = no token) -> its core attention meanwhile.
    """
    import torch

    rotary = importlib.import_module("megatron.core.models.common.embeddings.rotary_pos_embedding").RotaryEmbedding
    slots = torch.arange(max_length, device=padding.device)
    no_token = slots < padding[:, None]
    positions = (slots[:, None] - padding).clamp(min=0)  # [max_length, batch size]

    def angles_of_rows(_module: Any, _inputs: Any, output: Any) -> Any:
        """[s, 1, 1, d] to [s, batch size, 1, d]; yarn's come with a factor."""
        angles, *factor = output if isinstance(output, tuple) else (output,)
        of_rows = angles[positions[: len(angles)], 0]
        return (of_rows, *factor) if factor else of_rows

    changed = Replacements()
    try:
        for module in (module for chunk in chunks for module in list(chunk.modules())):
            if isinstance(module, rotary):
                changed.on_undo(module.register_forward_hook(angles_of_rows).remove)
            if getattr(module, "core_attention", None) is not None:
                changed.set(module, "core_attention", masked(module, no_token))
            if getattr(getattr(module, "config", None), "apply_rope_fusion", False):
                changed.set(module.config, "apply_rope_fusion", False)  # its kernel takes one row of angles
        yield
    finally:
        changed.undo()
