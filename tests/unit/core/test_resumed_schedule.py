"""A run that resumes with another length: which schedules continue, and what the error names.

Each test runs in a forked process with a group of its own.
"""

import pytest
from _runs import started

from megatron_wrap.errors import CheckpointError

pytestmark = pytest.mark.process_group

TRAIN, RATE, OPTIMIZER = (f"megatron_lm.train.{name}" for name in ("common", "learning-rate", "optimizer"))
SAMPLES = [{"input_ids": [index, 7, 8, 9], "loss_mask": [0, 1, 1, 1]} for index in range(4)]


def rates(train_iters: int, until: int, *overrides: str, save: bool = False) -> list[float]:
    """Learning rate of each step from where the run resumes to `until`."""
    taken = []
    with started(f"{TRAIN}.save=ckpt", f"{TRAIN}.train_iters={train_iters}", *overrides) as wrap:
        while wrap.iteration < until:
            taken.append(wrap.train(SAMPLES)["learning_rate"])
        if save:
            wrap.save()
    return taken


@pytest.mark.parametrize(
    "overrides",
    [
        f"{RATE}.lr_decay_iters=6",
        # its length is train_iters, which has no effect
        pytest.param(f"{RATE}.lr_decay_style=constant", marks=pytest.mark.matrix),
        # from a value to the same value
        pytest.param(f"{RATE}.lr_decay_iters=6 {OPTIMIZER}.weight_decay_incr_style=linear", marks=pytest.mark.matrix),
    ],
)
def test_more_iterations_with_the_same_schedule_continue(overrides: str):
    rates(4, 2, *overrides.split(), save=True)
    resumed = rates(8, 8, *overrides.split())
    straight = rates(8, 8, *overrides.split(), f"{TRAIN}.save=other")
    assert resumed == straight[2:]


LENGTH = "learning-rate.lr_decay_iters (null: megatron_lm.train.common.train_iters)"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        pytest.param((), (LENGTH, "was 4 (16 samples) and is 8"), marks=pytest.mark.matrix),
        (
            (f"{RATE}.lr_decay_iters=6", f"{OPTIMIZER}.end_weight_decay=0.2"),
            ("megatron_lm.train.common.train_iters", "was 4 (16 samples) and is 8 (32 samples)"),
        ),
    ],
    ids=["decay over the run", "weight decay over the run"],
)
def test_the_error_of_another_schedule_names_its_yaml_keys(overrides: tuple[str, ...], parts: tuple[str, ...]):
    grow = (f"{OPTIMIZER}.weight_decay_incr_style=linear",)
    rates(4, 2, *grow, *overrides, save=True)
    with pytest.raises(CheckpointError) as refused:
        rates(8, 3, *grow, *overrides)
    for part in (*parts, "override_opt_param_scheduler: true", "use_checkpoint_opt_param_scheduler: true"):
        assert part in str(refused.value), str(refused.value)
    for choice in ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"):
        assert len(rates(8, 3, *grow, *overrides, f"{OPTIMIZER}.{choice}=true")) == 1


def test_the_error_names_every_key_that_differs():
    rates(4, 2, save=True)
    with pytest.raises(CheckpointError) as refused:
        rates(4, 3, f"{RATE}.lr=0.02", f"{RATE}.lr_warmup_iters=1")
    assert f"{RATE}.lr was 0.01 and is 0.02" in str(refused.value)
    assert f"{RATE}.lr_warmup_iters was 0 (0 samples) and is 1 (4 samples)" in str(refused.value)


def test_loading_in_the_middle_of_a_run_sets_the_schedule_back():
    expected = rates(6, 4, save=True)
    with started(f"{TRAIN}.train_iters=6", f"{TRAIN}.load=ckpt") as wrap:
        fifth = wrap.train(SAMPLES)["learning_rate"]
        wrap.load("ckpt")
        assert wrap.iteration == 4
        assert wrap.train(SAMPLES)["learning_rate"] == fifth < min(expected)
