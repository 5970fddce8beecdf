"""`on_bad_step: rollback` on one process: what is recorded, and when the run ends despite it."""

from typing import Any

import _runs
import numpy
import pytest
import torch

from megatron_wrap.errors import ConfigError, TrainingError
from megatron_wrap.flow import LossOutput, MegatronWrapFlowEntry, MegatronWrapGPTModelSFTFlow

pytestmark = pytest.mark.process_group

TRAIN, DATA, BAD = "megatron_lm.train.common", "megatron_wrap.data", "megatron_wrap.bad_steps"
ROLLBACK = (f"{BAD}.on_bad_step=rollback", f"{TRAIN}.save=saved")


class Overflowing(MegatronWrapGPTModelSFTFlow):
    """A row with 59, 59, 59 has an infinite loss."""

    def calculate_loss(self, loss_inputs: Any, model_forward_output: torch.Tensor) -> LossOutput:
        bad = (loss_inputs["labels"] == 59).sum(dim=1).amax() >= 3
        loss = super().calculate_loss(loss_inputs, model_forward_output).loss_sum
        return LossOutput(loss * float("inf") if bad else loss)


@pytest.fixture(autouse=True)
def registered(run_folder: None) -> None:
    MegatronWrapFlowEntry.register("overflowing")(Overflowing)


def started(*overrides: str, bad_rows: tuple[int, ...] = ()) -> Any:
    generator = numpy.random.default_rng(3)
    rows = [[index, *generator.integers(0, 59, 8).tolist()] for index in range(40)]
    for row in bad_rows:
        rows[row][-3:] = [59, 59, 59]
    for name, count in (("train", 40), ("validation", 4)):
        _runs.write_rows(f"{name}.jsonl", [{"input_ids": ids, "loss_mask": [1] * 9} for ids in rows[:count]])
    keys = (f"{DATA}.__select__=dataset", f"{DATA}.train=train.jsonl", f"{DATA}.shuffle=false")
    return _runs.started(*keys, "megatron_wrap.flow.flow_key=overflowing", *overrides)


def test_records_and_evaluations_continue_from_the_checkpoint(capfd: pytest.CaptureFixture[str]) -> None:
    keys = (f"{TRAIN}.train_iters=6", f"{TRAIN}.save_interval=2", f"{TRAIN}.eval_interval=2")
    seen = []
    with started(*ROLLBACK, *keys, f"{DATA}.validation=validation.jsonl", bad_rows=(14,)) as wrap:
        wrap.fit(lambda wrap, metrics: seen.append((wrap.iteration, metrics["bad_steps"])))
        progress, output = wrap.state.progress, wrap.output_dir
    assert seen == [(1, 0), (2, 0), (3, 0), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1)]
    assert (progress.left_out, progress.rollbacks, progress.consumed_samples) == ([12, 13, 14, 15], 1, 24)
    lines = _runs.read_rows(output / "metrics.jsonl")
    assert [line["iteration"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["iteration"] for line in lines if "loss" not in line] == [0, 2, 4, 6]
    [warning] = [line for line in capfd.readouterr().err.splitlines() if "goes back to iteration 2" in line]
    assert "sample 2 of a batch of 4 (train.jsonl:15)" in warning
    assert "leaves out 4 samples" in warning


@pytest.mark.parametrize(
    ("keys", "bad_rows", "reason"),
    [
        pytest.param((f"{BAD}.max_rollbacks=1",), (9, 22), r"train\.jsonl:23.* rolled back 1 times", id="limit"),
        pytest.param((), (2,), r"train\.jsonl:3.* there is no checkpoint in saved yet", id="no-checkpoint"),
    ],
)
def test_the_run_ends_with_the_cause_where_it_cannot_go_back(keys: Any, bad_rows: Any, reason: str) -> None:
    with (
        started(*ROLLBACK, f"{TRAIN}.save_interval=1", f"{TRAIN}.train_iters=8", *keys, bad_rows=bad_rows) as wrap,
        pytest.raises(TrainingError, match=reason),
    ):
        wrap.fit()


def test_samples_of_the_caller_cannot_be_left_out() -> None:
    with started(*ROLLBACK, f"{TRAIN}.save_interval=1") as wrap:
        samples = [{"input_ids": [1, 2, 3, 4], "loss_mask": [1] * 4}] * 4
        wrap.train(samples)
        with pytest.raises(TrainingError, match=r"sample 3 of a batch of 4, .* not of wrap\.batches"):
            wrap.train([*samples[:3], {"input_ids": [1, 59, 59, 59], "loss_mask": [1] * 4}])
        assert wrap.iteration == 1


def test_a_rollback_needs_checkpoints_that_resume_exactly() -> None:
    for keys, reason in (((f"{TRAIN}.save=null",), "save"), ((f"{TRAIN}.no_save_optim=true",), "no_save_optim")):
        with pytest.raises(ConfigError, match=rf"on_bad_step.*{reason}"), started(*ROLLBACK, *keys):
            pass
