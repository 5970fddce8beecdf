"""Progress with the remaining time: of a run's steps on a terminal, of other long work anywhere."""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_wrap.metrics.declared import console_text
from megatron_wrap.metrics.number_format import counted, with_prefix
from megatron_wrap.utils.dist_logger import logger

if TYPE_CHECKING:
    from tqdm import tqdm

Item = TypeVar("Item")
_SECONDS_BETWEEN_LINES = 10.0


def _has_terminal() -> bool:
    return logger.rank == 0 and sys.stderr is not None and sys.stderr.isatty()


def _bar(**arguments: Any) -> "tqdm":
    """A tqdm bar on stderr, as wide as the terminal; a pseudo-terminal may report a width of 0, with which tqdm shows
    nothing."""
    from tqdm import tqdm as bar_class

    with contextlib.suppress(OSError):
        if os.get_terminal_size(sys.stderr.fileno()).columns > 0:
            return bar_class(**arguments, dynamic_ncols=True, file=sys.stderr)
    return bar_class(**arguments, ncols=shutil.get_terminal_size().columns, file=sys.stderr)


class ProgressBar:
    """A tqdm bar over the steps of a run with the remaining time, on rank 0 of a terminal. Log lines appear above it.

    Args:
        total: number of steps of the run.
        initial: completed steps (of a resumed run).
    """

    def __init__(self, total: int, initial: int = 0) -> None:
        self._bar: tqdm | None = None
        if _has_terminal():
            self._bar = _bar(total=total, initial=initial, unit="step")

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


class WorkProgress(contextlib.AbstractContextManager["WorkProgress"]):
    """Progress of long work on rank 0, with the remaining time: on a terminal a bar, which disappears at the end, else
    a log line every 10 seconds.

    Args:
        work: its name, such as "precompute".
        total: of the units; None: it is not known, and neither is the remaining time.
        unit: in the singular, such as "sample"; "B": bytes, shown with a prefix.
        any_rank: the work is done by one rank, which may be another than rank 0 and logs it.
    """

    def __init__(self, work: str, total: int | None, unit: str, any_rank: bool = False) -> None:
        self._log = logger.info_all_ranks if any_rank else logger.info_rank_0
        self._work, self._total, self._unit = work, total, unit
        self._done, self._started = 0, time.monotonic()
        self._reported = self._started
        self._bar: tqdm | None = None
        if _has_terminal():
            self._bar = _bar(total=total, desc=work, unit=unit, unit_scale=unit == "B", leave=False)

    def advance(self, count: int = 1) -> None:
        """Add units that are done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() - self._reported >= _SECONDS_BETWEEN_LINES:
            self._reported = time.monotonic()
            self._log(self._line())

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()

    def _line(self) -> str:
        def amount(count: int) -> str:
            return f"{with_prefix(count)}B" if self._unit == "B" else counted(count, self._unit)

        if self._total is None:
            return f"{self._work}: {amount(self._done)}"
        done = f"{self._done:,}" if self._unit != "B" else amount(self._done)
        left = (time.monotonic() - self._started) / max(self._done, 1) * (self._total - self._done)
        return f"{self._work}: {done} of {amount(self._total)}, {timedelta(seconds=round(left))} left"

    def __exit__(self, *_: object) -> None:
        self.close()


def tracked(items: Iterable[Item], work: str, total: int | None, unit: str, any_rank: bool = False) -> Iterator[Item]:
    """The items, with a `WorkProgress` that counts those that are done."""
    with WorkProgress(work, total, unit, any_rank) as progress:
        for item in items:
            yield item
            progress.advance()
