"""Worker processes that compute items before they are used, and return them in order through shared memory.

A worker is forked from the process that uses it, so it needs no import and no pickled argument. It may use neither the
device nor a process group, and starts no process but that which renders chat templates. `torch.utils.data.DataLoader`
cannot replace this module: its tensors pass through /dev/shm, of which a container has 64 MB, it does not page-lock
dataclasses, and it needs seconds to end a worker in the middle of an item. A pool of `concurrent.futures` copies
results through a pipe.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import select
import socket
import struct
import tempfile
import traceback
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_wrap.errors import ProcessError
from megatron_wrap.platform.base.machine import how_it_ended, process_state
from megatron_wrap.utils.pools.processes import become_worker, forking, picklable

_ALIGNMENT = 64
_CHECK_SECONDS = 2.0
_STOPPED_SECONDS = 20.0
_SIZE = struct.Struct("q")


class WorkerTraceback(Exception):
    """The traceback of an error that a worker process raised."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


class _Worker(NamedTuple):
    process: ForkProcess
    connection: socket.socket


class _Message(NamedTuple):
    """An item, or the error of the worker that computes it."""

    item: Any = None
    error: Exception | None = None
    traceback: str = ""


class _TensorBytes(NamedTuple):
    """Position of a tensor's bytes in a message, with its dtype and shape."""

    begin: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Workers:
    """`count` worker processes, each of which computes every count-th item.

    Args:
        items: (worker, count) -> the items worker, worker + count, ... Called in the worker.
        count: number of processes, at least 1.
        ahead: items to compute before they are requested, over all workers; at least one each.
        pin_memory: put the items' tensors into page-locked memory.
    """

    def __init__(
        self, items: Callable[[int, int], Iterator[Any]], count: int, ahead: int, pin_memory: bool = False
    ) -> None:
        self._pin_memory, self._turn = pin_memory, 0
        self._workers: list[_Worker] = []
        # also where the object is dropped without close()
        self._finalizer = weakref.finalize(self, _stop, self._workers, os.getpid())
        for number in range(count):
            self._workers.append(_fork(items, number, count))
            self._workers[-1].connection.sendall(b"." * -(-ahead // count))

    def next(self) -> Any:
        """The next item.

        Raises:
            ProcessError: the worker has died.
            Exception: the one that the worker raised for this item.
        """
        process, connection = self._workers[self._turn % len(self._workers)]
        self._wait(process, connection)
        try:
            message = _receive(connection, self._pin_memory)
        except (EOFError, ConnectionResetError):
            process.join()
            self.close()
            raise ProcessError(
                f"worker process {process.pid} of wrap.batches {how_it_ended(process.exitcode)}; lower "
                "megatron_wrap.data.num_workers or prefetch_batches if memory is short, or set num_workers: 0 to load "
                "in the training process"
            ) from None
        if message.error is not None:
            self.close()
            raise message.error from WorkerTraceback(message.traceback)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # reported when its next item is missing
            connection.sendall(b".")  # request one more
        self._turn += 1
        return message.item

    def _wait(self, process: ForkProcess, connection: socket.socket) -> None:
        """Wait for a message, unless the process is stopped for long."""
        poll, stopped_seconds = select.poll(), 0.0
        poll.register(connection, select.POLLIN)
        while not poll.poll(1000 * _CHECK_SECONDS):
            is_stopped = process.pid is not None and process_state(process.pid) in ("T", "t")
            stopped_seconds = stopped_seconds + _CHECK_SECONDS if is_stopped else 0.0
            if stopped_seconds >= _STOPPED_SECONDS:
                self.close()
                raise ProcessError(
                    f"worker process {process.pid} of wrap.batches has been stopped for {stopped_seconds:.0f} s, by a "
                    "signal such as SIGSTOP; start the run again"
                )

    def close(self) -> None:
        """End the processes, also in the middle of an item. Only the process that started them can."""
        self._finalizer()


def _fork(items: Callable[[int, int], Iterator[Any]], number: int, count: int) -> _Worker:
    parent, child = socket.socketpair()
    process = ForkProcess(target=_work, args=(items, number, count, parent, child), daemon=True)
    with forking():
        process.start()
    child.close()
    return _Worker(process, parent)


def _work(
    items: Callable[[int, int], Iterator[Any]],
    number: int,
    count: int,
    parents: socket.socket,
    connection: socket.socket,
) -> None:
    parents.close()
    become_worker()
    torch.set_num_threads(1)
    with contextlib.suppress(OSError):  # the parent has closed its end
        _serve(items, number, count, connection)


def _serve(items: Callable[[int, int], Iterator[Any]], number: int, count: int, connection: socket.socket) -> None:
    iterator: Iterator[Any] | None = None
    while connection.recv(1):  # empty once the parent has closed its end
        pickler = _Pickler()
        try:
            iterator = items(number, count) if iterator is None else iterator
            pickler.dump(_Message(next(iterator)))
        except BaseException as error:
            pickler = _Pickler()
            pickler.dump(_Message(error=picklable(error), traceback=traceback.format_exc()))
            iterator = iter(())
        _send(connection, pickler)


# ---- one message: its tensors and a pickle of the rest, in one file in memory ----


class _Pickler(pickle.Pickler):
    def __init__(self) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self.size = 0

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.is_sparse or value.is_quantized:
            return None
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        begin = self.size
        self.tensors.append(flat)
        self.size += -(-flat.numel() // _ALIGNMENT) * _ALIGNMENT
        return _TensorBytes(begin, flat.numel(), value.dtype, tuple(value.shape))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BufferedReader, flat: Tensor) -> None:
        super().__init__(file)
        self._flat = flat

    def persistent_load(self, tensor: _TensorBytes) -> Tensor:
        return self._flat[tensor.begin : tensor.begin + tensor.size].view(tensor.dtype).view(tensor.shape)


def _send(connection: socket.socket, pickler: _Pickler) -> None:
    # not in /dev/shm, which has 64 MB in a container
    has_memory_files = hasattr(os, "memfd_create")
    with open(os.memfd_create("megatron-wrap"), "wb") if has_memory_files else tempfile.TemporaryFile() as file:
        for flat in pickler.tensors:
            file.write(flat.numpy().data)
            file.seek(-flat.numel() % _ALIGNMENT, os.SEEK_CUR)
        file.write(pickler.file.getbuffer())
        file.flush()
        socket.send_fds(connection, [_SIZE.pack(pickler.size)], [file.fileno()])


def _receive(connection: socket.socket, pin_memory: bool) -> _Message:
    header, descriptors, _, _ = socket.recv_fds(connection, _SIZE.size, 1)
    if len(header) < _SIZE.size or not descriptors:
        raise EOFError
    (size,) = _SIZE.unpack(header)
    with open(descriptors[0], "rb") as file:
        flat = torch.empty(size, dtype=torch.uint8, pin_memory=pin_memory and size > 0)
        file.seek(0)
        file.readinto(flat.numpy().data)
        message: _Message = _Unpickler(file, flat).load()
    return message


# ---- the end of a process ----


def _stop(workers: list[_Worker], parent: int) -> None:
    while workers:
        process, connection = workers.pop()
        connection.close()
        if os.getpid() == parent:  # else a process that the parent forked later
            process.kill()
            process.join()
