"""`wrap.fit`: the steps of the documented loop, early stopping, and the best checkpoint.

Each test with a run has a forked process with a group of its own.
"""

import errno
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from _runs import read_rows, ready, started, write_rows

from megatron_wrap.checkpoint.files.run_folder import CheckpointStore
from megatron_wrap.core import MegatronWrap
from megatron_wrap.engine.state.state import BestEvaluation
from megatron_wrap.errors import ConfigError
from megatron_wrap.utils.metric_loggers import MetricLoggerEntry

pytestmark = pytest.mark.process_group

TRAIN, DATA, CHECKPOINT = "megatron_lm.train.common", "megatron_wrap.data", "megatron_wrap.checkpoint"
BEST = (f"{TRAIN}.eval_interval=2", f"{CHECKPOINT}.best_metric=validation/loss")
LOSSES = {0: 1.0, 2: 5.0, 4: 3.0, 6: 4.0, 8: 3.0, 10: 2.0, 12: 9.0, 5: 0.0, 7: 0.0, 9: 0.0}
"""Iteration -> loss of its evaluation; odd iterations are not evaluated by eval_interval, but after a stop."""
TIMES = ("elapsed_time", "tokens_per_second", "tflops", "throughput", "memory")


class Scripted(MegatronWrap):
    """Evaluations with known losses; the iterations of all of them."""

    def __init__(self, overrides: tuple[str, ...], losses: dict[int, float]) -> None:
        super().__init__("run.yaml", overrides=overrides)
        self.losses, self.evaluated = losses, []

    def evaluate(self, sets: Any = None) -> dict[str, float]:
        self.evaluated.append(self.iteration)
        return {"eval/validation/loss": self.losses[self.iteration], "eval/validation/truncated_samples": 0.0}


@pytest.fixture(autouse=True)
def data(run_folder: None) -> tuple[str, ...]:
    """Overrides that select a training and an evaluation set."""
    generator = numpy.random.default_rng(3)
    for name in ("train", "validation"):
        ids = [generator.integers(0, 60, 9).tolist() for _ in range(12)]
        write_rows(f"{name}.jsonl", [{"input_ids": of_sample, "loss_mask": [1] * 9} for of_sample in ids])
    return (f"{DATA}.__select__=jsonl", f"{DATA}.train=train.jsonl", f"{DATA}.validation=validation.jsonl")


def scripted(data: tuple[str, ...], *overrides: str, losses: dict[int, float] = LOSSES) -> Any:
    return ready(Scripted((*data, f"{TRAIN}.train_iters=12", *BEST, *overrides), losses))


def records(folder: str) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    lines = read_rows(Path(folder, "metrics.jsonl"))
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in lines]


def test_fit_takes_the_steps_of_the_documented_loop(data):
    common = (*data, f"{DATA}.num_workers=1", f"{TRAIN}.eval_interval=2", f"{TRAIN}.save_interval=3")
    common += (f"{TRAIN}.train_iters=5",)

    def folders(name: str) -> tuple[str, ...]:
        return (f"{TRAIN}.save={name}/checkpoints", f"megatron_wrap.logger.output_dir={name}")

    with started(*common, *folders("loop")) as wrap:
        for batch in wrap.batches():
            if wrap.evaluation_due:
                wrap.evaluate()
            wrap.train(batch)
            wrap.log_last_metrics()
        expected = wrap.evaluate()
        wrap.save()
    seen = []
    with started(*common, *folders("fit")) as wrap:
        actual = wrap.fit(lambda wrap, metrics: seen.append((wrap.iteration, metrics["loss"])))
    assert actual == expected
    assert records("fit") == records("loop")
    assert [line["iteration"] for line in records("fit")] == [0, 1, 2, 2, 3, 4, 4, 5, 5]
    assert seen == [(line["iteration"], line["loss"]) for line in records("fit") if "loss" in line]
    for name in ("fit", "loop"):
        assert CheckpointStore(f"{name}/checkpoints").iterations() == [3, 5]
    with started(*common, *folders("fit")) as wrap:  # no step is left
        assert wrap.fit() == expected


def test_without_evaluation_sets_the_metrics_are_those_of_the_last_step(data):
    with started(*data[:2], f"{TRAIN}.train_iters=2") as wrap:
        actual = wrap.fit()
        assert actual["iteration"] == 2
        assert not Path("checkpoints").exists()
        assert wrap.fit() == {}  # took no step


class FullDisk:
    """A metric logger whose disk is full from the second step on."""

    def __init__(self, context: Any) -> None: ...

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if step > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_logger_that_fails_ends_neither_training_nor_saving(data, capfd):
    MetricLoggerEntry.register("full_disk")(FullDisk)
    keys = (f"{TRAIN}.train_iters=4", f"{TRAIN}.save=saved", f"{TRAIN}.save_interval=2")
    loggers = "megatron_wrap.logger.metric_loggers=[full_disk]"
    with started(*data[:2], *keys, loggers) as wrap:
        wrap.fit()
        output = wrap.output_dir
    assert CheckpointStore("saved").iterations() == [2, 4]
    assert [line["iteration"] for line in records(str(output))] == [1, 2, 3, 4]
    assert capfd.readouterr().err.count("FullDisk fails: No space left on device; training continues") == 1


