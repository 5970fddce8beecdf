"""Text logging for distributed runs, with loguru: `logger.info_rank_0("...")`, `logger.debug_all_ranks("...")`.

Importing this module does not change loguru's sinks. An entry point calls `configure_console`, usually through
`megatron_wrap.utils.session.logger_session`; before that, messages go to the sinks of the host program.
"""

import os
import sys
from collections.abc import Callable
from functools import partialmethod
from typing import TYPE_CHECKING, Any

from loguru import logger as _loguru

from megatron_wrap.errors import ConfigError
from megatron_wrap.hidden_secrets import hide_secrets

if TYPE_CHECKING:
    from loguru import Message, Record

_ERASE_LINE = "\r\x1b[K"
LEVELS = ("TRACE", "DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR", "CRITICAL")
"""Valid values of CONSOLE_LOG_LEVEL: loguru's levels, lowest first."""


class DistLogger:
    """`(error|warning|info|debug)_(rank_0|all_ranks)(message, *args, **kwargs)`.

    With arguments, the message is formatted with `str.format`, as in loguru. `_rank_0` methods log on global rank 0 and
    cost one comparison on other ranks; `_all_ranks` methods add the rank to the line. An argument for the message
    cannot be named `depth`.
    """

    def __init__(self) -> None:
        self._rank: int | None = None

    @property
    def rank(self) -> int:
        """Global rank of this process: from `set_rank`, else torchrun's RANK, else 0."""
        if self._rank is not None:
            return self._rank
        value = os.environ.get("RANK", "")
        return int(value) if value.isdecimal() else 0

    def set_rank(self, rank: int | None) -> None:
        """Set the global rank of this process, for processes started without RANK; None: use RANK again."""
        self._rank = rank

    def _write(self, level: str, all_ranks: bool, message: str, *args: Any, depth: int = 1, **kwargs: Any) -> None:
        """`depth` is the number of stack frames between this one and the caller to report."""
        if all_ranks:
            _loguru.bind(rank=self.rank).opt(depth=depth).log(level, message, *args, **kwargs)
        elif self.rank == 0:
            _loguru.opt(depth=depth).log(level, message, *args, **kwargs)

    error_rank_0 = partialmethod(_write, "ERROR", False)
    error_all_ranks = partialmethod(_write, "ERROR", True)
    warning_rank_0 = partialmethod(_write, "WARNING", False)
    warning_all_ranks = partialmethod(_write, "WARNING", True)
    info_rank_0 = partialmethod(_write, "INFO", False)
    info_all_ranks = partialmethod(_write, "INFO", True)
    debug_rank_0 = partialmethod(_write, "DEBUG", False)
    debug_all_ranks = partialmethod(_write, "DEBUG", True)


logger = DistLogger()


class _ConsoleStack:
    """Nested console configurations; only the innermost (last) has a sink, so no line appears twice."""

    def __init__(self) -> None:
        self._levels: list[tuple[object, str]] = []
        self._sink = self._default_sink = 0  # ids; 0: loguru's initial sink on stderr
        self._shown = ""  # level of the sink; empty: there is none
        self._removed_default = False

    def push(self, level: str) -> Callable[[], None]:
        token = object()
        self._levels.append((token, level))
        self._refresh()

        def undo() -> None:
            self._levels = [entry for entry in self._levels if entry[0] is not token]
            self._refresh()

        return undo

    def _refresh(self) -> None:
        level = self._levels[-1][1] if self._levels else ""
        if level == self._shown:
            return  # the same sink; loguru takes milliseconds for another
        if self._shown:
            _remove(self._sink)
        self._shown = level
        if level:
            # Replace only loguru's default sink; keep sinks that the host program added.
            self._removed_default = _remove(self._default_sink) or self._removed_default
            self._sink = _add_console(level)
        elif self._removed_default:
            self._removed_default = False
            if sys.stderr is not None:
                self._default_sink = _loguru.add(sys.stderr)


_console_stack = _ConsoleStack()


def configure_console(level: str | None = None) -> Callable[[], None]:
    """Replace loguru's default sink by one that writes to stderr in this package's format.

    Sinks that the host program added are unchanged. For entry points and `initialize()` only.

    Args:
        level: lowest level shown; default: environment variable CONSOLE_LOG_LEVEL, else INFO. At DEBUG and below, each
            line includes the file and line of its call.

    Returns:
        A function that removes the sink and restores loguru's default one; calling it twice is harmless. Calls may be
        nested: the innermost configuration that is not undone is active.

    Raises:
        ConfigError: the level is not in `LEVELS`.
    """
    chosen = level or os.environ.get("CONSOLE_LOG_LEVEL") or "INFO"
    if chosen.upper() not in LEVELS:
        where = "console log level" if level else "CONSOLE_LOG_LEVEL"
        raise ConfigError(f"unknown {where} {chosen!r}; choose one of {', '.join(LEVELS)}")
    return _console_stack.push(chosen.upper())


def _add_console(level: str) -> int:
    show_source = LEVELS.index(level) <= LEVELS.index("DEBUG")

    def line_format(record: "Record") -> str:
        rank = "[rank {extra[rank]}] " if "rank" in record["extra"] else ""
        source = "<cyan>{file}:{line}</cyan> " if show_source else ""
        return (
            f"<dim>{{time:MM-DD HH:mm:ss}}</dim> <level>{{level:<7}}</level> {source}{rank}{{message}}\n{{exception}}"
        )

    color = sys.stderr is not None and sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    return _loguru.add(
        _write_to_stderr, level=level, format=line_format, colorize=color, backtrace=False, diagnose=False
    )


def _write_to_stderr(message: "Message") -> None:
    """Write a record to the current stderr, above a tqdm progress bar if there is one: of this process, or of rank 0 on
    the same terminal, which draws it again with its next step."""
    stream, text = sys.stderr, hide_secrets(str(message))
    if stream is None:
        return
    if logger.rank != 0 and stream.isatty():
        stream.write(_ERASE_LINE)
    bar_class = getattr(sys.modules.get("tqdm"), "tqdm", None)  # without tqdm imported there is no bar
    if bar_class is not None:
        bar_class.write(text, file=stream, end="")
    else:
        stream.write(text)
    stream.flush()


def _remove(sink: int) -> bool:
    try:
        _loguru.remove(sink)
    except ValueError:  # already removed by the host program
        return False
    return True
