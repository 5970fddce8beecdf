"""The process of a rank that writes the files of asynchronous saves, its program, and the host memory with copies of
tensors that it shares with the rank.

It is a new process, because a fork would have the device, the threads and the open ports of the rank. It ends with the
rank, however the rank ends. The memory belongs to a file without a name (memfd_create), so that it disappears with the
last process that uses it, however that ends. On CUDA it is page-locked.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import torch
from torch import Tensor

from megatron_wrap.checkpoint.files.hashed_files import FileToWrite, write_files
from megatron_wrap.errors import CheckpointError
from megatron_wrap.utils.atomic_write import write_atomically

_PROGRAM = "import sys; from megatron_wrap.checkpoint.files.writer_process import main; main(*map(int, sys.argv[1:]))"

_PARENT_SECONDS, _ALIVE_SECONDS = 0.5, 1.0

_ALIGNMENT = 512


@dataclass(frozen=True)
class WriteJob:
    """The files that a rank writes for one checkpoint."""

    folder: Path
    record: str
    """Name of the file that is written last: JSON with the position and size of each part and the hashes."""
    files: tuple[FileToWrite, ...]
    """Files to write, whose tensors are `CopiedTensor`s."""
    memory_bytes: int
    """Size of the shared buffer in bytes."""


class Writer:
    """The process, started at its first job. One job at a time.

    Args:
        memory: descriptor of the buffer with the tensors.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_busy = False
        self._lock = threading.RLock()

    @property
    def process_id(self) -> int | None:
        """Id of the process; None if there is none."""
        return None if self._process is None else self._process.pid

    def start(self, job: WriteJob) -> None:
        """Begin to write; returns at once. A process that has died is started again.

        Raises:
            OSError: there is no process.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._launch()
            assert self._connection is not None
            self._is_busy = True
            self._connection.send(job)

    def finished(self, timeout: float | None) -> str | None:
        """Result of the job: an error, or an empty text; None while it is being written.

        Args:
            timeout: seconds to wait; None: until the end.
        """
        with self._lock:
            if not self._is_busy or self._connection is None or self._process is None:
                return ""
            try:
                if not self._connection.poll(timeout):
                    return None
                result = str(self._connection.recv())
            except (OSError, EOFError):
                result = f"the process that writes checkpoints has ended ({_reason(self._process.wait())})"
            self._is_busy = False
            return result

    def close(self) -> None:
        """End the process, also in the middle of a job."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            self._process, self._connection, self._is_busy = None, None, False

    def _launch(self) -> None:
        connection, process_end = Pipe()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        with process_end:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(process_end.fileno()), str(self._memory), str(os.getpid())],
                env=environment,
                pass_fds=(process_end.fileno(), self._memory),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C ends the rank, which waits for this process
            )
        self._connection = connection


