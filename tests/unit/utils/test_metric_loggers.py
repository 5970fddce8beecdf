import json
import os
import resource
import sys

import loguru
import pytest

from megatron_wrap.errors import ConfigError
from megatron_wrap.utils.json_lines_logger import JsonLinesLogger, SampleTexts
from megatron_wrap.utils.metric_loggers import (
    MetricLogger,
    MetricLoggerContext,
    MetricLoggers,
    TensorBoardLogger,
    build_metric_loggers,
)


def refuse(name):
    raise AssertionError(f"{name} is not JSON")


def read(path):
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_each_step_is_written_and_flushed_as_one_object(tmp_path):
    import torch

    metrics_logger = JsonLinesLogger(tmp_path / "new" / "folder")
    metrics_logger.log(1, {"iteration": 1, "loss": torch.tensor(0.5), "skipped_iterations": 0})
    metrics_logger.log(2, {"loss": float("nan"), "grad_norm": float("inf")})
    assert isinstance(metrics_logger, MetricLogger)
    assert read(metrics_logger.path) == [  # before close
        {"iteration": 1, "loss": 0.5, "skipped_iterations": 0},
        {"iteration": 2, "loss": None, "grad_norm": None},
    ]
    metrics_logger.close()
    metrics_logger.close()


def test_resume_keeps_earlier_steps_and_removes_later_ones(tmp_path):
    first = JsonLinesLogger(tmp_path)
    first.log(0, {"eval/validation/loss": 9.0})
    for step in (1, 2, 3):
        first.log(step, {"loss": 10.0 - step})
        first.log(step, {"eval/validation/loss": 9.0 - step, "eval/other/loss": 1.0})
    first.close()
    with open(first.path, "a") as file:
        file.write('{"iteration": 4, "lo')  # killed while writing a line
    before = read_lines(first.path)

    second = JsonLinesLogger(tmp_path, resume_from=2)
    assert read_lines(first.path) == before[:5]
    second.log(2, {"eval/validation/loss": 7.0, "eval/other/loss": 1.0})  # exists: not written again
    second.log(2, {"eval/third/loss": 3.0})  # new: written
    second.log(3, {"loss": 7.5})
    second.log(3, {"loss": 7.5, "eval/validation/loss": 6.0})
    second.close()
    assert read(second.path)[5:] == [
        {"iteration": 2, "eval/third/loss": 3.0},
        {"iteration": 3, "loss": 7.5},
        {"iteration": 3, "loss": 7.5, "eval/validation/loss": 6.0},
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def read_lines(path):
    return path.read_text().splitlines()


@pytest.mark.parametrize("before", ['{"iteration": 1, "loss": 2.0}', None])
def test_resume_keeps_a_last_line_without_newline_and_creates_a_missing_file(tmp_path, before):
    if before:
        (tmp_path / "metrics.jsonl").write_text(before)
    metrics_logger = JsonLinesLogger(tmp_path, resume_from=1)
    metrics_logger.log(2, {"loss": 1.0})
    metrics_logger.close()
    assert read(metrics_logger.path) == [*([json.loads(before)] if before else []), {"iteration": 2, "loss": 1.0}]


def test_new_run_renames_the_file_of_an_earlier_run(tmp_path):
    for loss in (3.0, 2.0, 1.0):
        metrics_logger = JsonLinesLogger(tmp_path)
        metrics_logger.log(1, {"loss": loss})
        metrics_logger.close()
    result = {path.name: read(path)[0]["loss"] for path in tmp_path.iterdir()}
    assert result == {"metrics.1.jsonl": 3.0, "metrics.2.jsonl": 2.0, "metrics.jsonl": 1.0}


def test_only_rank_0_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    for make, values in ((JsonLinesLogger, {"loss": 1.0}), (SampleTexts, [("prompt", "text")])):
        file = make(tmp_path / "out")
        file.log(1, values)
        file.close()
    assert build_metric_loggers({"json_lines": None}, MetricLoggerContext(tmp_path / "out")).loggers == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("make", [JsonLinesLogger, TensorBoardLogger])
def test_unwritable_folder_is_refused(tmp_path, make):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"file/out.*: Not a directory; set megatron_wrap\.logger\.output_dir"):
        make(tmp_path / "file" / "out")


