"""Pools of ranks for one check, started once for each world size, on the CPU or on this machine's GPUs."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from megatron_wrap.errors import FlowError
from megatron_wrap.platform import choose_platform
from megatron_wrap.testing.ranks import RankError, RankPool

_PRELOADED = (
    "numpy.random",
    "torch._dynamo",  # Megatron-Core's optimizer imports it
    "megatron_wrap.core.wrap",
    "megatron_wrap.core.run",
    "megatron_wrap.parallel.launch",
    "megatron_wrap.parallel.watch.heartbeat",
    "megatron_wrap.parallel.loopback",
    "megatron_wrap.model.core_config",
    "megatron_wrap.model.gpt_model",
    "megatron_wrap.model.gpt_provider",
    "megatron_wrap.nn.attention.torch_attention",
    "megatron_wrap.checkpoint.chosen_values",
    "megatron_wrap.checkpoint.run_checkpoints",
    "megatron_wrap.data.inspect.mistakes",
    "megatron_wrap.engine.state.checked_optimizer",
    "megatron_wrap.nn.adapters.embedding_rows",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization",
    "megatron_wrap.testing.gradients",
)
"""Names of modules that every rank needs."""


def import_for_ranks() -> None:
    """Import the modules that every rank needs, so that ranks forked from this process need not import them."""
    platform = choose_platform("cpu")  # Megatron-Core's modules are imported for the CPU
    was_installed = platform._installed
    platform.install()
    try:
        for name in _PRELOADED:
            if importlib.util.find_spec(name) is not None:  # releases of torch have other private modules
                importlib.import_module(name)
    finally:
        if not was_installed:
            platform.uninstall()
    if not was_installed:  # forked processes inherit its records of the imported modules
        platform.install()
        platform.uninstall()


class Pools:
    """One pool of ranks for each world size; a context manager that closes the pools it started.

    Args:
        platform: "cpu" (gloo, forked) or "cuda" (NCCL, one GPU each, spawned).
        existing: world size -> a pool that the caller closes, for many checks in one process.

    Raises:
        PlatformError: there is no GPU for "cuda".
    """

    def __init__(self, platform: str, existing: Callable[[int], RankPool] | None = None) -> None:
        self.platform = platform
        self._existing = existing
        self._started: dict[int, RankPool] = {}
        choose_platform(platform)  # raises without a GPU for "cuda"
        self.devices: int | None = None
        """Number of GPUs of this machine; None on the CPU, where it does not limit the number of processes."""
        if platform == "cuda":
            import torch

            self.devices = torch.cuda.device_count()  # does not initialize CUDA in this process
        elif existing is None:
            import_for_ranks()

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._started.values():
            pool.close()

    def run(self, processes: int, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Run `function` on that many ranks; returns rank 0's result.

        Raises:
            FlowError: `function` raised on a rank; the message is the user error's, else the tracebacks.
        """
        try:
            return self._pool(processes).run(function, *arguments, **named)[0]
        except RankError as error:
            self._started.pop(processes, None)  # closed by the failure
            raise FlowError(error.user_error or str(error)) from error

    def _pool(self, processes: int) -> RankPool:
        if self._existing is not None:
            return self._existing(processes)
        if processes not in self._started:
            self._started[processes] = RankPool(processes, platform=self.platform)
        return self._started[processes]
