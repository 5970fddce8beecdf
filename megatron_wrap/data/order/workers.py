"""Worker processes that compute items ahead of their use, and return them in order through shared memory.

A worker is forked from the process that uses it, so it needs no import and no pickled argument. It may use neither the
device nor a process group. `concurrent.futures` cannot replace this module: it copies results through a pipe, and a
worker here keeps its own reader of the samples.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import pickle
import signal
import socket
import struct
import tempfile
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from megatron_wrap.errors import TrainingError
from megatron_wrap.utils.process_pool import picklable

_ALIGNMENT = 64
_SIZES = struct.Struct("qq")


class WorkerTraceback(Exception):
    """The traceback of an error that a worker process raised."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


class _Worker(NamedTuple):
    process_id: int
    connection: socket.socket


class _Message(NamedTuple):
    """An item, or the error of the worker that computes it."""

    item: Any = None
    error: Exception | None = None
    traceback: str = ""


class _TensorBytes(NamedTuple):
    """Where a message has a tensor's bytes."""

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
            TrainingError: the worker has died.
            Exception: the one that the worker raised for this item.
        """
        worker = self._workers[self._turn % len(self._workers)]
        try:
            message = _receive(worker.connection, self._pin_memory)
        except (EOFError, ConnectionResetError):
            status = _wait(worker.process_id)
            self.close()
            raise TrainingError(
                f"worker process {worker.process_id} of wrap.batches {_ending(status)}; lower "
                "megatron_wrap.data.num_workers or prefetch_batches if memory is short, or set num_workers: 0 to load "
                "in the training process"
            ) from None
        if message.error is not None:
            self.close()
            raise message.error from WorkerTraceback(message.traceback)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # reported when its next item is missing
            worker.connection.sendall(b".")  # request one more
        self._turn += 1
        return message.item

    def close(self) -> None:
        """End the processes, also in the middle of an item. Only the process that started them can."""
        self._finalizer()


def _fork(items: Callable[[int, int], Iterator[Any]], number: int, count: int) -> _Worker:
    mine, theirs = socket.socketpair()
    collecting = gc.isenabled()
    gc.disable()
    with warnings.catch_warnings():
        # Python 3.12 warns about threads; those of torch and NCCL hold no lock that a worker takes
        warnings.simplefilter("ignore", DeprecationWarning)
        process_id = os.fork()
    if process_id == 0:
        # objects of the parent are never collected here: a process group would wait for a thread that was not forked
        gc.freeze()
        mine.close()
        _work(items, number, count, theirs)
    if collecting:
        gc.enable()
    theirs.close()
    return _Worker(process_id, mine)


def _work(items: Callable[[int, int], Iterator[Any]], number: int, count: int, connection: socket.socket) -> NoReturn:
    """A worker's whole life. It leaves by `os._exit`, so nothing of the parent is closed or written again."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends this process
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        torch.set_num_threads(1)
        gc.enable()
        _serve(items, number, count, connection)
    except OSError:
        pass  # the parent has closed its end
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _serve(items: Callable[[int, int], Iterator[Any]], number: int, count: int, connection: socket.socket) -> None:
    iterator: Iterator[Any] | None = None
    while connection.recv(1):  # empty once the parent has closed its end
        try:
            iterator = items(number, count) if iterator is None else iterator
            content, tensors = _dumps(_Message(next(iterator)))
        except BaseException as error:
            content, tensors = _dumps(_Message(error=picklable(error), traceback=traceback.format_exc()))
            iterator = iter(())
        _send(connection, content, tensors)


# ---- one message: a pickle and its tensors, in one file in memory ----


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
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
    def __init__(self, file: io.BytesIO, flat: Tensor) -> None:
        super().__init__(file)
        self._flat = flat

    def persistent_load(self, stored: _TensorBytes) -> Tensor:
        return self._flat[stored.begin : stored.begin + stored.size].view(stored.dtype).view(stored.shape)


def _dumps(message: _Message) -> tuple[bytes, _Pickler]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(message)
    return file.getvalue(), pickler


def _send(connection: socket.socket, content: bytes, pickler: _Pickler) -> None:
    # not in /dev/shm, which has 64 MB in a container
    descriptor = os.memfd_create("megatron-wrap") if hasattr(os, "memfd_create") else _temporary_file()
    try:
        os.ftruncate(descriptor, pickler.size + len(content))
        begin = 0
        for flat in pickler.tensors:
            _write(descriptor, flat.numpy().data, begin)
            begin += -(-flat.numel() // _ALIGNMENT) * _ALIGNMENT
        _write(descriptor, memoryview(content), begin)
        socket.send_fds(connection, [_SIZES.pack(pickler.size, len(content))], [descriptor])
    finally:
        os.close(descriptor)


def _receive(connection: socket.socket, pin_memory: bool) -> _Message:
    header, descriptors, _, _ = socket.recv_fds(connection, _SIZES.size, 1)
    if len(header) < _SIZES.size or not descriptors:
        raise EOFError
    try:
        tensor_size, content_size = _SIZES.unpack(header)
        flat = torch.empty(tensor_size, dtype=torch.uint8, pin_memory=pin_memory and tensor_size > 0)
        _read(descriptors[0], flat.numpy().data, 0)
        content = bytearray(content_size)
        _read(descriptors[0], memoryview(content), tensor_size)
    finally:
        os.close(descriptors[0])
    message: _Message = _Unpickler(io.BytesIO(content), flat).load()
    return message


def _temporary_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(descriptor: int, data: memoryview, begin: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, begin)
        data, begin = data[written:], begin + written


def _read(descriptor: int, into: memoryview, begin: int) -> None:
    while into:
        read = os.preadv(descriptor, [into], begin)
        if not read:
            raise EOFError
        into, begin = into[read:], begin + read


# ---- the end of a process ----


def _stop(workers: list[_Worker], parent: int) -> None:
    while workers:
        worker = workers.pop()
        worker.connection.close()
        if os.getpid() != parent:  # a process that the parent forked later
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process_id, signal.SIGKILL)
        _wait(worker.process_id)


def _wait(process_id: int) -> int | None:
    """Wait status of a process; None if another thread or library waited for it."""
    try:
        return os.waitpid(process_id, 0)[1]
    except ChildProcessError:
        return None


def _ending(status: int | None) -> str:
    if status is None:
        return "has ended"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        reason = ", as the kernel does when memory runs out" if number == signal.SIGKILL else ""
        return f"was ended by {signal.Signals(number).name}{reason}"
    return f"ended with exit code {os.WEXITSTATUS(status)}"
