"""Functions that the layout tests run on each rank: train a few steps; losses, token counts, norms and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
from _started import gradients_of, started, train_until

CONFIG = Path(__file__).parent / "layouts.yaml"
VOCAB = 500
"""Not a multiple of any tensor-parallel size times 128, so that every layout pads the embedding."""


def token_samples(count: int, longest: int, seed: int = 7) -> list[dict[str, list[int]]]:
    """Tokenized samples of unequal lengths with part of the tokens masked; one has no loss token."""
    generator = numpy.random.default_rng(seed)
    samples = []
    for index in range(count):
        length = int(generator.integers(longest // 4, longest + 1))
        mask = (generator.random(length) < 0.6).astype(int).tolist()
        samples.append(
            {
                "input_ids": generator.integers(0, VOCAB, length).tolist(),
                "loss_mask": [0] * length if index == 3 else mask,
            }
        )
    return samples


def train(
    overrides: tuple[str, ...], steps: int, with_gradients: bool = True, overlaps_stages: bool = True
) -> dict[str, Any]:
    """Train from initial weights on the layout of `overrides`.

    Args:
        overlaps_stages: False: the messages of interleaved pipeline stages do not overlap with computation.

    Returns:
        losses, tokens, grad_norms of each step, and the unsharded gradients of step 1 as numpy arrays.
    """
    with started(CONFIG, overrides) as wrap:
        size = wrap.global_batch_size
        samples = token_samples(size * steps, wrap.config.train.seq_length)
        if not overlaps_stages:
            assert wrap.state.transformer_config.overlap_p2p_comm
            wrap.state.transformer_config.overlap_p2p_comm = False
        gradients = gradients_of(wrap, samples[:size]) if with_gradients else {}
        taken = train_until(wrap, samples, steps)
    return {
        "losses": [metrics["loss"] for metrics in taken],
        "tokens": [metrics["consumed_tokens"] for metrics in taken],
        "grad_norms": [metrics["grad_norm"] for metrics in taken],
        "gradients": gradients,
    }
