"""Pools of ranks for one check, started once for each world size, on the CPU or on this machine's GPUs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from megatron_wrap.errors import FlowError
from megatron_wrap.platform import choose_platform
from megatron_wrap.testing.ranks import RankError, RankPool

_PRELOADED = (
    "numpy.random",
    "torch._dynamo",  # Megatron-Core's optimizer imports it
    "megatron_wrap.core.wrap",
    "megatron_wrap.model.gpt",
    "megatron_wrap.engine.step",
    "megatron_wrap.testing.gradients",
)
"""Modules that every rank needs; imported in the parent, so that forked ranks need not import them."""


class Pools:
    """One pool of ranks for each world size; a context manager that closes the pools it started.

    Args:
        platform: "cpu" (gloo, forked) or "cuda" (NCCL, one GPU each, spawned).
        given: world size -> an existing pool, which the caller closes, for many checks in one process.

    Raises:
        PlatformError: there is no GPU for "cuda".
    """

    def __init__(self, platform: str, given: Callable[[int], RankPool] | None = None) -> None:
        self.platform = platform
        self._given = given
        self._own: dict[int, RankPool] = {}
        chosen = choose_platform(platform)
        self.devices: int | None = None
        """Number of GPUs of this machine; None on the CPU, which does not limit the number of processes."""
        if platform == "cuda":
            import torch

            self.devices = torch.cuda.device_count()  # does not initialize CUDA in this process
        elif given is None:
            chosen.install()  # so that Megatron-Core's modules are imported for the CPU
            try:
                for name in _PRELOADED:
                    importlib.import_module(name)
            finally:
                chosen.uninstall()

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._own.values():
            pool.close()

    def run(self, processes: int, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Run `function` on that many ranks; returns rank 0's result.

        Raises:
            FlowError: it raised on a rank; the message is that of a user error, else the tracebacks.
        """
        try:
            return self._pool(processes).run(function, *arguments, **named)[0]
        except RankError as error:
            self._own.pop(processes, None)  # closed by the failure
            raise FlowError(error.user_error or str(error)) from error

    def _pool(self, processes: int) -> RankPool:
        if self._given is not None:
            return self._given(processes)
        if processes not in self._own:
            self._own[processes] = RankPool(processes, platform=self.platform)
        return self._own[processes]
