"""A lock that processes of one machine share."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from megatron_wrap.utils.file_lock import locked


def test_processes_hold_a_lock_in_turn_and_a_killed_one_holds_none(tmp_path: Path):
    lock, order = tmp_path / "lock", tmp_path / "order"
    child = os.fork()
    if child == 0:
        with locked(lock, "writes"):
            order.write_text("child")
            time.sleep(60)
        os._exit(0)
    while not order.exists():
        time.sleep(0.01)
    waiting = os.fork()
    if waiting == 0:
        with locked(lock, "writes"):
            os._exit(0)
    time.sleep(0.1)
    assert os.waitpid(waiting, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert os.waitpid(waiting, 0)[1] == 0
    with locked(lock, "writes"):
        pass
