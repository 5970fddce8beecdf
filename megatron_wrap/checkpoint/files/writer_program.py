"""Program of the process that writes the files of asynchronous saves: writes, hashes, flushes to disk, reports."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import pickle
import queue
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from megatron_wrap.checkpoint.files.write_tensor_files import write_files
from megatron_wrap.checkpoint.files.writer_process import WriteJob
from megatron_wrap.utils.atomic_write import write_atomically

_PARENT_SECONDS, _ALIVE_SECONDS = 0.5, 1.0


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
