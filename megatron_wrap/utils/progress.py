"""Progress with the remaining time, by tqdm: of a run's steps on a terminal, and of other long work anywhere."""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_wrap.metrics.declared import console_text
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.utils.dist_logger import logger

if TYPE_CHECKING:
    from tqdm import tqdm

Item = TypeVar("Item")
_SECONDS_BETWEEN_LINES = 10.0


def _has_terminal() -> bool:
    return logger.rank == 0 and sys.stderr is not None and sys.stderr.isatty()


def _bar(**arguments: Any) -> "tqdm":
    """A bar of tqdm without its monitor thread, which a process that forks must not have."""
    from tqdm import tqdm

    class Bar(tqdm):
        monitor_interval = 0

    return Bar(**arguments)


def _terminal_bar(**arguments: Any) -> "tqdm":
    """A bar on stderr, as wide as the terminal; a pseudo-terminal may report a width of 0, with which tqdm shows
    nothing."""
    with contextlib.suppress(OSError):
        if os.get_terminal_size(sys.stderr.fileno()).columns > 0:
            return _bar(**arguments, dynamic_ncols=True, file=sys.stderr)
    return _bar(**arguments, ncols=shutil.get_terminal_size().columns, file=sys.stderr)


class ProgressBar:
    """A tqdm bar over the steps of a run with the remaining time, on rank 0 of a terminal. Log lines appear above it.

    Args:
        total: number of steps of the run.
        initial: completed steps (of a resumed run).
    """

    def __init__(self, total: int, initial: int = 0) -> None:
        self._bar = _terminal_bar(total=total, initial=initial, unit="step") if _has_terminal() else None

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


class _LogLines:
    """A file that logs the lines of a bar without a terminal."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log

    def write(self, text: str) -> None:
        if text.strip():
            self._log(text.strip())

    def flush(self) -> None:
        """Do nothing: lines are logged at once."""


class WorkProgress(contextlib.AbstractContextManager["WorkProgress"]):
    """Progress of long work on rank 0, with the remaining time: on a terminal a bar, which disappears at the end, else
    a log line every 10 seconds.

    Args:
        work: name of the work, such as "precompute".
        total: number of units; None: it is not known, and neither is the remaining time.
        unit: name of a unit in the singular, such as "sample"; "B": bytes, shown with a prefix.
        any_rank: whether one rank, which may not be rank 0, does and logs the work.
    """

    def __init__(self, work: str, total: int | None, unit: str, any_rank: bool = False) -> None:
        scaled = unit == "B"
        common: dict[str, Any] = {"total": total, "desc": work, "unit": unit, "unit_scale": scaled, "leave": False}
        if _has_terminal():
            self._bar = _terminal_bar(**common)
            return
        done, of_total = ("{n_fmt}B", "{total_fmt}B") if scaled else ("{n:,}", "{total:,}")
        of_total = "" if total is None else f" of {of_total}"
        units = "" if scaled else " " + counted(0, unit).partition(" ")[2]
        self._bar = _bar(
            **common,
            file=_LogLines(logger.info_all_ranks if any_rank else logger.info_rank_0),
            bar_format=f"{{desc}}: {done}{of_total}{units}" + ("" if total is None else ", {remaining} left"),
            mininterval=_SECONDS_BETWEEN_LINES,
            delay=_SECONDS_BETWEEN_LINES,
            miniters=1,
            smoothing=0,
            position=0,
        )

    def advance(self, count: int = 1) -> None:
        """Add a number of units that are done."""
        self._bar.update(count)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def tracked(items: Iterable[Item], work: str, total: int | None, unit: str, any_rank: bool = False) -> Iterator[Item]:
    """The items, with a `WorkProgress` that counts those that are done."""
    with WorkProgress(work, total, unit, any_rank) as progress:
        for item in items:
            yield item
            progress.advance()
