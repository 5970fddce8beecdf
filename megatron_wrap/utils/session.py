"""All changes of a run to the process's logging, applied by `initialize()` or a command and reverted afterwards.

Each of `_send_print_to_logger`, `_remove_root_handlers` and `_hide_warnings` applies one change and returns the
function that reverts it and keeps what others have added since.
"""

from __future__ import annotations

import builtins
import io
import logging
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from megatron_wrap.platform.megatron_core.undoable_changes import Replacements
from megatron_wrap.utils.dist_logger import configure_console, logger


def logger_session(
    level: str | None = None,
    rank: int | None = None,
    patch_print: bool = False,
    remove_logging: bool = False,
    ignore_warning: bool = False,
) -> ExitStack:
    """Configure the console and the logger's rank, and change the host program.

    Args:
        level: lowest level on the console; default: CONSOLE_LOG_LEVEL, else INFO.
        rank: global rank of this process; default: torchrun's RANK, else 0.
        patch_print: redirect the builtin `print` to `logger.debug_all_ranks`, except `print` to a file other than the
            process's stdout or inside `contextlib.redirect_stdout`.
        remove_logging: remove the handlers of `logging`'s root logger.
        ignore_warning: hide FutureWarning and UserWarning.

    Returns:
        A context manager that reverts all changes at its end or in `close`, and keeps what others have added since.

    Raises:
        ConfigError: unknown level; nothing is changed.
    """
    with ExitStack() as undo:
        undo.callback(configure_console(level))
        undo.callback(logger.set_rank, logger._rank)
        if rank is not None:
            logger.set_rank(rank)
        for wanted, apply in (
            (patch_print, _send_print_to_logger),
            (remove_logging, _remove_root_handlers),
            (ignore_warning, _hide_warnings),
        ):
            if wanted:
                undo.callback(apply())
        return undo.pop_all()


class _PrintToLogger:
    """Replacement for the builtin `print`: logs one record per complete line, per thread."""

    def __init__(self, real_print: Callable[..., None]) -> None:
        self.real_print = real_print
        self.active = True
        self._stdout = sys.stdout
        self._incomplete: dict[int, str] = {}
        self._in_sink: set[int] = set()  # threads inside a sink of the logger

    def __call__(
        self,
        *values: object,
        sep: str | None = " ",
        end: str | None = "\n",
        file: Any = None,
        flush: bool = False,
    ) -> None:
        target = sys.stdout if file is None else file
        # If a sink prints, use the real print: loguru cannot log inside a sink.
        thread = threading.get_ident()
        if not self.active or target is not self._stdout or thread in self._in_sink:
            self.real_print(*values, sep=sep, end=end, file=file, flush=flush)
            return
        written = io.StringIO(self._incomplete.pop(thread, ""))
        written.seek(0, io.SEEK_END)
        self.real_print(*values, sep=sep, end=end, file=written)
        text = written.getvalue()
        if text.endswith(("\n", "\r")):
            self._emit(text[:-1])
        else:
            self._incomplete[thread] = text

    def finish(self) -> None:
        """Log incomplete lines, then pass all calls to the real `print`."""
        for text in self._incomplete.values():
            self._emit(text)
        self._incomplete.clear()
        self.active = False

    def _emit(self, text: str) -> None:
        if not text:
            return
        self._in_sink.add(threading.get_ident())
        try:
            logger._write("DEBUG", True, text, depth=3)
        finally:
            self._in_sink.remove(threading.get_ident())


def _send_print_to_logger() -> Callable[[], None]:
    """Redirect the builtin `print` to `logger.debug_all_ranks`."""
    redirected = _PrintToLogger(builtins.print)
    replacements = Replacements()
    replacements.set(builtins, "print", redirected)

    def undo() -> None:
        redirected.finish()
        # If another program has wrapped it since, keep the wrapper: `finish` made it forward to the real print.
        if vars(builtins)["print"] is redirected:
            replacements.close()

    return undo


def _remove_root_handlers() -> Callable[[], None]:
    """Remove the handlers of `logging`'s root logger."""
    handlers = logging.getLogger().handlers
    removed = handlers[:]
    handlers.clear()

    def undo() -> None:
        added_since = [handler for handler in handlers if handler not in removed]
        handlers[:] = removed + added_since

    return undo


def _hide_warnings() -> Callable[[], None]:
    """Hide FutureWarning and UserWarning."""
    before = list(warnings.filters)
    for category in (FutureWarning, UserWarning):
        warnings.simplefilter("ignore", category)
    added = warnings.filters[:2]

    def undo() -> None:
        # `catch_warnings` would also remove the filters that libraries have added since.
        added_since = [entry for entry in warnings.filters if entry not in before and entry not in added]
        warnings.resetwarnings()  # also invalidates the interpreter's cache of filter decisions
        warnings.filters.extend(added_since + before)  # type: ignore[attr-defined]

    return undo
