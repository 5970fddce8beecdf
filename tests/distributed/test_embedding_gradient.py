"""The gradient of the word embeddings that is added to their rows of the buffer, against Megatron-Core's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import _engine_runs
import numpy
import pytest
from _engine_runs import options, started
from _started import gradients_of, train_until
from torch import Tensor


def steps(overrides: Sequence[str], samples: Sequence[Any]) -> dict[str, Any]:
    """Gradients of a step and metrics of two more, with Megatron-Core's lookup and with the one that adds to the
    buffer, by torch instead of its kernel; and how often that one has added."""
    from megatron_wrap.nn.kernels.weight_gradients import lookup
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


ARCH, DDP = "megatron_lm.model.arch", "megatron_lm.misc.ddp"
OVERLAP = {"distributed": True, f"{DDP}.overlap_grad_reduce": True, f"{DDP}.overlap_param_gather": True}
PREDICTION = {f"{ARCH}.mtp_num_layers": 2, f"{ARCH}.mtp_loss_scaling_factor": 0.5}
BF16 = {"megatron_lm.train.dtype.__select__": "bf16"}
CASES: dict[str, tuple[int, dict[str, Any], bool, float]] = {
    "dp2-overlap": (2, {"micro": 1, **OVERLAP}, True, 1e-5),
    "tp2-sp": (2, {"tp": 2, "sp": True}, True, 1e-5),
    "pp2-tied-mtp": (2, {"pp": 2, "tied": True, **PREDICTION}, True, 1e-5),
    "pp2-mtp": (2, {"pp": 2, **PREDICTION}, True, 1e-5),
    "mtp": (1, PREDICTION, True, 1e-5),
    "tied": (1, {"tied": True}, False, 1e-5),
    "bf16": (1, BF16, True, 2**-8),
}
"""Ranks, settings, whether gradients are added to the rows, and a bound on the error: torch rounds the gradient of a
micro-batch to the dtype of the weight."""


@pytest.mark.parametrize(("size", "settings", "adds", "bound"), CASES.values(), ids=CASES)
def test_steps_are_those_of_megatron_core(size, settings, adds, bound, ranks):
    samples = _engine_runs.weighted_samples(16)
    per_rank = ranks(size).run(steps, options(**settings), samples)
    assert any(actual["additions"] for actual in per_rank) == adds
    for actual in per_rank:
        ours, theirs = actual["added"], actual["megatron"]
        assert ours["gradients"].keys() == theirs["gradients"].keys()
        for name, expected in theirs["gradients"].items():
            error = numpy.linalg.norm(ours["gradients"][name] - expected) / numpy.linalg.norm(expected)
            assert error < (bound if name.startswith("embedding") else 1e-5), name
        numpy.testing.assert_allclose(ours["metrics"], theirs["metrics"], rtol=bound)
