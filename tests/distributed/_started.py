"""Runs that are set up, and what functions on ranks do with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MEASURED = ("elapsed_time", "tokens_per_second", "tokens_per_second_per_device", "tflops", "throughput")
MEASURED += ("memory_allocated", "memory_reserved", "memory_max")
"""Metrics that differ between two runs of one configuration."""
HUGGING_FACE = Path(__file__).parent / "hugging_face.yaml"


@contextmanager
def started(config: Path, overrides: Sequence[str]) -> Iterator[Any]:
    """A run with model and optimizer on the layout of `overrides`."""
    from megatron_wrap.core import MegatronWrap

    with MegatronWrap(config, overrides=overrides) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        yield wrap


@contextmanager
def from_folder(folder: str, overrides: Sequence[str], outputs: str | Path, training: bool = True) -> Iterator[Any]:
    """A run that starts from a Hugging Face folder, with an optimizer if it is `training`."""
    from megatron_wrap.core import MegatronWrap

    settings = [*overrides, f"megatron_wrap.logger.output_dir={outputs}"]
    with MegatronWrap.from_pretrained(folder, HUGGING_FACE, settings) as wrap:
        wrap.initialize()
        if training:
            wrap.setup_model_and_optimizer()
        else:
            wrap.setup_model()
        yield wrap


def train_until(wrap: Any, samples: Sequence[Any], until: int, save_at: Collection[int] = ()) -> list[dict[str, float]]:
    """Train to iteration `until` on samples in their order; the metrics of each step taken here."""
    size, taken = wrap.global_batch_size, []
    while wrap.iteration < until:
        start = wrap.iteration * size
        taken.append(dict(wrap.train(samples[start : start + size])))
        if wrap.iteration in save_at:
            wrap.save()
    return taken


def without_measured(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that two runs of one configuration share."""
    return {name: value for name, value in metrics.items() if name.split("/")[-1] not in MEASURED}


def weights_of(wrap: Any) -> dict[str, Any]:
    """Global name -> unsharded weight as numpy array."""
    from megatron_wrap.testing.gradients import gather_weights

    return {name: weight.numpy() for name, weight in gather_weights(wrap.state).items()}


def gradients_of(wrap: Any, batch: Sequence[Any]) -> dict[str, Any]:
    """Global name -> unsharded gradient of a batch as fp32 numpy array; weights are unchanged."""
    from megatron_wrap.engine.step import gradients_of_batch
    from megatron_wrap.testing.gradients import gather_gradients

    gradients_of_batch(wrap.state, batch)
    return {name: gradient.float().numpy() for name, gradient in gather_gradients(wrap.state).items()}


def refusal_of(function: Callable[..., Any], *arguments: Any) -> str:
    """The message of the user's error that the call raises; "no error" without one."""
    from megatron_wrap.errors import MegatronWrapError

    try:
        function(*arguments)
    except MegatronWrapError as error:
        return str(error)
    return "no error"
