"""The text log of a distributed run, on loguru: `logger.info_rank_0("...")`, `logger.debug_all_ranks("...")`.

Importing this module adds no sink and removes none. An entry point calls `configure_console`, usually through
`megatron_wrap.utils.session.LoggerSession`; until then records go wherever the host program sends loguru's.
"""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from loguru import logger as _loguru

from megatron_wrap.errors import ConfigError

if TYPE_CHECKING:
    from loguru import Message, Record

LEVELS = ("TRACE", "DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR", "CRITICAL")
"""Legal values of CONSOLE_LOG_LEVEL: loguru's own levels, lowest first."""


class DistLogger:
    """`(error|warning|info|debug)_(rank_0|all_ranks)(message, *args, **kwargs)`.

    The message is formatted with `str.format` when arguments are given, as loguru does. Lines of `_rank_0` come from
    global rank 0 only and cost one comparison elsewhere; lines of `_all_ranks` carry the rank.
    """

    def __init__(self) -> None:
        self._rank: int | None = None

    @property
    def rank(self) -> int:
        """Global rank of this process: the one given to `set_rank`, else torchrun's RANK, else 0."""
        if self._rank is not None:
            return self._rank
        value = os.environ.get("RANK", "")
        return int(value) if value.isdecimal() else 0

    def set_rank(self, rank: int | None) -> None:
        """Fixes the global rank of this process (for processes started without RANK); None: follow RANK again."""
        self._rank = rank

    def error_rank_0(self, message: str, *args: Any, **kwargs: Any) -> None:
        """Log a line at level ERROR on global rank 0; other ranks do nothing."""
        self._write("ERROR", False, message, args, kwargs)

    def error_all_ranks(self, message: str, *args: Any, **kwargs: Any) -> None:
        """Log a line at level ERROR on this rank, marked with its number."""
        self._write("ERROR", True, message, args, kwargs)

    def warning_rank_0(self, message: str, *args: Any, **kwargs: Any) -> None:
        """Log a line at level WARNING on global rank 0; other ranks do nothing."""
        self._write("WARNING", False, message, args, kwargs)

    def warning_all_ranks(self, message: str, *args: Any, **kwargs: Any) -> None:
        """Log a line at level WARNING on this rank, marked with its number."""
        self._write("WARNING", True, message, args, kwargs)

    def info_rank_0(self, message: str, *args: Any, **kwargs: Any) -> None:
        """Log a line at level INFO on global rank 0; other ranks do nothing."""
        self._write("INFO", False, message, args, kwargs)

    def info_all_ranks(self, message: str, *args: Any, **kwargs: Any) -> None:
        """Log a line at level INFO on this rank, marked with its number."""
        self._write("INFO", True, message, args, kwargs)

    def debug_rank_0(self, message: str, *args: Any, **kwargs: Any) -> None:
        """Log a line at level DEBUG on global rank 0; other ranks do nothing."""
        self._write("DEBUG", False, message, args, kwargs)

    def debug_all_ranks(self, message: str, *args: Any, **kwargs: Any) -> None:
        """Log a line at level DEBUG on this rank, marked with its number."""
        self._write("DEBUG", True, message, args, kwargs)

    def _write(
        self, level: str, all_ranks: bool, message: str, args: tuple[Any, ...], kwargs: dict[str, Any], above: int = 1
    ) -> None:
        """`above` counts the frames between this one and the line that the record should name, less one."""
        if all_ranks:
            _loguru.bind(rank=self.rank).opt(depth=above + 1).log(level, message, *args, **kwargs)
        elif self.rank == 0:
            _loguru.opt(depth=above + 1).log(level, message, *args, **kwargs)


logger = DistLogger()


class _Consoles:
    """The console sinks asked for, innermost last; only the innermost is live, so no line appears twice."""

    def __init__(self) -> None:
        self._levels: list[tuple[object, str]] = []
        self._sink: int | None = None
        self._default_sink = 0  # the one on stderr that loguru itself starts with
        self._removed_default = False

    def push(self, level: str) -> Callable[[], None]:
        token = object()
        self._levels.append((token, level))
        self._refresh()

        def undo() -> None:
            kept = [entry for entry in self._levels if entry[0] is not token]
            if len(kept) != len(self._levels):
                self._levels = kept
                self._refresh()

        return undo

    def _refresh(self) -> None:
        if self._sink is not None:
            _remove(self._sink)
            self._sink = None
        if self._levels:
            # Only loguru's default gives way; sinks that the host program added stay.
            self._removed_default = _remove(self._default_sink) or self._removed_default
            self._sink = _add_console(self._levels[-1][1])
        elif self._removed_default:
            self._removed_default = False
            if sys.stderr is not None:
                self._default_sink = _loguru.add(sys.stderr)


_consoles = _Consoles()


def configure_console(level: str | None = None) -> Callable[[], None]:
    """Sends loguru's records to this process's stderr in our format, in place of loguru's default sink.

    Sinks that the host program added itself stay as they are. For entry points and `initialize()` only.

    Args:
        level: lowest level shown; default: CONSOLE_LOG_LEVEL of the environment, else INFO. At DEBUG and below each
            line also names the file and line that wrote it.

    Returns:
        A function that takes our sink away and puts loguru's default one back where it was taken; calling it twice
        is harmless. Calls may nest: the innermost console that is not undone is the live one.

    Raises:
        ConfigError: the level is none of `LEVELS`.
    """
    chosen = level or os.environ.get("CONSOLE_LOG_LEVEL") or "INFO"
    if chosen.upper() not in LEVELS:
        where = "console log level" if level else "CONSOLE_LOG_LEVEL"
        raise ConfigError(f"{where} {chosen!r} is unknown; choose one of {', '.join(LEVELS)}")
    return _consoles.push(chosen.upper())


def _add_console(level: str) -> int:
    show_source = LEVELS.index(level) <= LEVELS.index("DEBUG")

    def line_format(record: "Record") -> str:
        rank = "[rank {extra[rank]}] " if "rank" in record["extra"] else ""
        source = "<cyan>{file}:{line}</cyan> " if show_source else ""
        return (
            f"<dim>{{time:MM-DD HH:mm:ss}}</dim> <level>{{level:<7}}</level> {source}{rank}{{message}}\n{{exception}}"
        )

    colour = sys.stderr is not None and sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    return _loguru.add(
        _write_to_stderr, level=level, format=line_format, colorize=colour, backtrace=False, diagnose=False
    )


def _write_to_stderr(message: "Message") -> None:
    """One write for each record, to the stderr of that moment, above any progress bar that tqdm is drawing."""
    stream = sys.stderr
    if stream is None:
        return
    bar_class = getattr(sys.modules.get("tqdm"), "tqdm", None)  # no bar can exist where tqdm was never imported
    if bar_class is not None:
        bar_class.write(str(message), file=stream, end="")
    else:
        stream.write(str(message))
    stream.flush()


def _remove(sink: int) -> bool:
    try:
        _loguru.remove(sink)
    except ValueError:  # the host program removed it already
        return False
    return True
