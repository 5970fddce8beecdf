"""Functions that the tests of reference-free preference flows and of reward models run on each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy
from _dpo_runs import BATCH, CONFIG, DPO, TRAIN
from _started import started

__all__ = ["BATCH", "TRAIN"]


def of_flow(flow: str, options: dict[str, Any]) -> tuple[str, ...]:
    """Overrides that select a flow with options."""
    selected = [override.replace("gpt_dpo", flow) for override in DPO]
    return (*selected, *(f"megatron_wrap.flow.{key}={value}" for key, value in options.items()))


def train(overrides: Sequence[str], samples: Sequence[Any], until: int = 10) -> list[dict[str, float]]:
    """Train to iteration `until`; returns the metrics of each step."""
    taken = []
    with started(CONFIG, list(overrides)) as wrap:
        while wrap.iteration < until:
            start = wrap.iteration * BATCH
            taken.append(dict(wrap.train(samples[start : start + BATCH])))
    return taken


def outputs(overrides: Sequence[str], samples: Sequence[Any]) -> list[dict[str, float]]:
    """Outputs of `wrap.forward` for each sample."""
    with started(CONFIG, list(overrides)) as wrap:
        return [{name: float(value) for name, value in output.items()} for output in wrap.forward(samples)]


def initial_weights(overrides: Sequence[str]) -> dict[str, numpy.ndarray]:
    """Unsharded weights before the first step."""
    from megatron_wrap.testing.gradients import gather_weights

    with started(CONFIG, list(overrides)) as wrap:
        return {name: weight.numpy() for name, weight in gather_weights(wrap.state).items()}


def export(
    overrides: Sequence[str], folder: str, samples: Sequence[Any] = (), single: Sequence[Any] = ()
) -> list[float]:
    """Train one step on the samples, write the Hugging Face folder, and return the scores of single sequences."""
    with started(CONFIG, list(overrides)) as wrap:
        if samples:
            wrap.train(samples)
        wrap.save_pretrained(folder)
        return [float(output["score"]) for output in wrap.forward(single)]


def train_in_two_parts(
    first: Sequence[str], second: Sequence[str], samples: Sequence[Any], until: int = 4
) -> list[dict[str, float]]:
    """The metrics of the steps after a checkpoint that `first` saves at half of them and `second` resumes from."""
    taken = []
    for overrides, last in ((first, until // 2), (second, until)):
        taken = []
        with started(CONFIG, list(overrides)) as wrap:
            while wrap.iteration < last:
                start = wrap.iteration * BATCH
                taken.append(dict(wrap.train(samples[start : start + BATCH])))
            if last < until:
                wrap.save()
    return taken


def refusals(value: Sequence[str], single: Sequence[Any]) -> dict[str, str]:
    """The messages of what a value model, or its flow, cannot do."""
    from megatron_wrap.errors import MegatronWrapError

    reward = of_flow("gpt_reward", {})
    cases: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
        "gpt_sft": ((*of_flow("gpt_sft", {}), *value), lambda wrap: None),
        "gpt_reward on logits": (reward, lambda wrap: None),
        "single": ((*reward, *value), lambda wrap: wrap.train(single[:BATCH])),
        "generate": ((*reward, *value), lambda wrap: wrap.generate([[1, 2]])),
    }
    messages = {}
    for name, (overrides, call) in cases.items():
        try:
            with started(CONFIG, list(overrides)) as wrap:
                call(wrap)
        except MegatronWrapError as error:
            messages[name] = str(error)
    return messages
