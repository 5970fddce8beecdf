"""Checks that a flow trains the same on every parallel layout: `check_parity`, `assert_layout_invariant`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_wrap.testing.parity import ParityReport, assert_layout_invariant, check_parity

__all__ = ["ParityReport", "assert_layout_invariant", "check_parity"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron_wrap.testing import parity

    return getattr(parity, name)
