"""The gradient of one batch on a layout, and how often the attention kernels for packed rows ran. Runs on each rank."""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from contextlib import contextmanager
from typing import Any

import torch

from megatron_wrap.core import MegatronWrap


def gradients(config: str, overrides: list[str], samples: list[Any]) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """(parameter -> unsharded gradient, kernel -> number of calls on this rank)."""
    from megatron_wrap.engine.step import gradients_of_batch
    from megatron_wrap.testing.gradients import gather_gradients

    with MegatronWrap(config, overrides=overrides) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        with counted_kernels() as counts:
            gradients_of_batch(wrap.state, samples)
        return gather_gradients(wrap.state), dict(counts)


@contextmanager
def counted_kernels() -> Any:
    """Counts calls of torch's varlen attention, of the ring's kernels of packed rows, and of Transformer Engine's fused
    attention by layout of its inputs."""
    counts: Counter[str] = Counter()
    undo = []

    def wrapped(owner: Any, name: str, label: Any) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)  # with its signature, which is inspected
        def counting(*arguments: Any, **named: Any) -> Any:
            counts[label(arguments, named)] += 1
            return original(*arguments, **named)

        setattr(owner, name, counting)
        undo.append((owner, name, original))

    from megatron_wrap.nn.attention.choice import varlen_kernel

    varlen_kernel.cache_clear()
    wrapped(importlib.import_module("torch.nn.attention.varlen"), "varlen_attn", lambda *_: "varlen_attn")
    ring = importlib.import_module("megatron_wrap.nn.attention.ring")
    wrapped(ring, "packed_kernel_with_logsumexp", lambda *_: "ring")
    try:
        folder = "transformer_engine.pytorch.attention.dot_product_attention"
        for module in ("backends", "context_parallel"):
            owner = importlib.import_module(f"{folder}.{module}")
            wrapped(owner, "fused_attn_fwd", lambda arguments, named: f"fused {_layout(arguments, named)}")
    except ImportError:
        pass
    try:
        yield counts
    finally:
        for owner, name, original in undo:
            setattr(owner, name, original)
        varlen_kernel.cache_clear()


def _layout(arguments: Any, named: Any) -> str:
    values = [*arguments, *named.values()]
    return next((value for value in values if isinstance(value, str) and value.count("_") == 2), "?")