def test_tensorboard_discards_steps_that_a_resumed_run_repeats(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardLogger(tmp_path)
    for step in (1, 2, 3):
        first.log(step, {"iteration": step, "loss": float(step)})
    first.close()
    second = TensorBoardLogger(tmp_path, resume_from=2)
    second.log(3, {"loss": 30.0, "eval/validation/loss": 0.5})
    second.close()
    second.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(events.Tags()["scalars"]) == ["eval/validation/loss", "loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_tensorboard_writes_steps_at_its_interval_and_every_evaluation(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.delenv("RANK", raising=False)
    options = {"folder": tmp_path / "events", "log_interval": 2, "queue_size": 1}
    loggers = build_metric_loggers({"tensorboard": options}, MetricLoggerContext(tmp_path / "out"))
    for step in (1, 2, 3):
        loggers.log(step, {"iteration": step, "loss": float(step)})
        loggers.log(step, {"iteration": step, "eval/set/loss": float(-step)})
    loggers.close()
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(2, 2.0)]
    assert [event.value for event in events.Scalars("eval/set/loss")] == [-1.0, -2.0, -3.0]
    assert not (tmp_path / "out").exists()


def test_texts_of_iterations_after_the_checkpoint_are_removed(tmp_path):
    first = SampleTexts(tmp_path)
    for step in (0, 2, 4):
        first.log(step, [("Say", f"{step}"), ("Ask", "é")])
    first.close()
    second = SampleTexts(tmp_path, resume_from=2)
    second.log(2, [("Say", "again")])  # exists: not written again
    second.log(4, [("Say", "new")])
    second.close()
    result = read(tmp_path / "samples.jsonl")
    assert [(line["iteration"], line["prompt"], line["text"]) for line in result] == [
        *((0, "Say", "0"), (0, "Ask", "é"), (2, "Say", "2"), (2, "Ask", "é"), (4, "Say", "new"))
    ]


def test_missing_tensorboard_package_is_reported_with_its_install_command(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match="`pip install tensorboard`"):
        TensorBoardLogger(tmp_path)


@pytest.fixture
def messages():
    """What is logged."""
    texts = []
    sink = loguru.logger.add(lambda message: texts.append(message.record["message"]))
    yield texts
    loguru.logger.remove(sink)


class UserLogger:
    """A user's metric logger, registered as `module:Attribute`."""

    def __init__(self, context, prefix=""):
        self.context, self.prefix, self.seen, self.closed = context, prefix, [], 0

    def log(self, step, metrics):
        self.seen.append((step, {self.prefix + name: value for name, value in metrics.items()}))
        metrics.clear()  # each logger has its own copy

    def close(self):
        self.closed += 1
        if self.prefix == "bad/":
            raise RuntimeError("cannot close")


def test_user_loggers_work_together_with_built_in_ones(tmp_path, monkeypatch, messages):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    context = MetricLoggerContext(tmp_path, run_config={"seed": 1})
    key = "test_metric_loggers:UserLogger"
    loggers = build_metric_loggers({key: {"prefix": "bad/"}, "json_lines": None}, context)
    loggers.log(1, {"loss": 1.0})
    user, shipped = loggers.loggers
    assert user.context is context
    assert user.seen == [(1, {"bad/loss": 1.0})]
    loggers.close()
    loggers.close()
    assert ["UserLogger fails: cannot close; training continues" in message for message in messages] == [True]
    assert user.closed == 1
    assert shipped._file is None
    assert read(tmp_path / "metrics.jsonl") == [{"iteration": 1, "loss": 1.0}]


@pytest.fixture
def limited_files(monkeypatch):
    """limit(size): files of this process can grow to this size, as on a disk that is full then; None: to any."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_warning_and_later_steps_are_whole_lines(tmp_path, monkeypatch, messages, limited_files):
    monkeypatch.delenv("RANK", raising=False)
    loggers = build_metric_loggers({"json_lines": None}, MetricLoggerContext(tmp_path))
    loggers.log(1, {"loss": 1.0})
    limited_files(loggers.loggers[0].path.stat().st_size + 9)
    for step in (2, 3):
        loggers.log(step, {"loss": 1.0})
    limited_files(None)
    loggers.log(4, {"loss": 1.0})
    loggers.close()
    assert [line["iteration"] for line in read(tmp_path / "metrics.jsonl")] == [1, 4]
    assert len(messages) == 1
    assert f"JsonLinesLogger ({tmp_path / 'metrics.jsonl'}) fails: File too large; training continues" in messages[0]


def test_unknown_loggers_and_options_are_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    context = MetricLoggerContext(tmp_path / "out")
    with pytest.raises(ConfigError, match="'tensorbord'; did you mean tensorboard"):
        build_metric_loggers({"tensorbord": {}}, context)
    with pytest.raises(ConfigError, match=r"metric logger 'wandb': .*'projekt'"):
        build_metric_loggers({"wandb": {"project": "a", "projekt": "b"}}, context)
    assert MetricLoggers([]).close() is None
    assert not (tmp_path / "out").exists()