@dataclass(frozen=True)
class CopiedTensor:
    """Position of a tensor's values in the buffer, where they are contiguous."""

    offset: int
    """Offset of the first value, in bytes."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the values in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def tensor(self, memory: mmap.mmap) -> Tensor:
        """The values in the buffer, with a storage of their own size."""
        if not self.num_bytes:
            return torch.empty(self.shape, dtype=self.dtype)
        values = torch.frombuffer(memory, dtype=torch.uint8, count=self.num_bytes, offset=self.offset)
        return values.view(self.dtype).view(self.shape)


class HostCopy:
    """The buffer, in the process that fills it.

    Args:
        device: of the tensors.
        processes: number of processes on this host that make such a copy at the same time.
    """

    def __init__(self, device: torch.device, processes: int) -> None:
        self._device, self._processes = device, processes
        self.descriptor = os.memfd_create("checkpoint copy")
        self.num_bytes = 0
        """Size of the buffer in bytes."""
        self._memory: mmap.mmap | None = None
        self._locked = 0
        """Address of the page-locked memory; 0: none."""

    def take(self, tensors: Sequence[Tensor]) -> list[CopiedTensor]:
        """Overwrite the buffer, which grows as needed, with copies of the tensors. When this returns, the copy is
        complete and the tensors may change.

        Raises:
            CheckpointError: the host has too little free memory.
        """
        copies, end = [], 0
        for tensor in tensors:
            copies.append(CopiedTensor(end, tuple(tensor.shape), tensor.dtype))
            end += -(-copies[-1].num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._grow(end)
        if self._memory is not None:
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.tensor(self._memory).copy_(tensor, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return copies

    def close(self) -> None:
        """Release the memory."""
        self._unlock()
        self._memory = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _grow(self, num_bytes: int) -> None:
        if num_bytes <= self.num_bytes:
            return
        needed, available = (num_bytes - self.num_bytes) * self._processes, available_memory()
        if needed > available:
            raise CheckpointError(
                f"the copy for asynchronous saves needs {needed / 2**30:.1f} GiB more memory on this host, which has "
                f"{available / 2**30:.1f} GiB available; set megatron_wrap.checkpoint.async_save: false"
            )
        self._unlock()
        os.ftruncate(self.descriptor, num_bytes)
        self._memory = mmap.mmap(self.descriptor, num_bytes)
        self.num_bytes = num_bytes
        if self._device.type == "cuda":
            address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
            if int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)) != 0:
                raise CheckpointError(
                    f"{num_bytes / 2**30:.1f} GiB of host memory for asynchronous saves cannot be page-locked; raise "
                    "the limit of locked memory (ulimit -l), or set megatron_wrap.checkpoint.async_save: false"
                )
            self._locked = address

    def _unlock(self) -> None:
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._locked)
            self._locked = 0


def available_memory() -> int:
    """Bytes that this host can provide without swapping, or its control group if that is less."""
    import psutil

    available: int = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no control group, or no limit ("max")
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(statistics.get("inactive_file", 0))
        available = min(available, int((group / "memory.max").read_text()) - used)
    return available


def main(connection: int, memory: int, rank_process: int) -> None:
    """Write the jobs that arrive, until the rank ends.

    Args:
        connection: descriptor of the pipe to the rank.
        memory: descriptor of the buffer with the tensors.
        rank_process: id of the rank's process.
    """
    pipe = Connection(connection)
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, jobs, rank_process), daemon=True).start()
    while True:
        job: WriteJob = pickle.loads(jobs.get())
        with _alive(job.folder / f"{job.record}.part"):  # which becomes the record
            result = _result(job, memory)
        pipe.send(result)


def _receive(pipe: Connection, jobs: queue.SimpleQueue[bytes], rank_process: int) -> None:
    """Receive jobs also while one is written, so that the end of the rank ends this process at once.

    Forked processes of the rank have a copy of its end of the pipe, which keeps the pipe open after the rank.
    """
    while os.getppid() == rank_process:
        try:
            if pipe.poll(_PARENT_SECONDS):
                jobs.put(pipe.recv_bytes())
        except (OSError, EOFError):
            break
    os._exit(0)


@contextlib.contextmanager
def _alive(file: Path) -> Iterator[None]:
    """Context in which the modification time of the file advances, so that an ending rank 0 waits for this process."""
    ends = threading.Event()

    def touch() -> None:
        while not ends.wait(_ALIVE_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(file)

    with contextlib.suppress(OSError):
        file.touch()
    thread = threading.Thread(target=touch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def _result(job: WriteJob, memory: int) -> str:
    """Result of a job: an error, or an empty text."""
    try:
        write(job, memory)
    except OSError as error:
        return str(error)
    except Exception as error:  # the rank raises it
        return f"{type(error).__name__}: {error}"
    return ""


def write(job: WriteJob, memory: int) -> None:
    """Write the files of a job, and then its record.

    Raises:
        OSError: a file cannot be written.
    """
    buffer = mmap.mmap(memory, job.memory_bytes, access=mmap.ACCESS_WRITE) if job.memory_bytes else None
    record = write_files(job.folder, job.files, lambda copy: copy.tensor(buffer))
    write_atomically(job.folder / job.record, json.dumps(record))


def _reason(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
