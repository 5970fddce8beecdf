"""Functions that the tests of preference optimization and reference models run on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from _started import started

CONFIG = Path(__file__).parent / "layouts.yaml"
TRAIN, RATE, PARALLEL = "megatron_lm.train.common", "megatron_lm.train.learning-rate", "megatron_lm.model.parallel"
VOCAB, BATCH = 500, 4
COPY = ("megatron_wrap.models.reference=copy",)
DPO = (
    "megatron_wrap.flow.__select__=gpt_dpo",
    f"{TRAIN}.global_batch_size={BATCH}",
    f"{TRAIN}.seq_length=40",
    f"{TRAIN}.train_iters=10",
    f"{RATE}.lr_decay_style=constant",
    f"{RATE}.lr_warmup_iters=0",
    "megatron_lm.train.optimizer.adam_beta2=0.999",
    "megatron_lm.train.optimizer.weight_decay=0.0",
)
REPORTED = ("loss", "grad_norm", "kl", "entropy")
REPORTED += tuple(f"rewards/{name}" for name in ("margins", "accuracies", "chosen", "rejected"))


def pairs(count: int = 40) -> list[dict[str, list[int]]]:
    """Tokenized pairs of unequal lengths."""
    generator = numpy.random.default_rng(5)

    def tokens(shortest: int, longest: int) -> list[int]:
        return generator.integers(3, VOCAB, int(generator.integers(shortest, longest))).tolist()

    return [
        {"prompt_ids": tokens(3, 15), "chosen_ids": tokens(2, 20), "rejected_ids": tokens(2, 20)} for _ in range(count)
    ]


def train(
    overrides: Sequence[str], samples: Sequence[Any], until: int = 10, save_at: int | None = None
) -> list[dict[str, float]]:
    """Train to iteration `until`; returns the metrics of each step taken here."""
    taken = []
    with started(CONFIG, [*DPO, *overrides]) as wrap:
        while wrap.iteration < until:
            start = wrap.iteration * BATCH
            metrics = wrap.train(samples[start : start + BATCH])
            taken.append({name: metrics[name] for name in REPORTED if name in metrics})
            if wrap.iteration == save_at:
                wrap.save()
    return taken


def initial_weights(overrides: Sequence[str]) -> dict[str, numpy.ndarray]:
    """Unsharded weights before the first step."""
    from megatron_wrap.testing.gradients import gather_weights

    with started(CONFIG, [*DPO, *overrides]) as wrap:
        return {name: weight.numpy() for name, weight in gather_weights(wrap.state).items()}


def outputs(overrides: Sequence[str], samples: Sequence[Any], steps: int = 0) -> list[dict[str, float]]:
    """Outputs of `wrap.forward` for each sample, after some steps."""
    with started(CONFIG, [*DPO, *overrides]) as wrap:
        for _ in range(steps):
            wrap.train(samples[:BATCH])
        return [{name: float(value) for name, value in output.items()} for output in wrap.forward(samples)]


def evaluation(overrides: Sequence[str], samples: Sequence[Any], steps: int) -> dict[str, float]:
    """Metrics of an evaluation after some steps."""
    with started(CONFIG, [*DPO, *overrides]) as wrap:
        for step in range(steps):
            wrap.train(samples[step * BATCH : (step + 1) * BATCH])
        return wrap.evaluate({"set": samples[:7]})


def refusal(overrides: Sequence[str], samples: Sequence[Any] = ()) -> str:
    """The message of the error that a run, or its first step, raises."""
    from megatron_wrap.errors import MegatronWrapError

    try:
        with started(CONFIG, [*DPO, *overrides]) as wrap:
            wrap.train(samples[:BATCH])
    except MegatronWrapError as error:
        return str(error)
    return "no error"
