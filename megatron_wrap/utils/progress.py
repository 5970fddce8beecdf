"""Progress with the remaining time: of a run's steps on a terminal, of other long work anywhere."""

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from megatron_wrap.metrics.declared import console_text
from megatron_wrap.utils.dist_logger import logger

if TYPE_CHECKING:
    from tqdm import tqdm
    from typing_extensions import Self


class ProgressBar:
    """A tqdm bar over the steps of a run with the remaining time, on rank 0 of a terminal. Log lines appear above it.

    Args:
        total: number of steps of the run.
        initial: completed steps (of a resumed run).
        enabled: default: rank is 0 and stderr is a terminal.
    """

    def __init__(self, total: int, initial: int = 0, enabled: bool | None = None) -> None:
        self._bar: tqdm | None = None
        if enabled is None:
            enabled = logger.rank == 0 and sys.stderr is not None and sys.stderr.isatty()
        if enabled:
            from tqdm import tqdm as bar_class

            self._bar = bar_class(total=total, initial=initial, unit="step", dynamic_ncols=True, file=sys.stderr)

    @property
    def enabled(self) -> bool:
        """Whether the bar is shown."""
        return self._bar is not None

    def update(self, iteration: int, metrics: Mapping[str, float] | None = None) -> None:
        """Set the number of completed steps, and show the loss from `metrics` after the bar."""
        if self._bar is None:
            return
        if metrics and "loss" in metrics:
            self._bar.set_postfix_str(console_text("loss", metrics["loss"]) or "", refresh=False)
        self._bar.update(iteration - self._bar.n)

    def close(self) -> None:
        """Stop updating; the bar's last state stays on the screen. A second call does nothing."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
