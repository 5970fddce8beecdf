"""Functions that the model tests run on each rank: train a few steps, and return metrics and digests of weights."""

from __future__ import annotations

import gc
import hashlib
import weakref
from pathlib import Path
from typing import Any

import numpy
import yaml
from _documented_router import documented_kernels
from _started import gradients_of, started

CONFIG = Path(__file__).parent / "models.yaml"
VOCAB = 301
ARCHITECTURES = yaml.safe_load((Path(__file__).parent / "architectures.yml").read_text(encoding="utf-8"))
"""Kind -> name -> overrides of the architecture."""
ROUTER_LOSSES = {"load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss", "z_loss"}


def samples(count: int, longest: int) -> list[dict[str, list[int]]]:
    """Tokenized samples of unequal lengths with part of the tokens masked."""
    generator = numpy.random.default_rng(5)
    made = []
    for _ in range(count):
        length = int(generator.integers(longest // 2, longest + 2))
        mask = (generator.random(length) < 0.7).astype(int).tolist()
        made.append({"input_ids": generator.integers(0, VOCAB, length).tolist(), "loss_mask": mask})
    return made


def train_with_documented_kernels(*arguments: Any) -> dict[str, Any]:
    """`train`, where routers route as if their kernels ran on a CPU."""
    with documented_kernels() as calls:
        result = train(*arguments)
    assert calls
    return result


def train(overrides: tuple[str, ...], lone_token: bool = False, steps: int = 3) -> dict[str, Any]:
    """Train from initial weights on the layout of `overrides`.

    Args:
        lone_token: take one step more, and keep one loss token in the second batch. Its gradient is as large as that of
            a whole batch, so a loss scale that suits the other steps overflows there, on one rank of DP or CP only.

    Returns:
        For each step losses, grad_norms, params_norms, router_losses, loss_scales, skipped, samples and, with
        lone_token, whether weights changed; digests of all initial weights by global name; digests after training of
        this rank's copies of the word embedding; on rank 0, in fp32, the unsharded gradients of the first step.
    """
    from megatron_wrap.model.chunks import bare_model
    from megatron_wrap.model.initial_weights import global_names
    from megatron_wrap.testing.gradients import gather_weights

    with started(CONFIG, overrides) as wrap:
        state = wrap.state
        initial = {name: _digest(weight) for name, weight in gather_weights(state).items()}
        size = wrap.global_batch_size
        steps += lone_token
        batches = samples(size * steps, wrap.config.train.seq_length)
        if lone_token:
            for index, sample in enumerate(batches[size : 2 * size]):
                sample["loss_mask"] = [int(index == 1 and token == 9) for token in range(len(sample["loss_mask"]))]
        half = state.transformer_config.fp16 or state.transformer_config.bf16
        gradients = {} if half else gradients_of(wrap, batches[:size])
        metrics, changed = [], []
        for step in range(steps):
            before = _weights(wrap) if lone_token else []
            metrics.append(wrap.train(batches[step * size : (step + 1) * size]))
            changed.append(lone_token and _weights(wrap) != before)
        wrap.evaluate({"last": batches[-size:]})  # completes the all-gather of parameters that overlaps the forward
        tied = not wrap.config.arch.untie_embeddings_and_output_weights
        embeddings = [
            _digest(parameter)
            for chunk in state.chunks
            for name, parameter, _ in global_names(bare_model(chunk), tied)
            if name == "embedding.word_embeddings.weight"
        ]
    return {
        "losses": [step["loss"] for step in metrics],
        "grad_norms": [step["grad_norm"] for step in metrics],
        "params_norms": [step.get("params_norm", 0.0) for step in metrics],
        "router_losses": [[step[name] for name in sorted(step) if name in ROUTER_LOSSES] for step in metrics],
        "expert_load": {name: value for name, value in metrics[0].items() if name.startswith("experts/")},
        "loss_scales": [step["loss_scale"] for step in metrics],
        "skipped": [step["skipped_iterations"] for step in metrics],
        "samples": [step["consumed_samples"] for step in metrics],
        "changed": changed,
        "initial": initial,
        "embeddings": embeddings,
        "gradients": gradients if state.parallel.world.rank == 0 else {},
    }


def _weights(wrap: Any) -> list[str]:
    """Digests of this rank's weights, after the all-gather that would overlap the next forward pass."""
    chunks = wrap.state.chunks
    if wrap.config.ddp.overlap_param_gather:
        for chunk in chunks:
            chunk.disable_forward_pre_hook(param_sync=True)
            chunk.enable_forward_pre_hook()
    return [_digest(parameter) for chunk in chunks for parameter in chunk.parameters()]


def _digest(tensor: Any) -> str:
    return hashlib.sha256(tensor.detach().float().contiguous().numpy().tobytes()).hexdigest()[:16]


def is_freed(overrides: tuple[str, ...]) -> bool:
    """Whether nothing holds the model after the run has trained a step and ended."""
    with started(CONFIG, overrides) as wrap:
        wrap.train(samples(wrap.global_batch_size, wrap.config.train.seq_length))
        chunk = weakref.ref(wrap.state.chunks[0])
    del wrap
    gc.collect()
    return chunk() is None
