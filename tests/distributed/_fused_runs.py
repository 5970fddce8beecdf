"""A training run whose self-attention is that of GPUs, with the kernel's result computed by torch."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import _dpo_runs as runs
import torch
from _started import started
from torch import Tensor


def split_rotary(
    mixed: Tensor, angles: Tensor, queries: int, width: int, interleaved: bool = False, factor: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The result of `megatron_wrap.nn.kernels.rotary.split_rotary`, by Megatron-Core's unfused rotation."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    parts = mixed.unflatten(-1, (queries + 2, width)).split((queries, 1, 1), dim=-2)
    query, key, value = (part.flatten(2, 3) for part in parts)
    rotated = [
        _apply_rotary_pos_emb_bshd(part, angles, rotary_interleaved=interleaved, mscale=factor) for part in (query, key)
    ]
    return (*rotated, value)


def split_normalized_rotary(
    mixed: Tensor, norms: Any, angles: Tensor, queries: int, interleaved: bool = False, factor: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The result of `megatron_wrap.nn.kernels.rotary_projections`, by torch's norm and Megatron-Core's unfused
    rotation."""
    width = norms.query.shape[0]
    query, key, value = mixed.unflatten(-1, (queries + 2, width)).split((queries, 1, 1), dim=-2)
    normalized = [
        torch.nn.functional.rms_norm(part, (width,), weight + norms.zero_centered, norms.eps)
        for part, weight in ((query, norms.query), (key, norms.key))
    ]
    together = torch.cat((*normalized, value), dim=-2).flatten(-2)
    return split_rotary(together, angles, queries, width, interleaved, factor)


def latent_rotary(
    query: Tensor, mixed: Tensor, shared: Tensor, angles: Tensor, value_width: int, factor: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The result of `megatron_wrap.nn.kernels.rotary_projections`, by Megatron-Core's unfused rotation."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    def rotated(tensor: Tensor) -> Tensor:
        by_halves = tensor.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return _apply_rotary_pos_emb_bshd(by_halves, angles[: len(tensor)], mscale=factor)

    width = angles.shape[-1]
    of_key, value = mixed.split((mixed.shape[-1] - value_width, value_width), dim=-1)
    rotary_key = rotated(shared[:, :, None]).expand(*mixed.shape[:3], width)
    result = torch.cat((query[..., :-width], rotated(query[..., -width:])), dim=-1)
    query.detach().fill_(float("nan"))  # the kernel overwrites it
    return result, torch.cat((of_key, rotary_key), dim=-1), value


def train_with_latent_attention(
    overrides: Sequence[str], samples: Sequence[Any], fused: bool
) -> tuple[list[tuple[float, float]], list[list[int]], int]:
    """As `train_and_generate`, with the number of calls of the kernel."""
    from megatron_wrap.nn.attention import self_attention

    kernel = mock.Mock(side_effect=latent_rotary)
    chosen = kernel if fused else None
    substitute = mock.patch.object(self_attention, "latent_rotary_kernel", return_value=chosen)
    with started(runs.CONFIG, [*overrides]) as wrap, substitute:
        steps = [wrap.train(samples) for _ in range(2)]
        completions = wrap.generate([[5, 6, 7], [8, 9]], max_new_tokens=4)
    values = [(step["loss"], step["grad_norm"]) for step in steps]
    return values, [completion["token_ids"] for completion in completions], kernel.call_count


@contextlib.contextmanager
def replaced_modules(substitutes: Mapping[str, Any]) -> Iterator[None]:
    """Imports find these modules by name. Others that are imported meanwhile stay, unlike after `mock.patch.dict`."""
    originals = {name: sys.modules.get(name) for name in substitutes}
    sys.modules.update(substitutes)
    try:
        yield
    finally:
        for name, original in originals.items():
            del sys.modules[name]
            if original is not None:
                sys.modules[name] = original


def train_and_generate(
    overrides: Sequence[str], samples: Sequence[Any], fused: bool
) -> tuple[list[tuple[float, float]], list[list[int]], int]:
    """(loss, gradient norm) of two steps, then completions, and the number of layers that were fused."""
    from megatron_wrap.nn.attention import self_attention

    changed, folder = 0, "megatron_wrap.nn.kernels"
    substitutes = {  # they need Triton
        f"{folder}.rotary": types.SimpleNamespace(split_rotary=split_rotary),
        f"{folder}.rotary_projections": types.SimpleNamespace(
            split_normalized_rotary=split_normalized_rotary, HeadNorms=types.SimpleNamespace
        ),
    }
    with started(runs.CONFIG, [*overrides]) as wrap, replaced_modules(substitutes if fused else {}):
        for module in (module for chunk in wrap.state.chunks for module in chunk.modules()):
            if fused and type(module) is self_attention.SelfAttention:
                module.__class__ = self_attention.FusedSelfAttention
                changed += 1
        steps = [wrap.train(samples) for _ in range(2)]
        completions = wrap.generate([[5, 6, 7], [8, 9]], max_new_tokens=4)
    values = [(step["loss"], step["grad_norm"]) for step in steps]
    return values, [completion["token_ids"] for completion in completions], changed