@pytest.mark.parametrize(("answer", "until"), [(False, 3), (None, 4), pytest.param(0, 4, marks=pytest.mark.matrix)])
def test_only_false_ends_the_run(data, answer, until):
    with started(*data, f"{TRAIN}.train_iters=4", f"{TRAIN}.save=saved") as wrap:
        actual = wrap.fit(lambda wrap, metrics: answer if wrap.iteration == 3 else True)
        assert wrap.iteration == until
        assert actual.keys() == {"eval/validation/loss", "eval/validation/truncated_samples"}
    assert CheckpointStore("saved").iterations() == [until]


def test_the_best_checkpoint_is_kept(data):
    with scripted(data, f"{TRAIN}.save=saved", f"{TRAIN}.save_interval=3", f"{CHECKPOINT}.keep=1") as wrap:
        actual = wrap.fit(lambda wrap, metrics: wrap.iteration != 9)
        assert wrap.evaluated == [0, 2, 4, 6, 8, 9]
        assert actual == {
            **{"eval/validation/loss": LOSSES[9], "eval/validation/truncated_samples": 0.0},
            **{"best_iteration": 4.0, "best_value": 3.0},
        }
    assert CheckpointStore("saved").iterations() == [4, 9]
    assert Path("saved/best_checkpointed_iteration.txt").read_text() == "4"
    with scripted(data, f"{TRAIN}.save=saved", f"{CHECKPOINT}.keep=1") as wrap:
        assert wrap.fit()["best_iteration"] == 10
    assert CheckpointStore("saved").iterations() == [10, 12]
    assert Path("saved/best_checkpointed_iteration.txt").read_text() == "10"
    # another run that starts from it has a best checkpoint of its own
    with scripted(data, f"{TRAIN}.load=saved") as wrap:
        assert wrap.state.best == BestEvaluation()


@pytest.mark.parametrize(
    ("patience", "mode", "ends", "best"),
    [
        (3, "min", 12, 10),
        (2, "max", 6, 2),
        pytest.param(2, "min", 8, 4, marks=pytest.mark.matrix),
    ],
)
def test_a_run_out_of_patience_ends(data, patience, mode, ends, best):
    settings = (f"{TRAIN}.early_stop_patience={patience}", f"{CHECKPOINT}.best_metric_mode={mode}")
    with scripted(data, *settings, f"{TRAIN}.save=saved") as wrap:
        actual = wrap.fit()
        assert (wrap.iteration, actual["best_iteration"], actual["best_value"]) == (ends, best, LOSSES[best])
        assert wrap.evaluated == [*range(0, ends + 1, 2)]
        assert actual["eval/validation/loss"] == LOSSES[ends]
    with scripted(data, *settings, f"{TRAIN}.save=saved") as wrap:  # it does not continue
        assert wrap.fit() == actual
        assert wrap.iteration == ends


@pytest.mark.parametrize(
    ("stop", "killed"),
    [(7, True), *(pytest.param(stop, False, marks=pytest.mark.matrix) for stop in (5, 6))],
)
def test_a_resumed_run_has_the_same_best_evaluation_and_patience(data, stop, killed):
    settings = (f"{TRAIN}.early_stop_patience=3", f"{TRAIN}.save_interval=3", f"{TRAIN}.train_iters=10")
    with scripted(data, *settings, f"{TRAIN}.save=straight") as wrap:
        expected, best = wrap.fit(), wrap.state.best

    class Killed(Exception):
        pass

    def hook(wrap: Any, metrics: dict[str, float]) -> bool:
        if killed and wrap.iteration == stop:  # after the save of iteration 6 and before its evaluation is saved
            raise Killed
        return wrap.iteration != stop

    try:
        with scripted(data, *settings, f"{TRAIN}.save=resumed") as wrap:
            wrap.fit(hook)
    except Killed:
        pass
    with scripted(data, *settings, f"{TRAIN}.save=resumed") as wrap:
        assert wrap.iteration == (6 if killed else stop)
        assert wrap.fit() == expected
        assert wrap.state.best == best


def test_an_unknown_metric_is_refused_before_the_first_step(data):
    with (
        scripted(data, f"{CHECKPOINT}.best_metric=validation/lose") as wrap,
        pytest.raises(ConfigError, match=r"best_metric.*validation/lose.*did you mean validation/loss\?"),
    ):
        wrap.fit()
    assert wrap.evaluated == [0]


def test_the_export_of_the_best_checkpoint_is_kept(tmp_path):
    from megatron_wrap.bridge.export.save_pretrained import prune_exports

    for iteration in (2, 4, 6, 8):
        (tmp_path / f"hf_{iteration:07d}").mkdir()
    prune_exports(tmp_path, 1, SimpleNamespace(world=SimpleNamespace(rank=0)), best=4)
    assert sorted(path.name for path in tmp_path.glob("hf_*")) == ["hf_0000004", "hf_0000008"]


def test_a_value_that_is_no_number_is_never_the_best():
    best = BestEvaluation()
    values = [math.nan, math.inf, 2.0, math.nan, 1.0]
    assert [best.compare(index, value, largest=False) for index, value in enumerate(values)] == [0, 1, 1, 0, 1]
    assert (best.iteration, best.value, best.evaluations_since) == (4, 1.0, 0)


def test_a_finished_run_that_is_started_again_says_so(data, capfd):
    settings = (f"{TRAIN}.train_iters=2", f"{TRAIN}.save=done")
    with scripted(data, *settings) as wrap:
        wrap.fit()
    assert "nothing is left" not in capfd.readouterr().err
    with scripted(data, *settings) as wrap:
        wrap.fit()
        assert wrap.iteration == 2
    assert (
        "the run is finished: nothing is left to train after iteration 2; to continue, raise "
        "megatron_lm.train.common.train_iters" in capfd.readouterr().err
    )
