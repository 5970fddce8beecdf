"""The process of a rank that writes the files of asynchronous saves; `writer_program` is its program.

It is a new process, because a fork would have the device, the threads and the open ports of the rank. It ends with the
rank, however the rank ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from megatron_wrap.checkpoint.files.write_tensor_files import FileToWrite

_PROGRAM = "import sys; from megatron_wrap.checkpoint.files.writer_program import main; main(*map(int, sys.argv[1:]))"


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
        ours, theirs = Pipe()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(self._memory), str(os.getpid())],
                env=environment,
                pass_fds=(theirs.fileno(), self._memory),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C ends the rank, which waits for this process
            )
        self._connection = ours


def _reason(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
