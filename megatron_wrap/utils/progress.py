"""A step's metrics as one line of text, and a progress bar with the remaining time on terminals."""

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from megatron_wrap.metrics.declared import console_order, console_text
from megatron_wrap.utils.dist_logger import logger

if TYPE_CHECKING:
    from tqdm import tqdm
    from typing_extensions import Self


def format_step(metrics: Mapping[str, float], train_iters: int | None = None) -> str:
    """One line with the metrics of a step or an evaluation.

    `iteration 12/100 | loss 5.1234 | grad_norm 1.02 | lr 3.0e-4 | 512 ms | 12.3k tokens/s | skipped 0`

    The flow's metrics follow the loss, in their order. Omitted: missing metrics, a loss scale of 1, less than 0.1
    TFLOP/s, memory of 0 GiB, and counts that follow from the iteration.

    Args:
        metrics: names and units as in metrics/declared.py, which also declares order and format.
        train_iters: number of steps of the run, shown after the iteration.
    """
    parts = []
    for name in console_order(metrics):
        part = console_text(name, metrics[name])
        if part is not None:
            total = "" if name != "iteration" or train_iters is None else f"/{train_iters}"
            parts.append(part + total)
    return " | ".join(parts)


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
