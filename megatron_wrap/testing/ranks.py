"""Ranks for tests, started once and reused for many layouts: gloo processes forked from a parent that has imported the
modules, or NCCL processes with a GPU each, which are spawned because CUDA does not support fork."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from megatron_wrap.errors import FlowError, MegatronWrapError
from megatron_wrap.platform import choose_platform
from megatron_wrap.utils.dist_logger import configure_console

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class RankError(AssertionError):
    """A function raised on some ranks; the text contains their tracebacks.

    Args:
        user_error: the message of a `MegatronWrapError` that a rank raised, else empty.
    """

    def __init__(self, text: str, user_error: str = "") -> None:
        super().__init__(text)
        self.user_error = user_error


class RankPool:
    """`world_size` processes in one process group. On the CPU the parent must not have used threads or a process group.

    Args:
        world_size: number of ranks.
        timeout_seconds: time limit of the start, and of one `run`.
        platform: "cpu" (gloo, forked) or "cuda" (NCCL, spawned: the parent's script needs a `__main__` guard).

    Raises:
        RankError: a process did not start within the time limit.
    """

    def __init__(self, world_size: int, timeout_seconds: float = 180.0, platform: str = "cpu") -> None:
        self.world_size = world_size
        self.timeout_seconds = timeout_seconds
        # a stopped process must end when this one dies: Linux can end it with the thread that started it
        ends_with_process = sys.platform == "linux" and threading.current_thread() is threading.main_thread()
        self._stops_idle = platform == "cpu" and ends_with_process
        context: Any = multiprocessing.get_context("fork" if platform == "cpu" else "spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            parent, child = context.Pipe()
            arguments = (rank, world_size, child, platform, self._stops_idle)
            process = context.Process(target=_serve, args=arguments, daemon=False)
            process.start()
            child.close()
            self._connections.append(parent)
            self._processes.append(process)
        # rank 0 binds a free port and sends it to the others; a free port chosen here might be taken by then
        try:
            if not self._connections[0].poll(timeout_seconds):
                raise TimeoutError
            port = self._connections[0].recv_bytes()
            for connection in self._connections[1:]:
                connection.send_bytes(port)
        except (EOFError, OSError) as error:
            self.close()
            raise RankError(f"one of {world_size} processes did not start; see its output above") from error

    def run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
        """Call a module-level function on every rank; returns the results in rank order.

        Raises:
            RankError: the function raised on a rank, or exceeded the time limit. Any exception, also that of a test's
                time limit, closes the pool: the results that ranks still send belong to no later call.
        """
        request = pickle.dumps((function, arguments, named))
        try:
            return self._run(function.__name__, request)
        except BaseException:
            self.close()
            raise

    def _run(self, name: str, request: bytes) -> list[Any]:
        self._signal_all("SIGCONT")
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):  # the process died, which is reported below
                connection.send_bytes(request)
        failures: list[str] = []
        user_error = ""
        results = []
        for rank, connection in enumerate(self._connections):
            limit_seconds = 10.0 if failures else self.timeout_seconds
            succeeded, value, message = False, f"no result within {limit_seconds:g} s", ""
            try:
                if connection.poll(limit_seconds):
                    succeeded, value, message = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                succeeded, value, message = False, "the process died", ""
            results.append(value)
            if not succeeded:
                failures.append(f"--- rank {rank}\n{value}")
                user_error = user_error or message
        if failures:
            raise RankError(
                f"{name} failed on {len(failures)} of {self.world_size} ranks\n" + "\n".join(failures),
                user_error,
            )
        self._signal_all("SIGSTOP")
        return results

    def _signal_all(self, name: str) -> None:
        """Stop or continue the idle processes, in which gloo would otherwise poll its sockets a hundred times a
        second."""
        if self._stops_idle:
            for process in self._processes:
                if process.exitcode is None:
                    os.kill(process.pid, getattr(signal, name))

    @property
    def closed(self) -> bool:
        """Whether the processes were stopped, by `close` or after a failure."""
        return self._connections[0].closed

    def close(self) -> None:
        """Kill the processes. Closing the pipes is not enough, because later pools have inherited copies of them."""
        for connection, process in zip(self._connections, self._processes, strict=True):
            process.kill()
            connection.close()
        for process in self._processes:
            process.join(20)


def _messages(connection: Connection) -> Iterator[bytes]:
    """The parent's messages until it closes the connection; exits the process if the parent is gone."""
    parent = os.getppid()
    while True:
        # other ranks have inherited copies of the parent's ends of the pipes, so its death causes no end of file
        while not connection.poll(1.0):
            if os.getppid() != parent:
                os._exit(1)
        try:
            yield connection.recv_bytes()
        except EOFError:
            return


def _end_with_parent() -> None:
    """Make the kernel kill this process, stopped or not, when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(rank: int, world_size: int, connection: Connection, platform: str, stopped_when_idle: bool) -> None:
    import torch
    import torch.distributed as dist

    if stopped_when_idle:
        _end_with_parent()
    messages = _messages(connection)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    if platform == "cuda":
        # Megatron-Core requires one queue; deterministic kernels where available
        os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="1", CUBLAS_WORKSPACE_CONFIG=":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.cuda.set_device(rank)
        # imports Transformer Engine, whose host cuDNN fails to load after attention has loaded torch's cuDNN
        _ = choose_platform(platform).has_transformer_engine
    configure_console()  # once for all runs of this process
    # a run ends with a garbage collection, which has no need to visit the objects of imported modules
    gc.collect()
    gc.freeze()
    if platform == "cpu":
        choose_platform(platform).keep_installed()  # once for all runs, whose groups share a device
    backend = "gloo" if platform == "cpu" else "nccl"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        connection.send_bytes(pickle.dumps(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", pickle.loads(next(messages)), world_size, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    num_modules = 0
    for message in messages:
        function, arguments, named = pickle.loads(message)
        try:
            answer = (True, function(*arguments, **named), "")
        except MegatronWrapError as error:
            answer = (False, traceback.format_exc(), str(error))
        except BaseException:
            answer = (False, traceback.format_exc(), "")
        connection.send_bytes(pickle.dumps(answer))
        if platform == "cuda":
            torch.cuda.empty_cache()  # processes of other pools may share the GPU
        if len(sys.modules) > num_modules:  # freeze modules that this run has imported
            gc.collect()
            gc.freeze()
            num_modules = len(sys.modules)
    dist.destroy_process_group()
    os._exit(0)


_PRELOADED = (
    "numpy.random",
    "torch._dynamo",  # Megatron-Core's optimizer imports it
    "megatron_wrap.core.wrap",
    "megatron_wrap.core.after_step",
    "megatron_wrap.core.evaluate_and_early_stop",
    "megatron_wrap.core.export",
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
