"""Runs of pytest, each in a process forked from one that has imported what the tests import: torch, Megatron-Core, trl
and peft take ten seconds of a processor, which each part of scripts/run_tests.sh would spend.

    python scripts/pytest_server.py serve SOCKET [further modules to import]     until it is ended
    python scripts/pytest_server.py run SOCKET [pytest arguments]
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pathlib
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

IGNORED = ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
"""Options that hide the warning about a plug-in of a package that trl imports; no test's asserts are in it."""

FIRST = "wandb.apis.public"
"""Module to import first. Its pydantic searches all imported modules for the source of each of its classes: this takes
a second among few modules, and six seconds after the others."""


def serve(path: str, modules: list[str]) -> None:
    """Answer each connection with the exit code of pytest, run with its arguments and its standard output and error."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()  # a connection made during the imports waits
        import_all(modules)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forked processes
        while True:
            connection = server.accept()[0]
            with connection:
                if os.fork() == 0:
                    server.close()
                    answer(connection)


def import_all(modules: list[str]) -> None:
    """Import what the tests import, and keep the objects of it out of garbage collections."""
    sys.path[0] = os.getcwd()  # as for `python -m pytest`
    importlib.import_module(FIRST)
    from megatron_wrap.testing.ranks import import_for_ranks

    import_for_ranks()
    for name in ("pytest", *modules):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    use_huge_pages()


def use_huge_pages() -> None:
    """Move this process's memory to pages of 2 MiB, where Linux can. A fork and its end then take a fifth of the time:
    they process the pages of 400 MB of modules, and most tests of a run are in a forked process."""
    if sys.platform != "linux":
        return
    madvise, page, collapse = ctypes.CDLL(None).madvise, 2**21, 25  # MADV_COLLAPSE, of Linux 6.1
    for line in pathlib.Path("/proc/self/maps").read_text("utf-8").splitlines():
        addresses, access, _, _, file, *_ = line.split()
        start, end = (int(address, 16) for address in addresses.split("-"))
        start, end = -(-start // page) * page, end // page * page
        if access.startswith("rw") and file == "0" and start < end:
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), collapse)  # what fails stays as it is


class HugePages:
    """Plug-in of pytest that moves the memory which the server's own writes have changed to pages of 2 MiB again,
    before many tests are forked from it. Each fork then takes two thirds of the time."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if sum(item.get_closest_marker("process_group") is not None for item in session.items) > 50:
            use_huge_pages()


def answer(connection: socket.socket) -> None:
    """Run pytest in another process, which pytest may end itself, and send the exit code; called in a forked
    process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    arguments, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 2)
    for descriptor, standard in zip(descriptors, (1, 2), strict=True):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    child = os.fork()
    if child == 0:
        import pytest

        connection.close()
        sys.argv = ["pytest", *arguments.decode().split("\0")]
        code = int(pytest.main([*IGNORED, *sys.argv[1:]], plugins=[HugePages()]))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    connection.sendall(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
    os._exit(0)


def run(path: str, arguments: list[str]) -> int:
    """Run pytest on the server; returns its exit code."""
    with socket.socket(socket.AF_UNIX) as connection:
        deadline = time.monotonic() + 60
        while connection.connect_ex(path) != 0:  # the server begins at the same time
            if time.monotonic() > deadline:
                raise TimeoutError(f"no server at {path}")
            time.sleep(0.1)
        socket.send_fds(connection, ["\0".join(arguments).encode()], [1, 2])
        code = connection.recv(16)
    if not code:
        raise ConnectionError(f"the server at {path} ended without an answer")
    return int(code)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(run(sys.argv[2], sys.argv[3:]))
