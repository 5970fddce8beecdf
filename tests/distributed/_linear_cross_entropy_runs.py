"""What the ranks of the tests of linear cross-entropy run: the same steps with stored and with deferred logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import _model_runs
from _started import gradients_of, started, without_measured

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


def both(overrides: tuple[str, ...], batch: list[Any] | None = None) -> dict[str, Any]:
    """Gradients of a first step, then the metrics of two steps, with stored and with deferred logits.

    Returns:
        `stored` and `deferred`: (metrics of each step, on rank 0 the unsharded gradients by name); `counts` of the
        deferred run.
    """
    results: dict[str, Any] = {}
    for name, value in (("stored", "false"), ("deferred", "true")):
        with _small_chunks() as count:
            results[name] = _steps((*overrides, f"{KEY}={value}"), batch)
            results["counts"] = tuple(count())
    return results


def _steps(overrides: tuple[str, ...], batch: list[Any] | None) -> tuple[list[dict[str, float]], dict[str, Any]]:
    with started(_model_runs.CONFIG, overrides) as wrap:
        batch = batch or _model_runs.samples(wrap.global_batch_size, wrap.config.train.seq_length)
        gradients = gradients_of(wrap, batch)
        metrics = [wrap.train(batch) for _ in range(2)]
        metrics.append(wrap.evaluate({"set": batch}))
        keep = wrap.state.parallel.world.rank == 0
    return [without_measured(step) for step in metrics], gradients if keep else {}
