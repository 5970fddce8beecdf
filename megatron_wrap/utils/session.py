"""All changes of a run to the process's logging, applied by `initialize()` or a command and reverted afterwards."""

from __future__ import annotations

from contextlib import ExitStack

from megatron_wrap.utils import host_output
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
            (patch_print, host_output.send_print_to_logger),
            (remove_logging, host_output.remove_root_handlers),
            (ignore_warning, host_output.hide_warnings),
        ):
            if wanted:
                undo.callback(apply())
        return undo.pop_all()
