"""Ranks for tests, started once and reused for many layouts: gloo processes forked from a parent that has done the
imports, or NCCL processes with a GPU each, spawned, since CUDA does not survive a fork."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from megatron_wrap.errors import MegatronWrapError
from megatron_wrap.parallel.launch import free_port


class RankError(AssertionError):
    """A function raised on some ranks; the text holds their tracebacks.

    Args:
        user_error: the message of a `MegatronWrapError` that one of them raised, else empty.
    """

    def __init__(self, text: str, user_error: str = "") -> None:
        super().__init__(text)
        self.user_error = user_error


class RankPool:
    """`world_size` processes in one group. The parent of forked ones must not have used threads or a process group.

    Args:
        world_size: number of ranks.
        timeout_seconds: longest time that one `run` may take.
        platform: "cpu" (gloo, forked) or "cuda" (NCCL, spawned: the parent's script needs its `__main__` guard).
    """

    def __init__(self, world_size: int, timeout_seconds: float = 180.0, platform: str = "cpu") -> None:
        self.world_size = world_size
        self.timeout_seconds = timeout_seconds
        context: Any = multiprocessing.get_context("fork" if platform == "cpu" else "spawn")
        port = free_port()
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, port, theirs, platform), daemon=False)
            process.start()
            theirs.close()
            self._connections.append(mine)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
        """Call a module-level function on every rank; the results in rank order.

        Raises:
            RankError: it raised somewhere, or did not end in time. The pool is closed then.
        """
        message = pickle.dumps((function, arguments, named))
        for connection in self._connections:
            connection.send_bytes(message)
        failures: list[str] = []
        user_error = ""
        results = []
        for rank, connection in enumerate(self._connections):
            patience = 10.0 if failures else self.timeout_seconds
            try:
                answered = connection.poll(patience)
                silence = (False, "no answer in time", "")
                succeeded, value, told = pickle.loads(connection.recv_bytes()) if answered else silence
            except EOFError:
                succeeded, value, told = False, "the process died", ""
            results.append(value)
            if not succeeded:
                failures.append(f"--- rank {rank}\n{value}")
                user_error = user_error or told
        if failures:
            self.close(kill=True)
            raise RankError(
                f"{function.__name__} failed on {len(failures)} of {self.world_size} ranks\n" + "\n".join(failures),
                user_error,
            )
        return results

    def close(self, kill: bool = False) -> None:
        """End the processes."""
        for connection, process in zip(self._connections, self._processes, strict=True):
            if kill:
                process.kill()
            connection.close()
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()


def _serve(rank: int, world_size: int, port: int, connection: Connection, platform: str) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    if platform == "cuda":
        # Megatron-Core wants one queue; sums in one order where kernels can
        os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="1", CUBLAS_WORKSPACE_CONFIG=":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.cuda.set_device(rank)
    # a run ends with a collection of its cycles, which need not look at what was imported
    gc.collect()
    gc.freeze()
    backend = "gloo" if platform == "cpu" else "nccl"
    dist.init_process_group(backend, rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    parent = os.getppid()
    while True:
        # siblings hold copies of the parent's ends of the pipes, so its death is no end of file
        while not connection.poll(1.0):
            if os.getppid() != parent:
                os._exit(1)
        try:
            function, arguments, named = pickle.loads(connection.recv_bytes())
        except EOFError:
            break
        try:
            answer = (True, function(*arguments, **named), "")
        except MegatronWrapError as error:
            answer = (False, traceback.format_exc(), str(error))
        except BaseException:
            answer = (False, traceback.format_exc(), "")
        connection.send_bytes(pickle.dumps(answer))
    dist.destroy_process_group()
    os._exit(0)
