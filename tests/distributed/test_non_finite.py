"""A step whose loss or gradient is not finite is refused on every rank and leaves everything bit for bit as it was."""

from __future__ import annotations

import _engine_runs as runs
import pytest
from _checkpoint_runs import BF16, DISTRIBUTED, EXPERTS, FP16, OVERLAP
from _engine_runs import options

NO_CLIPPING = ("megatron_lm.train.optimizer.clip_grad=0.0",)
LOW_SCALE = ("megatron_lm.train.dtype.initial_loss_scale=16",)  # nothing overflows by itself
UNCHECKED = ("megatron_lm.train.common.check_for_nan_in_loss_and_grad=false",)

RUNS = {
    "one": (1, ()),
    "one-bf16-unclipped": (1, (*BF16, *NO_CLIPPING)),
    "one-experts-unclipped": (1, (*EXPERTS, *NO_CLIPPING)),  # two optimizers, and biases that move without a gradient
    "dp2": (2, ()),
    "dp2-distributed-overlap-bf16": (2, (*DISTRIBUTED, *OVERLAP, *BF16)),
    "dp2-distributed-experts": (2, (*DISTRIBUTED, *EXPERTS)),
    "pp2-unclipped": (2, (*options(pp=2), *NO_CLIPPING)),
    "tp2-sp": (2, options(tp=2, sp=True)),
    "cp2-distributed": (2, (*options(cp=2), *DISTRIBUTED)),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_refused_step_changes_nothing(name: str, ranks) -> None:
    world_size, overrides = RUNS[name]
    samples = runs.weighted_samples(16)
    found = ranks(world_size).run(runs.poisoned, (*options("Poisoned"), *overrides), samples, ("loss", "gradient"))
    for of_rank in found:
        infinite_loss, nan_gradient = of_rank["errors"]
        assert infinite_loss.startswith("TrainingError: loss of iteration 2 not finite (loss inf"), infinite_loss
        assert nan_gradient.startswith("TrainingError: grad_norm of iteration 2 not finite"), nan_gradient
        assert "check_for_nan_in_loss_and_grad" in infinite_loss
        assert of_rank["unchanged"] == [True, True]
        assert of_rank["alike"]


def test_an_overflow_in_fp16_is_skipped_and_a_non_finite_loss_is_refused(ranks) -> None:
    """The refusal keeps the loss scale, the skipped step lowers it."""
    overrides = (*options("Poisoned"), *FP16, *LOW_SCALE)
    [found] = ranks(1).run(runs.poisoned, overrides, runs.weighted_samples(16), ("loss",))
    assert found["errors"][0].startswith("TrainingError: loss of iteration 2 not finite (loss inf")
    assert found["unchanged"] == [True]
    assert found["alike"]
    [found] = ranks(1).run(runs.poisoned, overrides, runs.weighted_samples(16), ("gradient",) * 3)
    assert found["errors"] == ["no error"] * 3
    assert not found["alike"]


def test_an_unchecked_run_continues(ranks) -> None:
    overrides = (*options("Poisoned"), *UNCHECKED)
    [found] = ranks(1).run(runs.poisoned, overrides, runs.weighted_samples(16), ("gradient",))
    assert found["errors"] == ["no error"]
