"""The ranks of one check: pools of processes, started once for each world size, on the CPU or on the GPUs here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from megatron_wrap.errors import FlowError
from megatron_wrap.platform import choose_platform
from megatron_wrap.testing.ranks import RankError, RankPool

_NEEDED = (
    "numpy.random",
    "torch._dynamo",  # Megatron-Core's optimizer imports it
    "megatron_wrap.core.wrap",
    "megatron_wrap.model.gpt",
    "megatron_wrap.engine.step",
    "megatron_wrap.testing.gradients",
)
"""What every rank imports: forked ranks need not if their parent has."""


class Pools:
    """Ranks by world size; with `with`, to be closed again.

    Args:
        platform: "cpu" (gloo, forked) or "cuda" (NCCL, one GPU each, spawned).
        given: world size -> a pool that is somebody else's to close, for many checks in one process.

    Raises:
        PlatformError: there is no GPU for "cuda".
    """

    def __init__(self, platform: str, given: Callable[[int], RankPool] | None = None) -> None:
        self.platform = platform
        self._given = given
        self._own: dict[int, RankPool] = {}
        chosen = choose_platform(platform)
        self.devices: int | None = None
        """GPUs of this machine; None on the CPU, where processes are free."""
        if platform == "cuda":
            import torch

            self.devices = torch.cuda.device_count()  # asks the driver's library: this process stays without CUDA
        elif given is None:
            chosen.install()  # Megatron-Core's modules are imported with the CPU's meaning
            try:
                for name in _NEEDED:
                    importlib.import_module(name)
            finally:
                chosen.uninstall()

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._own.values():
            pool.close()

    def run(self, processes: int, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """`function` on that many ranks; rank 0's result.

        Raises:
            FlowError: it raised on a rank: the sentence of a user's mistake alone, else the tracebacks.
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
