"""Metrics as TensorBoard scalars."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_wrap.utils.dist_logger import logger
from megatron_wrap.utils.logger_errors import missing_package, refuse_unwritable


class TensorBoardLogger:
    """Writes each metric as a scalar to `output_dir/tensorboard`.

    Args:
        output_dir: created if missing.
        resume_from: iteration of the checkpoint from which the run resumes; TensorBoard discards later points. None: a
            new run; TensorBoard discards all points of earlier runs in this folder.
        rank: global rank; only rank 0 writes. Default: `logger.rank`.

    Raises:
        ConfigError: the tensorboard package is not installed, or the folder is not writable.
    """

    folder_name = "tensorboard"

    def __init__(self, output_dir: str | Path, resume_from: int | None = None, rank: int | None = None) -> None:
        self._writer: Any = None
        if (logger.rank if rank is None else rank) != 0:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_package("TensorBoard", "tensorboard") from error
        folder = Path(output_dir) / self.folder_name
        with refuse_unwritable("TensorBoard events", folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = SummaryWriter(
                str(folder), purge_step=0 if resume_from is None else resume_from + 1, flush_secs=30
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one point per metric; `iteration` is the x axis, not a metric."""
        if self._writer is None:
            return
        for name, value in metrics.items():
            if name != "iteration":
                self._writer.add_scalar(name, float(value), global_step=step)

    def close(self) -> None:
        """Flush and close the event file; a second call does nothing."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
