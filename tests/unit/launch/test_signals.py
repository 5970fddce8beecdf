"""Signals at the program that started a run's processes."""

from __future__ import annotations

import os
import signal
import time

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from megatron_wrap.launch.signals import LauncherSignals, exit_code_of
from megatron_wrap.parallel.watch.stop_requests import LAUNCHER_FOLDER, READY, REQUEST, STOPPED


def test_before_training_a_signal_ends_the_processes_at_once() -> None:
    with LauncherSignals(None) as signals:
        assert os.environ[LAUNCHER_FOLDER] == str(signals.folder)
        with pytest.raises(SignalException) as end:
            os.kill(os.getpid(), signal.SIGTERM)
    assert (end.value.sigval, exit_code_of(end.value.sigval)) == (signal.SIGTERM, 75)
    assert LAUNCHER_FOLDER not in os.environ
    assert not signals.folder.exists()


def test_in_training_it_is_a_request_until_the_time_for_the_save_is_over(capfd: pytest.CaptureFixture[str]) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with LauncherSignals(0.2) as signals:
        (signals.folder / READY).touch()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (signals.folder / REQUEST).read_text() == str(int(signal.SIGTERM))
        with pytest.raises(SignalException) as end:
            time.sleep(10)
        assert (end.value.sigval, exit_code_of(end.value.sigval)) == (signal.SIGKILL, 137)
        assert not signals.stopped
        (signals.folder / STOPPED).touch()
        assert signals.stopped
    assert signal.getsignal(signal.SIGTERM) is handler
    assert capfd.readouterr().err == "SIGTERM: the run saves after this step and ends\n"
