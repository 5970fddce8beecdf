"""The public API: the facade `MegatronWrap`, imported on first use, and the import paths that users rely on."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_wrap.core.wrap import MegatronWrap
    from megatron_wrap.parallel.launch import exit_on_user_error

__all__ = ["MegatronWrap", "exit_on_user_error"]


def __getattr__(name: str) -> Any:
    # on first use: reading a configuration imports this package and must not import torch
    if name == "MegatronWrap":
        from megatron_wrap.core.wrap import MegatronWrap

        return MegatronWrap
    if name == "exit_on_user_error":
        from megatron_wrap.parallel.launch import exit_on_user_error

        return exit_on_user_error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
