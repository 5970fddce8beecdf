"""A step's first gradients of experts, written over those of the step before, are those added to zeros, bit for bit."""

from __future__ import annotations

from typing import Any

import _engine_runs
import _first_gradient_runs as runs
import numpy
import pytest
import torch
from _engine_runs import options
from _started import without_measured

ARCH, DDP = "megatron_lm.model.arch", "megatron_lm.misc.ddp"
EXPERTS = {f"{ARCH}.num_experts": 64, f"{ARCH}.moe_router_topk": 2, f"{ARCH}.moe_ffn_hidden_size": 16}
"""More than a micro-batch has rows for."""
EP2 = {
    "megatron_lm.model.parallel.expert_model_parallel_size": 2,
    "distributed": True,
    f"{DDP}.overlap_grad_reduce": True,
    f"{DDP}.overlap_param_gather": True,
}
RECOMPUTED = {
    "megatron_lm.train.recompute.recompute_granularity": "full",
    "megatron_lm.train.recompute.recompute_method": "uniform",
    "megatron_lm.train.recompute.recompute_num_layers": 2,
}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"micro": 2}),
    "recomputed": (1, {"micro": 2, "distributed": True, **RECOMPUTED}),
    "ep2": (2, {"micro": 1, **EP2}),
    "pp2-vpp2": (2, {"micro": 1, "pp": 2, "layers_per_chunk": 1}),
}


@pytest.mark.parametrize(("size", "settings"), CASES.values(), ids=CASES)
def test_training_is_the_same_bit_for_bit(size, settings, ranks):
    samples = _engine_runs.weighted_samples(40)
    for actual in ranks(size).run(runs.steps, options(**settings, **EXPERTS), samples):
        added, written = actual["added"], actual["written"]
        assert added["layers"] == written["layers"] > 0
        assert added["are zero"]
        assert not written["are zero"]
        assert written["state"] == added["state"]
        for ours, theirs in zip(written["metrics"], added["metrics"], strict=True):
            assert without_measured(ours) == without_measured(theirs)
        for part in ("gradients", "without weight"):
            assert written[part].keys() == added[part].keys()
            assert all(numpy.array_equal(written[part][name], value) for name, value in added[part].items())
        assert not any(value.any() for value in written["without weight"].values())


def test_whatever_comes_first_replaces_the_gradient_of_the_step_before(ranks):
    (actual,) = ranks(1).run(runs.gradients_of_ddp, options(micro=2))
    assert actual["actual"]["unused"].abs().sum() == 0
    assert not any(buffer.any() for buffer in actual["outside"].values())
    for name, expected in actual["expected"].items():
        torch.testing.assert_close(actual["actual"][name], expected, rtol=1e-5, atol=1e-6, msg=name)
