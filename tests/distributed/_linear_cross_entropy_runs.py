"""What the ranks of the tests of linear cross-entropy run: the same steps with stored and with deferred logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import _model_runs
from _started import started

KEY = "megatron_wrap.model_provider.linear_cross_entropy"


class Counts(NamedTuple):
    """How often the backward pass computed logits again, and how often all logits were stored."""

    recomputed: int
    stored: int


@contextmanager
def _small_chunks() -> Iterator[Any]:
    """Chunks of at most 13 tokens; yields what counts the calls."""
    from megatron_wrap.ops import chunks, deferred_logits

    with (
        mock.patch.object(chunks, "MIN_CHUNK_TOKENS", 13),
        mock.patch.object(chunks, "chunk_bytes", return_value=1),
        mock.patch.object(chunks, "_recomputed", wraps=chunks._recomputed) as recomputed,
        mock.patch.object(deferred_logits.DeferredLogits, "_warn") as stored,
    ):
        yield lambda: Counts(recomputed.call_count, stored.call_count)


def both(config: str, overrides: tuple[str, ...], folder: str, batch: list[Any] | None = None) -> dict[str, Any]:
    """Gradients of a first step, then the metrics of two steps, with stored and with deferred logits.

    Returns:
        `stored` and `deferred`: (metrics of each step, on rank 0 the unsharded gradients by name); `counts` of the
        deferred run.
    """
    results: dict[str, Any] = {}
    for name, value in (("stored", "false"), ("deferred", "true")):
        with _small_chunks() as count:
            results[name] = _steps(
                config, (*overrides, f"{KEY}={value}", f"megatron_wrap.logger.output_dir={folder}"), batch
            )
            results["counts"] = tuple(count())
    return results


def _steps(
    config: str, overrides: tuple[str, ...], batch: list[Any] | None
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    from megatron_wrap.engine.step import gradients_of_batch
    from megatron_wrap.testing.gradients import gather_gradients

    with started(Path(config), overrides) as wrap:
        size = wrap.global_batch_size
        batch = batch or _model_runs.samples(size, wrap.config.train.seq_length)
        gradients_of_batch(wrap.state, batch)
        gradients = {name: value.float().numpy() for name, value in gather_gradients(wrap.state).items()}
        metrics = [wrap.train(batch) for _ in range(2)]
        metrics.append(wrap.evaluate({"set": batch}))
        keep = wrap.state.parallel.world.rank == 0
    timing = ("elapsed_time", "tokens_per_second", "tokens_per_second_per_device", "tflops", "throughput", "memory")
    kept = [{key: v for key, v in of.items() if not any(part in key for part in timing)} for of in metrics]
    return kept, gradients if keep else {}
