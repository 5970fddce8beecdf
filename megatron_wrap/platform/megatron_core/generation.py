"""Temporary changes of a model for evaluation and generation: no FP8, no sequence or context parallelism, left-padded
batches."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron_wrap.platform.megatron_core.undoable_changes import Replacements

if TYPE_CHECKING:
    from torch import Tensor


def _modules(chunks: Sequence[Any]) -> list[Any]:
    return [module for chunk in chunks for module in chunk.modules()]


@contextlib.contextmanager
def whole_sequences(chunks: Sequence[Any]) -> Iterator[None]:
    """Disable sequence and context parallelism in model chunks, because a single token cannot be split over ranks. All
    context-parallel ranks then compute the same.

    Megatron-Core's own switch (`transformer/utils.py`, set_model_to_sequence_parallel) caches a model's modules under
    its `id`, so a later model at the same address gets stale modules. It does not record the previous settings either.
    """
    with Replacements() as replacements:
        for module in _modules(chunks):
            for owner in (module, getattr(module, "config", None)):  # shared experts have a copy of the model's config
                for name in ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings"):
                    if getattr(owner, name, False) is True:
                        replacements.set(owner, name, False)
            # rotary embeddings and core attention split and gather sequences over their own cp_group
            if getattr(module, "cp_group", None) is not None:
                replacements.set(module, "cp_group", None)
                # rotary embeddings cache their result by length, not by group (rotary_pos_embedding.py, lru_cache)
                clear_cache = getattr(type(module).forward, "cache_clear", None)
                if clear_cache is not None:
                    clear_cache()
                    replacements.callback(clear_cache)
        yield


@contextlib.contextmanager
def without_fp8(chunks: Sequence[Any]) -> Iterator[None]:
    """Compute in bf16; weights in FP8 are converted in each pass.

    Scales of the recipe `delayed` come from training steps, so a model would not be precise before the first; and FP8
    matmuls need multiples of 16 tokens, while generation feeds one at a time. A pass without FP8 marks Transformer
    Engine's modules such that their scales are left out of checkpoints (module/base.py, init_fp8_metadata); the marks
    are restored.
    """
    with Replacements() as replacements:
        for module in _modules(chunks):
            if getattr(getattr(module, "config", None), "fp8", None):
                replacements.set(module.config, "fp8", None)
            meta = getattr(module, "fp8_meta", None)
            if meta is not None:
                mark = {"fp8_checkpoint": meta.get("fp8_checkpoint", False)}
                replacements.callback(functools.partial(meta.update, mark))
                for name in ("fp8", "fp8_initialized"):
                    replacements.callback(functools.partial(setattr, module, name, getattr(module, name, False)))
        yield


@contextlib.contextmanager
def with_cache(chunks: Sequence[Any], update: Callable[..., Any]) -> Iterator[None]:
    """Store the keys and values of attention layers outside of Megatron-Core.

    Args:
        update: replaces `Attention._adjust_key_value_for_inference`; called with the layer and its arguments.
    """
    with Replacements() as replacements:
        for module in _modules(chunks):
            if hasattr(module, "_adjust_key_value_for_inference"):
                replacements.set(module, "_adjust_key_value_for_inference", functools.partial(update, module))
        yield


@contextlib.contextmanager
def with_recurrent_states(chunks: Sequence[Any], state: Callable[[], Any]) -> Iterator[None]:
    """Give each layer of linear attention, which has an attribute `recurrent_state`, its own state.

    Args:
        state: returns a new state.
    """
    with Replacements() as replacements:
        for module in _modules(chunks):
            if hasattr(module, "recurrent_state"):
                replacements.set(module, "recurrent_state", state())
        yield


@contextlib.contextmanager
def masked_slots(chunks: Sequence[Any], is_masked: Tensor, masked: Callable[[Any, Tensor], Any]) -> Iterator[None]:
    """Use another core attention in every layer, which does not attend to some slots of the KV cache.

    Args:
        is_masked: bool [batch size, max_length].
        masked: (attention layer, is_masked) -> the other core attention.
    """
    with Replacements() as replacements:
        for module in _modules(chunks):
            if getattr(module, "core_attention", None) is not None:
                replacements.set(module, "core_attention", masked(module, is_masked))
        yield


@contextlib.contextmanager
def left_padded(
    chunks: Sequence[Any], padding: Tensor, max_length: int, masked: Callable[[Any, Tensor], Any]
) -> Iterator[None]:
    """Run model chunks on a left-padded batch: row b has padding[b] padding slots before its first token. Each row gets
    the rotary angles of an unpadded sequence, and does not attend to its padding.

    Megatron-Core's static KV cache has one position for the whole batch, and it disables masks after the prefill
    (`transformer/attention.py`, _adjust_key_value_for_inference).

    Args:
        padding: [batch size], int, on the model's device.
        max_length: slots of the KV cache.
        masked: (attention layer, is_padding bool [batch size, max_length]) -> core attention that masks the padding.
    """
    import torch

    rotary = importlib.import_module("megatron.core.models.common.embeddings.rotary_pos_embedding").RotaryEmbedding
    slots = torch.arange(max_length, device=padding.device)
    is_padding = slots < padding[:, None]
    positions = (slots[:, None] - padding).clamp(min=0)  # [max_length, batch size]

    def angles_by_row(_module: Any, _inputs: Any, output: Any) -> Any:
        """Rotary angles [s, 1, 1, d] as [s, batch size, 1, d]; for YaRN a tuple of them and an attention factor."""
        angles, *factor = output if isinstance(output, tuple) else (output,)
        by_row = angles[positions[: len(angles)], 0]
        return (by_row, *factor) if factor else by_row

    with Replacements() as replacements, masked_slots(chunks, is_padding, masked):
        for module in _modules(chunks):
            if isinstance(module, rotary):
                replacements.callback(module.register_forward_hook(angles_by_row).remove)
            if getattr(getattr(module, "config", None), "apply_rope_fusion", False):
                replacements.set(module.config, "apply_rope_fusion", False)  # its kernel takes one row of angles
        yield
