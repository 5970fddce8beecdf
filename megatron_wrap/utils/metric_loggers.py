"""Metric loggers: the protocol, the built-in loggers, and the registry for others.

    from megatron_wrap.utils.metric_loggers import MetricLoggerEntry

    @MetricLoggerEntry.register("my_service")
    class MyLogger:
        def __init__(self, context, **options): ...
        def log(self, step, metrics): ...
        def close(self): ...

An installed package can register one through the entry point group `megatron_wrap.metric_loggers`, and a YAML can name
`my_package.my_module:MyLogger`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from megatron_wrap.errors import ConfigError
from megatron_wrap.registry import Registry
from megatron_wrap.utils.atomic_write import named_write_errors
from megatron_wrap.utils.dist_logger import logger
from megatron_wrap.utils.json_lines_logger import JsonLinesLogger
from megatron_wrap.utils.logger_errors import WRITABLE, ToleratedErrors, missing_package
from megatron_wrap.utils.wandb_logger import WandbLogger


@runtime_checkable
class MetricLogger(Protocol):
    """Receives global metrics, on rank 0."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of iteration `step`; may be called twice for a step (training and evaluation)."""

    def close(self) -> None:
        """Stop recording; a second call must do nothing."""


@dataclass(frozen=True)
class MetricLoggerContext:
    """Information about the run for metric loggers."""

    output_dir: Path
    """Output folder of the run."""
    run_config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved configuration tree, without secrets."""
    resume_from: int | None = None
    """Iteration of the checkpoint from which the run resumes; None for a new run."""


MetricLoggerFactory = Callable[..., MetricLogger]
"""Function that creates a logger, called as `factory(context, **options)` with the options from the YAML."""

MetricLoggerEntry: Registry[MetricLoggerFactory] = Registry(
    "metric logger",
    "megatron_wrap.metric_loggers",
    {
        "json_lines": f"{__name__}:_json_lines",
        "tensorboard": f"{__name__}:_tensorboard",
        "wandb": f"{__name__}:_wandb",
    },
)


class TensorBoardLogger:
    """Writes each metric as a scalar.

    Args:
        folder: folder of the events; created if missing.
        resume_from: iteration of the checkpoint from which the run resumes; TensorBoard discards later points. None: a
            new run; TensorBoard discards all points of earlier runs in this folder.
        log_interval: steps are written every `log_interval` iterations, evaluations always.
        queue_size: largest number of points in memory; further points are written.

    Raises:
        ConfigError: the tensorboard package is not installed, or the folder is not writable.
    """

    def __init__(
        self,
        folder: str | Path,
        resume_from: int | None = None,
        log_interval: int = 1,
        queue_size: int = 1000,
    ) -> None:
        self._log_interval = log_interval
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_package("TensorBoard", "tensorboard") from error
        folder = Path(folder)
        with named_write_errors(folder, WRITABLE):
            folder.mkdir(parents=True, exist_ok=True)
            purge_step = 0 if resume_from is None else resume_from + 1
            self._writer = SummaryWriter(str(folder), purge_step=purge_step, max_queue=queue_size, flush_secs=30)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one point per metric; `iteration` is the x axis, not a metric."""
        of_training = not all(name.startswith("eval/") for name in metrics if name != "iteration")
        if of_training and step % self._log_interval:
            return
        for name, value in metrics.items():
            if name != "iteration":
                self._writer.add_scalar(name, float(value), global_step=step)

    def close(self) -> None:
        """Flush and close the event file; a second call does nothing."""
        self._writer.close()


class MetricLoggers:
    """A list of metric loggers with their interface; empty on ranks other than 0."""

    def __init__(self, loggers: Sequence[MetricLogger]) -> None:
        self.loggers = list(loggers)
        self._errors = ToleratedErrors()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Pass a copy of the metrics to each logger; the first error of each is a warning."""
        for metric_logger in self.loggers:
            with self._errors.of(_name(metric_logger)):
                metric_logger.log(step, dict(metrics))

    def close(self) -> None:
        """Close all loggers, even if one fails, which is logged as a warning; a second call does nothing."""
        loggers, self.loggers = self.loggers, []
        for metric_logger in loggers:
            with self._errors.of(_name(metric_logger)):
                metric_logger.close()


def _name(metric_logger: MetricLogger) -> str:
    path = getattr(metric_logger, "path", None)
    return f"metric logger {type(metric_logger).__name__}" + (f" ({path})" if isinstance(path, Path) else "")


def build_metric_loggers(
    selected: Mapping[str, Mapping[str, Any] | None], context: MetricLoggerContext
) -> MetricLoggers:
    """Build the metric loggers of a run.

    Args:
        selected: key of `MetricLoggerEntry` (or `module:Attribute`) -> options.
        context: passed to each logger.

    Returns:
        All loggers on rank 0; none on other ranks, which therefore do not import the loggers' packages.

    Raises:
        ConfigError: an unknown key, unknown options, or an error of the logger itself. Loggers that were already built
            are closed.
    """
    built = MetricLoggers([])
    if logger.rank != 0:
        return built
    try:
        for key, options in selected.items():
            built.loggers.append(_build(key, context, options or {}))
    except BaseException:
        built.close()
        raise
    return built


def _build(key: str, context: MetricLoggerContext, options: Mapping[str, Any]) -> MetricLogger:
    factory = MetricLoggerEntry.resolve(key)
    try:
        inspect.signature(factory).bind(context, **options)
    except TypeError as error:
        raise ConfigError(f"invalid options of metric logger {key!r}: {error}") from error
    return factory(context, **options)


def _json_lines(context: MetricLoggerContext) -> MetricLogger:
    return JsonLinesLogger(context.output_dir, context.resume_from)


def _tensorboard(
    context: MetricLoggerContext, folder: str | Path | None = None, log_interval: int = 1, queue_size: int = 1000
) -> MetricLogger:
    chosen = context.output_dir / "tensorboard" if folder is None else folder
    return TensorBoardLogger(chosen, context.resume_from, log_interval=log_interval, queue_size=queue_size)


def _wandb(context: MetricLoggerContext, project: str, name: str | None = None) -> MetricLogger:
    return WandbLogger(project, name, context.run_config, context.output_dir, context.resume_from)
