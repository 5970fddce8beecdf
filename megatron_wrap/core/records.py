"""Records of a run: each step and evaluation to the metric loggers, the console and the progress bar, and its
description in run.json."""

from __future__ import annotations

import datetime
import json
import os
import platform as host
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_wrap.bridge.export.model_card import package_versions
from megatron_wrap.checkpoint.saved_tensors import layout_record
from megatron_wrap.config import RunConfig
from megatron_wrap.config.reading.yaml_nodes import inline_yaml
from megatron_wrap.config.schema import derived
from megatron_wrap.engine.state.state import StepReport, TrainingState
from megatron_wrap.errors import DataError, TrainingError
from megatron_wrap.hidden_secrets import without_secrets
from megatron_wrap.profiling.step_profiler import StepProfiler
from megatron_wrap.report.run_files import RUN_JSON, read_run_files
from megatron_wrap.utils.atomic_write import named_write_errors, write_atomically
from megatron_wrap.utils.console_lines import MAX_LENGTH, ConsoleLines
from megatron_wrap.utils.dist_logger import logger
from megatron_wrap.utils.json_lines_logger import SampleTexts
from megatron_wrap.utils.logger_errors import WRITABLE, ToleratedErrors
from megatron_wrap.utils.metric_loggers import MetricLoggerContext, MetricLoggers, build_metric_loggers
from megatron_wrap.utils.progress import ProgressBar

_PROMPT_LENGTH = 50
"""Largest number of characters of a prompt on the console."""


class RunRecords:
    """Receives each step and each evaluation of a run; nothing is written before `open`.

    Args:
        config: the run's configuration in force.
        flow_metrics: the flow's `console_metrics`.
    """

    def __init__(self, config: RunConfig, flow_metrics: Sequence[str]) -> None:
        self._config = config
        self._lines = ConsoleLines(config.train.train_iters, config.logger.console_metrics, flow_metrics)
        self._output_dir = Path(derived.output_dir(config))
        self._metric_loggers = MetricLoggers([])
        self._progress_bar: ProgressBar | None = None
        self._last: StepReport | None = None
        self._recorded_iteration: int | None = None
        self._is_rewound = False
        self._profiler: StepProfiler | None = None
        self._texts: SampleTexts | None = None
        self._text_errors = ToleratedErrors()
        self.last_evaluation: tuple[int, dict[str, float]] | None = None
        """(iteration, metrics as SET/METRIC -> value) of the last evaluation; None before the first."""

    def open(self, iteration: int, resumed_from: int | None, profiler: StepProfiler | None = None) -> None:
        """Start the metric loggers that the configuration selects, and the progress bar.

        Args:
            iteration: number of steps already taken.
            resumed_from: iteration of the checkpoint that the run resumes from; later iterations are recorded again.
            profiler: profiler of `megatron_wrap.profile`, which `close` closes; None: nothing is profiled.
        """
        self._profiler = profiler
        settings = self._config.logger
        selected: dict[str, Mapping[str, Any] | None] = {"json_lines": None}
        events = derived.tensorboard_dir(self._config)
        if events is not None:
            selected["tensorboard"] = {
                "folder": events,
                "log_interval": settings.tensorboard_log_interval,
                "queue_size": settings.tensorboard_queue_size,
            }
        if settings.enable_wandb:
            selected["wandb"] = {
                "project": settings.wandb_project or "megatron-wrap",
                "name": settings.wandb_name or self._config.name,
            }
        selected |= dict.fromkeys(settings.metric_loggers)
        context = MetricLoggerContext(self._output_dir, without_secrets(self._config.resolved), resumed_from)
        self._metric_loggers = build_metric_loggers(selected, context)
        if self._config.train.sample_prompts:
            self._texts = SampleTexts(self._output_dir, resumed_from)
        if settings.progress_bar:
            self._progress_bar = ProgressBar(derived.train_iters(self._config), iteration)

    def rewind(self, iteration: int) -> None:
        """Continue after `iteration` steps, like a run that resumes from there: later records are removed."""
        self._close_loggers()
        self._last = self._recorded_iteration = None
        self._is_rewound = True
        self.open(iteration, iteration, self._profiler)

    def step_taken(self, report: StepReport) -> None:
        """Keep the report of the last step. Collective after the last step of a range of profiled steps."""
        self._last = report
        if self._profiler is not None:
            self._profiler.step_ends(report.iteration, report.metrics)

    def write_last(self) -> None:
        """Write the last step once: to the metric loggers, and to the console every `log_interval` iterations."""
        report, train = self._last, self._config.train
        if report is None or report.iteration == self._recorded_iteration:
            return
        if self._recorded_iteration is None:
            for warning in self._lines.unmatched(report.metrics):
                logger.warning_rank_0(warning)
        self._recorded_iteration = report.iteration
        self._metric_loggers.log(report.iteration, report.metrics)
        if report.iteration % train.log_interval == 0 or report.iteration == train.train_iters:
            logger.info_rank_0(self._lines.step(report.metrics, report.is_trained))

    def log_last(self) -> None:
        """Write the last step (see `write_last`), and advance the progress bar.

        Raises:
            TrainingError: no step has been taken.
        """
        if self._last is None and self._is_rewound:
            return
        if self._last is None:
            raise TrainingError("wrap.log_last_metrics: no step has been taken yet; call wrap.train(batch) first")
        if self._progress_bar is not None:
            self._progress_bar.update(self._last.iteration, self._last.metrics if self._last.is_trained else None)
        self.write_last()

    def evaluation(self, iteration: int, metrics: dict[str, float]) -> None:
        """Write the metrics of an evaluation after `iteration` steps."""
        self.last_evaluation = iteration, {name.removeprefix("eval/"): value for name, value in metrics.items()}
        self._metric_loggers.log(iteration, metrics)
        for line in self._lines.evaluation(iteration, metrics):
            logger.info_rank_0(line)

    def sample_texts(self, iteration: int, texts: Sequence[tuple[str, str]]) -> None:
        """Write completions, each as (prompt, text), after `iteration` steps: to samples.jsonl, and their beginnings to
        the console."""
        for prompt, text in texts:
            head = f"iteration {iteration}, sample of {_shortened(repr(prompt), _PROMPT_LENGTH)}: "
            logger.info_rank_0(head + _shortened(repr(text), MAX_LENGTH - len(head)))
        if self._texts is not None:
            with self._text_errors.of(str(self._texts.path)):
                self._texts.log(iteration, texts)

    def close(self) -> None:
        """Close profiler, loggers and progress bar."""
        if self._profiler is not None:
            self._profiler.close()
        self._close_loggers()

    def _close_loggers(self) -> None:
        if self._progress_bar is not None:
            self._progress_bar.close()
        if self._texts is not None:
            self._texts.close()
        self._metric_loggers.close()


