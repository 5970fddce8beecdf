"""Functions that the tests of the embedding's gradient run on each rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from _engine_runs import started
from torch import Tensor


def steps(overrides: Sequence[str], samples: Sequence[Any]) -> dict[str, Any]:
    """Gradients of a step and metrics of two more, with Megatron-Core's lookup and with the one that adds to the
    buffer, by torch instead of its kernel; and how often that one has added."""
    from megatron_wrap.nn.kernels.embedding.lookup import lookup
    from megatron_wrap.platform.megatron_core.kernels import LayerKernels, use
    from megatron_wrap.platform.megatron_core.undoable_changes import Replacements

    additions = 0

    def add(ids: Tensor, grad: Tensor, total: Tensor) -> None:
        nonlocal additions
        additions += 1
        total.index_add_(0, ids.flatten(), grad.flatten(0, -2).to(total.dtype))

    results: dict[str, Any] = {}
    for name, kernel in (("megatron", None), ("added", functools.partial(lookup, add=add))):
        with started(overrides) as wrap, Replacements() as replacements:
            use(LayerKernels(embedding=kernel), replacements)
            results[name] = _steps(wrap, samples)
    return {**results, "additions": additions}


def _steps(wrap: Any, samples: Sequence[Any]) -> dict[str, Any]:
    from megatron_wrap.engine.step import gradients_of_batch
    from megatron_wrap.testing.gradients import gather_gradients

    size = wrap.global_batch_size
    gradients_of_batch(wrap.state, samples[:size])
    gradients = {name: gradient.numpy() for name, gradient in gather_gradients(wrap.state).items()}
    metrics = [wrap.train(samples[:size]), wrap.train(samples[size : 2 * size])]
    return {"gradients": gradients, "metrics": [(step["loss"], step["grad_norm"]) for step in metrics]}
