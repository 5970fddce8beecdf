"""Hiding of packages that are installed but must not be imported."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

GPU_KERNELS = ("fla", "causal_conv1d")
"""Packages of GPU kernels that transformers' models also call on CPUs where they are installed
(`integrations/hub_kernels.py`, use_kernel_func_from_hub_with_fallback)."""


@contextlib.contextmanager
def without_packages(names: tuple[str, ...]) -> Iterator[None]:
    """Make imports of these packages fail, as if they were not installed. A module that is first imported in the block,
    and chooses its functions then, keeps those functions."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in names}
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]  # None ends an import
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(hidden)
