"""Reporting of a run's steps: metric loggers, the console line, the progress bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wrap.bridge.adapters.run_adapter import run_adapter
from megatron_wrap.bridge.adapters.trained_parameters import describe_adapter
from megatron_wrap.config import RunConfig
from megatron_wrap.config.schema import derived
from megatron_wrap.errors import TrainingError
from megatron_wrap.hidden_secrets import without_secrets
from megatron_wrap.utils.console_lines import MAX_LENGTH, ConsoleLines
from megatron_wrap.utils.dist_logger import logger
from megatron_wrap.utils.json_lines_logger import SampleTexts
from megatron_wrap.utils.logger_errors import ToleratedErrors
from megatron_wrap.utils.metric_loggers import MetricLoggerContext, MetricLoggers, build_metric_loggers
from megatron_wrap.utils.progress import ProgressBar

if TYPE_CHECKING:
    from megatron_wrap.engine.state.state import StepReport, TrainingState
    from megatron_wrap.profiling.step_profiler import StepProfiler


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


def describe_model(state: TrainingState) -> None:
    """Log the flow and the size of the model, and each weight with `show_weight_details`."""
    local = sum(parameter.numel() for chunk in state.chunks for parameter in chunk.parameters())
    logger.info_rank_0(f"{state.flow}; {local:,} parameters on rank 0")
    adapter = run_adapter(state.config, state.shape.vocab_size)
    if adapter is not None:
        logger.info_rank_0(describe_adapter(adapter, state.shape.vocab_size))
    if state.config.model_provider.show_weight_details:
        from megatron_wrap.model.chunks import weight_lines

        for line in weight_lines(state.chunks):
            logger.info_all_ranks(line)
