"""A step with a non-finite loss or gradient raises on every rank and leaves the state unchanged, bit for bit."""

from __future__ import annotations

import _engine_runs as runs
import pytest
from _checkpoint_runs import BF16, EXPERTS, FP16
from _covering import covering
from _engine_runs import options
from _layouts import layout

NO_CLIPPING = ("megatron_lm.train.optimizer.clip_grad=0.0",)
LOW_SCALE = ("megatron_lm.train.dtype.initial_loss_scale=16",)  # low enough that a normal step does not overflow
UNCHECKED = ("megatron_lm.train.common.check_for_nan_in_loss_and_grad=false",)
FUSED = ("megatron_lm.train.optimizer.fused_clipping=true",)  # the device decides, before the host knows the loss

SWITCHES = {"bf16": BF16, "unclipped": NO_CLIPPING, "fused": FUSED, "experts": EXPERTS}
RUNS = (
    *("one", "one-fused", "one-bf16-unclipped"),
    "one-experts-unclipped-fused",  # two optimizers, and expert biases that are updated without a gradient
    *("dp2", "dp2-overlap-bf16-fused", "dp2-dopt-experts", "pp2-unclipped", "tp2", "cp2-dopt"),
)


@pytest.mark.parametrize("name", covering(RUNS))
def test_a_rejected_step_leaves_the_state_unchanged(name: str, ranks) -> None:
    world_size, overrides = layout(name, SWITCHES)
    samples = runs.weighted_samples(16)
    result = ranks(world_size).run(runs.poisoned, (*options("Poisoned"), *overrides), samples, ("loss", "gradient"))
    for of_rank in result:
        infinite_loss, nan_gradient = of_rank["errors"]
        for part in ("TrainingError: loss of iteration 2 ", "(loss inf", "check_for_nan_in_loss_and_grad"):
            assert part in infinite_loss, infinite_loss
        assert nan_gradient.startswith("TrainingError: grad_norm of iteration 2 "), nan_gradient
        assert of_rank["unchanged"] == [True, True]
        assert of_rank["equal"]


def test_an_overflow_in_fp16_is_skipped_and_a_non_finite_loss_is_rejected(ranks) -> None:
    """A rejected step keeps the loss scale, a skipped one lowers it."""
    overrides = (*options("Poisoned"), *FP16, *LOW_SCALE)
    [result] = ranks(1).run(runs.poisoned, overrides, runs.weighted_samples(16), ("loss",))
    assert result["errors"][0].startswith("TrainingError: loss of iteration 2 ")
    assert result["unchanged"] == [True]
    assert result["equal"]
    [result] = ranks(1).run(runs.poisoned, overrides, runs.weighted_samples(16), ("gradient",) * 3)
    assert result["errors"] == ["no error"] * 3
    assert not result["equal"]


def test_an_unchecked_run_continues(ranks) -> None:
    for fused in ((), FUSED):
        overrides = (*options("Poisoned"), *UNCHECKED, *fused)
        [result] = ranks(1).run(runs.poisoned, overrides, runs.weighted_samples(16), ("gradient",))
        assert result["errors"] == ["no error"]
        assert result["unchanged"] == [False]
