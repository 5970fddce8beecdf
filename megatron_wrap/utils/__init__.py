"""Text logs, metric loggers and the progress bar. Importing the package has no side effects."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_wrap.utils.dist_logger import logger

__all__ = ["logger"]


def __getattr__(name: str) -> Any:
    if name == "logger":
        from megatron_wrap.utils.dist_logger import logger

        return logger
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
