"""All changes of a run to the process's logging, applied by `initialize()` or a command and reverted afterwards."""

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from megatron_wrap.utils.dist_logger import configure_console, logger
from megatron_wrap.utils.patches import HostPatches

if TYPE_CHECKING:
    from typing_extensions import Self


class LoggerSession:
    """Combines `configure_console`, the logger's rank and `HostPatches`; reverts them in `close`.

    Args:
        level: lowest level on the console; default: CONSOLE_LOG_LEVEL, else INFO.
        rank: global rank of this process; default: torchrun's RANK, else 0.
        patch_print, remove_logging, ignore_warning: see `HostPatches`.
    """

    def __init__(
        self,
        level: str | None = None,
        rank: int | None = None,
        patch_print: bool = False,
        remove_logging: bool = False,
        ignore_warning: bool = False,
    ) -> None:
        self._level = level
        self._rank = rank
        self._patches = HostPatches(patch_print, remove_logging, ignore_warning)
        self._undo_console: Callable[[], None] | None = None
        self._previous_rank: int | None = None

    def open(self) -> "Self":
        """Apply all changes; a second call does nothing.

        Raises:
            ConfigError: unknown level; nothing is changed.
        """
        if self._undo_console is None:
            self._undo_console = configure_console(self._level)
            self._previous_rank = logger._rank
            if self._rank is not None:
                logger.set_rank(self._rank)
            self._patches.apply()
        return self

    def close(self) -> None:
        """Revert all changes in reverse order; a second call does nothing."""
        if self._undo_console is not None:
            undo, self._undo_console = self._undo_console, None
            self._patches.undo()
            logger.set_rank(self._previous_rank)
            undo()

    def __enter__(self) -> "Self":
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
