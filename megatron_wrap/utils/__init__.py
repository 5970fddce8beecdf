"""What the program says: text logs, metric loggers, the progress bar. Importing it does no work."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_wrap.utils.dist_logger import logger

__all__ = ["logger"]


def __getattr__(name: str) -> Any:
    if name == "logger":
        from megatron_wrap.utils.dist_logger import logger

        return logger
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
