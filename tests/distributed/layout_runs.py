"""Functions that the layout tests run on each rank: train a few steps; losses, token counts, norms and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from _started import started

CONFIG = Path(__file__).parent / "layouts.yaml"
VOCAB = 500
"""Not a multiple of any tensor-parallel size times 128, so that every layout pads the embedding."""


@dataclass(frozen=True)
class Layout:
    """One parallel layout."""

    name: str
    processes: int
    overrides: tuple[str, ...]


def _parallel(**sizes: Any) -> tuple[str, ...]:
    names = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "sp": "sequence_parallel",
        "layers_per_chunk": "num_layers_per_virtual_pipeline_stage",
    }
    return tuple(f"megatron_lm.model.parallel.{names[key]}={str(value).lower()}" for key, value in sizes.items())


DISTRIBUTED_OPTIMIZER = ("megatron_lm.train.optimizer.use_distributed_optimizer=true",)

LAYOUTS = [
    Layout("dp2", 2, ()),
    Layout("dp2-distributed-optimizer", 2, DISTRIBUTED_OPTIMIZER),
    Layout("tp2", 2, _parallel(tp=2, sp=False)),
    Layout("tp2-sp", 2, _parallel(tp=2, sp=True)),
    Layout("pp2", 2, _parallel(pp=2)),
    Layout("pp2-vpp2", 2, _parallel(pp=2, layers_per_chunk=1)),
    Layout("cp2", 2, _parallel(cp=2)),
    Layout("tp2-pp2", 4, _parallel(tp=2, sp=True, pp=2)),
    Layout("tp2-cp2", 4, _parallel(tp=2, sp=True, cp=2)),
    Layout("tp2-dp2", 4, _parallel(tp=2, sp=True)),
    Layout("pp2-dp2", 4, _parallel(pp=2)),
    Layout("cp2-dp2", 4, _parallel(cp=2)),
    Layout("pp2-cp2", 4, _parallel(pp=2, cp=2)),
]


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
    from megatron_wrap.engine.step import gradients_of_batch
    from megatron_wrap.testing.gradients import gather_gradients

    with started(CONFIG, overrides) as wrap:
        size = wrap.global_batch_size
        samples = token_samples(size * steps, wrap.config.train.seq_length)
        gradients: dict[str, Any] = {}
        if not overlaps_stages:
            assert wrap.state.transformer_config.overlap_p2p_comm
            wrap.state.transformer_config.overlap_p2p_comm = False
        if with_gradients:
            state = wrap.state
            gradients_of_batch(state, samples[:size])
            gradients = {name: gradient.numpy() for name, gradient in gather_gradients(state).items()}
        steps_taken = [wrap.train(samples[step * size : (step + 1) * size]) for step in range(steps)]
    return {
        "losses": [metrics["loss"] for metrics in steps_taken],
        "tokens": [metrics["consumed_tokens"] for metrics in steps_taken],
        "grad_norms": [metrics["grad_norm"] for metrics in steps_taken],
        "gradients": gradients,
    }
