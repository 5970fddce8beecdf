"""Interrupts of a process."""

import os
import signal
import sys
import threading
import time

import pytest
import torch

from megatron_wrap.errors import ExitInRun
from megatron_wrap.metrics.phases import current_phase, doing
from megatron_wrap.parallel.launch import exit_on_user_error
from megatron_wrap.parallel.watch.ending import INTERRUPTED, InterruptWatch


def test_a_main_thread_that_is_blocked_does_not_delay_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    process = os.fork()
    if process == 0:
        os.environ["RANK"] = "0"
        signal.signal(signal.SIGINT, signal.default_int_handler)
        InterruptWatch(lambda: "interrupted after iteration 3", seconds=0.05)
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        torch.futures.Future().wait()  # never returns to Python, as a wait for the device
        os._exit(0)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == INTERRUPTED == 130
    assert capfd.readouterr().err == "interrupted after iteration 3\n"


def test_a_main_thread_that_reacts_ends_the_watch(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    watch = InterruptWatch(lambda: "late", seconds=0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        watch.close()
        watch.close()
        time.sleep(0.15)
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr().err == ""
    assert signal.set_wakeup_fd(-1) == -1


def _interrupt_twice() -> None:
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        os.kill(os.getpid(), signal.SIGINT)  # of torchrun's agent


def test_an_entry_point_prints_an_interrupt_once_and_exits(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as end, exit_on_user_error():
            _interrupt_twice()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert end.value.code == 130
    assert capfd.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(("code", "number"), [(None, 0), (0, 0), (256, 0), (3, 3), ("a reason", 1)])
def test_an_exit_within_a_step_is_an_error_without_a_launcher_too(
    code: object, number: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "TORCHELASTIC_ERROR_FILE", "MEGATRON_WRAP_LAUNCHER_FOLDER"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as end, exit_on_user_error(), doing("optimizer"), doing("loss"):
        sys.exit(code)  # type: ignore[arg-type]
    assert end.value.code == 1
    assert isinstance(end.value.__context__, ExitInRun)
    assert end.value.__context__.requested == number
    printed = capfd.readouterr().err
    assert printed.startswith(f"error: exit code {number}")
    assert f"{__file__}, line " in printed
    assert "during optimizer" in printed
    assert current_phase() == "optimizer"
    with pytest.raises(SystemExit) as end, exit_on_user_error():
        sys.exit(3)  # by the program itself
    assert end.value.code == 3
