"""Functions that the tests of the embedding's gradient run on each rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from _engine_runs import started
from _started import gradients_of, train_until
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
            gradients = gradients_of(wrap, samples[: wrap.global_batch_size])
            metrics = [(step["loss"], step["grad_norm"]) for step in train_until(wrap, samples, 2)]
            results[name] = {"gradients": gradients, "metrics": metrics}
    return {**results, "additions": additions}
