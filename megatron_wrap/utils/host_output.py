"""Optional changes of what the host program prints, logs and warns: `patch_print`, `remove_logging`, `ignore_warning`.

Each function applies one and returns the function that reverts it and keeps what others have added since.
"""

import builtins
import logging
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

from megatron_wrap.platform.megatron_core.undoable_changes import Replacements
from megatron_wrap.utils.dist_logger import logger


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
        ending = "\n" if end is None else end
        text = (" " if sep is None else sep).join(str(value) for value in values)
        text = self._incomplete.pop(thread, "") + text
        if ending.endswith(("\n", "\r")):
            self._emit(text + ending[:-1])
        else:
            self._incomplete[thread] = text + ending

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


def send_print_to_logger() -> Callable[[], None]:
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


def remove_root_handlers() -> Callable[[], None]:
    """Remove the handlers of `logging`'s root logger."""
    root = logging.getLogger()
    removed = root.handlers[:]
    for handler in removed:
        root.removeHandler(handler)

    def undo() -> None:
        added_since = root.handlers[:]
        for handler in added_since:
            root.removeHandler(handler)
        for handler in removed + [handler for handler in added_since if handler not in removed]:
            root.addHandler(handler)

    return undo


def hide_warnings() -> Callable[[], None]:
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
