"""What a run may change in the host program, and its undo: `patch_print`, `remove_logging`, `ignore_warning`."""

import builtins
import logging
import sys
import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from megatron_wrap.platform.replacements import Replacements
from megatron_wrap.utils.dist_logger import logger

if TYPE_CHECKING:
    from typing_extensions import Self


class HostPatches:
    """What a run changes in the process around it; nothing happens before `apply`, and `undo` puts everything back.

    Both may be called twice; `with HostPatches(...):` calls them.

    Args:
        patch_print: builtin `print` goes to `logger.debug_all_ranks`. `print` to a file other than the process's
            stdout, or under `contextlib.redirect_stdout`, keeps its meaning.
        remove_logging: the handlers of the root logger of `logging` are removed.
        ignore_warning: FutureWarning and UserWarning are hidden.
    """

    def __init__(self, patch_print: bool = False, remove_logging: bool = False, ignore_warning: bool = False) -> None:
        self._steps: list[Callable[[], Callable[[], None]]] = []
        if patch_print:
            self._steps.append(_send_print_to_logger)
        if remove_logging:
            self._steps.append(_remove_root_handlers)
        if ignore_warning:
            self._steps.append(_hide_warnings)
        self._undo: list[Callable[[], None]] | None = None

    def apply(self) -> None:
        """Makes the changes, once."""
        if self._undo is None:
            self._undo = [step() for step in self._steps]

    def undo(self) -> None:
        """Puts back what `apply` found; what others added since stays."""
        steps, self._undo = self._undo or [], None
        for step in reversed(steps):
            step()

    def __enter__(self) -> "Self":
        self.apply()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


class _Inside(threading.local):
    """Whether this thread is within a sink of the logger."""

    now = False


class _PrintToLogger:
    """Stands in for builtin `print`: one record for each finished line, per thread."""

    def __init__(self, real_print: Callable[..., None]) -> None:
        self.real_print = real_print
        self.active = True
        self._stdout = sys.stdout
        self._unfinished: dict[int, str] = {}
        self._inside = _Inside()

    def __call__(
        self,
        *values: object,
        sep: str | None = " ",
        end: str | None = "\n",
        file: Any = None,
        flush: bool = False,
    ) -> None:
        target = sys.stdout if file is None else file
        # A sink that prints must not come back here: loguru refuses to log from within a sink.
        if not self.active or target is not self._stdout or self._inside.now:
            self.real_print(*values, sep=sep, end=end, file=file, flush=flush)
            return
        ending = "\n" if end is None else end
        text = (" " if sep is None else sep).join(str(value) for value in values)
        thread = threading.get_ident()
        text = self._unfinished.pop(thread, "") + text
        if ending.endswith(("\n", "\r")):
            self._emit(text + ending[:-1])
        else:
            self._unfinished[thread] = text + ending

    def finish(self) -> None:
        """Writes lines that never got their end, then steps aside for good."""
        for text in self._unfinished.values():
            self._emit(text)
        self._unfinished.clear()
        self.active = False

    def _emit(self, text: str) -> None:
        if not text:
            return
        self._inside.now = True
        try:
            logger._write("DEBUG", True, text, (), {}, above=2)
        finally:
            self._inside.now = False


def _send_print_to_logger() -> Callable[[], None]:
    stand_in = _PrintToLogger(builtins.print)
    replacements = Replacements()
    replacements.set(builtins, "print", stand_in)

    def undo() -> None:
        stand_in.finish()
        if vars(builtins)["print"] is stand_in:  # if someone wrapped it since, it now passes everything on
            replacements.undo()

    return undo


def _remove_root_handlers() -> Callable[[], None]:
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


def _hide_warnings() -> Callable[[], None]:
    before = list(warnings.filters)
    for category in (FutureWarning, UserWarning):
        warnings.simplefilter("ignore", category)
    ours = warnings.filters[:2]

    def undo() -> None:
        # Not `catch_warnings`: leaving it would drop filters that libraries imported meanwhile have added.
        added_since = [entry for entry in warnings.filters if entry not in before and entry not in ours]
        warnings.resetwarnings()  # also tells the interpreter that remembered decisions are void
        warnings.filters.extend(added_since + before)  # type: ignore[attr-defined]

    return undo
