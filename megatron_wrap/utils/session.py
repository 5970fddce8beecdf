"""All changes of a run to the process's logging, applied by `initialize()` or a command and reverted afterwards.

Each of `_send_print_to_logger`, `_remove_root_handlers` and `_hide_warnings` applies one change. It returns the
function that reverts the change and keeps later changes of others.
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
        A context manager that reverts all changes at its end or in `close`, and keeps later changes of others.

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


def _send_print_to_logger() -> Callable[[], None]:
    """Redirect the builtin `print` to `logger.debug_all_ranks`: one record per complete line, per thread."""
    real_print, stdout = builtins.print, sys.stdout
    incomplete: dict[int, str] = {}
    in_sink: set[int] = set()  # threads inside a sink of the logger, which cannot log: loguru refuses it
    is_active = True

    def redirected(*values: object, file: Any = None, flush: bool = False, **ends: Any) -> None:
        thread, target = threading.get_ident(), sys.stdout if file is None else file
        if not is_active or target is not stdout or thread in in_sink:
            real_print(*values, file=file, flush=flush, **ends)
            return
        written = io.StringIO()
        real_print(*values, file=written, **ends)
        text = incomplete.pop(thread, "") + written.getvalue()
        if text.endswith(("\n", "\r")):
            emit(text[:-1])
        else:
            incomplete[thread] = text

    def emit(text: str) -> None:
        if text:
            in_sink.add(threading.get_ident())
            try:
                logger._write("DEBUG", True, text, depth=3)
            finally:
                in_sink.remove(threading.get_ident())

    replacements = Replacements()
    replacements.set(builtins, "print", redirected)

    def undo() -> None:
        nonlocal is_active
        for text in incomplete.values():
            emit(text)
        incomplete.clear()
        is_active = False
        # If another program has wrapped it since, keep the wrapper, whose calls go to the real print now.
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
