"""Where the numbers of a step go: the protocol of a metric logger, the shipped ones, and how others are added.

    from megatron_wrap.utils.metric_loggers import MetricLoggerEntry

    @MetricLoggerEntry.register("my_service")
    class MyLogger:
        def __init__(self, context, **options): ...
        def log(self, step, metrics): ...
        def close(self): ...

An installed package may offer one through the entry point group `megatron_wrap.metric_loggers`, and a YAML may name
`my_package.my_module:MyLogger`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from megatron_wrap.errors import ConfigError
from megatron_wrap.registry import Registry
from megatron_wrap.utils.dist_logger import logger
from megatron_wrap.utils.json_lines_logger import JsonLinesLogger
from megatron_wrap.utils.tensorboard_logger import TensorBoardLogger
from megatron_wrap.utils.wandb_logger import WandbLogger

__all__ = [
    "JsonLinesLogger",
    "MetricLogger",
    "MetricLoggerContext",
    "MetricLoggerEntry",
    "MetricLoggers",
    "TensorBoardLogger",
    "WandbLogger",
    "build_metric_loggers",
]


@runtime_checkable
class MetricLogger(Protocol):
    """Receives global metrics, on rank 0."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Records the metrics of iteration `step`; a step may come twice (its training and its evaluation)."""

    def close(self) -> None:
        """Ends the recording; a second call must do nothing."""


@dataclass(frozen=True)
class MetricLoggerContext:
    """What a metric logger may need to know of the run."""

    output_dir: Path
    """Folder of the run's files."""
    run_config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved configuration tree."""
    resume_from: int | None = None
    """Iteration of the checkpoint that the run goes on from; None for a run from the start."""


MetricLoggerFactory = Callable[..., MetricLogger]
"""Called as `factory(context, **options)` with the options of the YAML."""

MetricLoggerEntry: Registry[MetricLoggerFactory] = Registry(
    "metric logger",
    "megatron_wrap.metric_loggers",
    {
        "json_lines": f"{__name__}:_json_lines",
        "tensorboard": f"{__name__}:_tensorboard",
        "wandb": f"{__name__}:_wandb",
    },
)


class MetricLoggers:
    """Several metric loggers as one; empty on every rank but 0."""

    def __init__(self, loggers: Sequence[MetricLogger]) -> None:
        self.loggers = list(loggers)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Hands a copy of the metrics to each logger."""
        for metric_logger in self.loggers:
            metric_logger.log(step, dict(metrics))

    def close(self) -> None:
        """Closes each logger, also when one fails, and then raises the first failure; a second call does nothing."""
        loggers, self.loggers = self.loggers, []
        failures = []
        for metric_logger in loggers:
            try:
                metric_logger.close()
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]


def build_metric_loggers(
    selected: Mapping[str, Mapping[str, Any] | None], context: MetricLoggerContext
) -> MetricLoggers:
    """The metric loggers of a run.

    Args:
        selected: key of `MetricLoggerEntry` (or `module:Attribute`) -> its options.
        context: handed to each.

    Returns:
        All of them on rank 0, none on other ranks (which therefore never import what a logger needs).

    Raises:
        ConfigError: an unknown key, options that the logger does not take, or what the logger itself raises; the
            loggers made before it are closed.
    """
    if logger.rank != 0:
        return MetricLoggers([])
    made = MetricLoggers([])
    try:
        for key, options in selected.items():
            factory = MetricLoggerEntry.resolve(key)
            made.loggers.append(_make(key, factory, context, dict(options or {})))
    except BaseException:
        made.close()
        raise
    return made


def _make(
    key: str, factory: MetricLoggerFactory, context: MetricLoggerContext, options: dict[str, Any]
) -> MetricLogger:
    try:
        inspect.signature(factory).bind(context, **options)
    except TypeError as error:
        raise ConfigError(f"metric logger {key!r} does not take these options: {error}") from error
    return factory(context, **options)


def _json_lines(context: MetricLoggerContext) -> MetricLogger:
    return JsonLinesLogger(context.output_dir, context.resume_from)


def _tensorboard(context: MetricLoggerContext) -> MetricLogger:
    return TensorBoardLogger(context.output_dir, context.resume_from)


def _wandb(context: MetricLoggerContext, project: str, name: str | None = None) -> MetricLogger:
    return WandbLogger(project, name, context.run_config, context.output_dir, context.resume_from)
