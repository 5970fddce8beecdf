"""Metrics as TensorBoard scalars."""

from collections.abc import Mapping
from pathlib import Path

from megatron_wrap.utils.atomic_write import named_write_errors
from megatron_wrap.utils.logger_errors import WRITABLE, missing_package


class TensorBoardLogger:
    """Writes each metric as a scalar.

    Args:
        folder: of the events; created if missing.
        resume_from: iteration of the checkpoint from which the run resumes; TensorBoard discards later points. None: a
            new run; TensorBoard discards all points of earlier runs in this folder.
        log_interval: steps are written every `log_interval` iterations, evaluations always.
        queue_size: largest number of points in memory; more are written.

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