def _shortened(quoted: str, length: int) -> str:
    return quoted if len(quoted) <= length else f"{quoted[: length - 4]}...{quoted[-1]}"


def write_run_json(state: TrainingState, output_dir: Path, resumed_from: int | None) -> None:
    """Write `output_dir/run.json` on rank 0: name, flow, layout, environment, folder of the checkpoints, and each value
    of the configuration with its origin. A resumed run replaces it.

    Args:
        resumed_from: iteration of the checkpoint that the run resumes from.

    Raises:
        ConfigError: the file cannot be written.
    """
    if logger.rank != 0:
        return
    config, parallel = state.config, state.parallel
    description = {
        "name": config.name,
        "flow": config.flow.flow_key,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "resumed_from": resumed_from,
        "train_iters": config.train.train_iters,
        "checkpoints": None if config.train.save is None else os.path.abspath(os.path.expanduser(config.train.save)),
        "layout": layout_record(parallel, state.platform.name),
        "processes": parallel.world.size,
        "environment": _environment(state),
    }
    values = [[path, value, str(config.origins[path])] for path, value in _values(config).items()]
    path = output_dir / RUN_JSON
    with named_write_errors(path, WRITABLE):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, _json(description, values))


def _json(description: Mapping[str, Any], values: Sequence[list[str]]) -> str:
    """The description as JSON, with a line for each value of the configuration. The values are encoded without an
    indent, which json does in C."""
    text = json.dumps(description, indent=1, ensure_ascii=False).removesuffix("\n}")
    lines = ",\n  ".join(json.dumps(value, ensure_ascii=False) for value in values)
    return f'{text},\n "configuration": [\n  {lines}\n ]\n}}\n'


def _values(config: RunConfig) -> dict[str, str]:
    """Dotted path of each value with a known origin -> the value as YAML, without secrets."""
    values, resolved = {}, without_secrets(config.resolved)
    for path in config.origins:
        value: Any = resolved
        for part in path.split("."):
            value = value.get(part, KeyError) if isinstance(value, Mapping) else KeyError
        if value is not KeyError:
            values[path] = inline_yaml(value)
    return values


def _environment(state: TrainingState) -> dict[str, str]:
    """Names and versions of this process's machine and packages."""
    device = state.platform.device
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else host.machine()
    return {
        "platform": state.platform.name,
        "device": device_name,
        "host": host.node(),
        "system": host.platform(),
        "python": host.python_version(),
        **package_versions(),
    }


def recorded_evaluation(output_dir: str, iteration: int) -> tuple[int, Mapping[str, float]] | None:
    """Iteration and metrics, SET/METRIC -> value, of the last evaluation up to `iteration` in a run's records; None if
    there is none, or the records were moved."""
    try:
        evaluations = read_run_files(output_dir).evaluations
    except DataError:
        return None
    before = [evaluated for evaluated in evaluations if evaluated <= iteration]
    return (before[-1], evaluations[before[-1]]) if before else None
