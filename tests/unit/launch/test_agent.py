"""How the processes of a run end, and the launcher's exit code: an exit code counts as the run recorded it.

The programs are those of a rank without a model: their state, and `exit_on_user_error` around them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from _interpreters import forked_interpreters
from torch.distributed.elastic.multiprocessing import SignalException

from megatron_wrap.config import load_run_config
from megatron_wrap.launch.agent import LauncherSignals, exit_code_of, launch_processes
from megatron_wrap.launch.interface import Nodes
from megatron_wrap.parallel.watch.stop_requests import LAUNCHER_FOLDER, READY, REQUEST, STOPPED

ROOT = Path(__file__).parents[3]
RUN = """
import os, sys, threading, time
from megatron_wrap.metrics.phases import current_phase, doing
from megatron_wrap.parallel.launch import exit_on_user_error
from megatron_wrap.parallel.watch import heartbeat
from megatron_wrap.parallel.watch.ending import record_end
last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
iteration = [1]
beats = heartbeat.begin(int(os.environ["RANK"]), lambda: (iteration[0], current_phase()))
with exit_on_user_error():
    for iteration[0] in range(1, 9):
        with doing("forward and backward"):
            if last and iteration[0] == 5:
                {inside}
        if last and iteration[0] == 5:
            {outside}
    beats.close()
{after}
"""


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores those that the launcher sets."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)


def ended(
    folder: Path, inside: str = "", outside: str = "", after: str = "", ranks: int = 1, is_script: bool = False
) -> tuple[int, dict[str, Any]]:
    """The launcher's exit code, and the content of failure.json.

    Args:
        inside, outside: what the last rank does in step 5, and after it; the others wait for it in step 8.
        after: what each rank does after the run.
    """
    overrides = ("megatron_wrap.init.platform=cpu", "megatron_wrap.init.stopped_process_seconds=1")
    config = load_run_config(
        str(ROOT / "configs/tiny-llama-mock.yaml"), [*overrides, f"megatron_wrap.logger.output_dir={folder}"]
    )
    code = RUN.format(inside=inside or "pass", outside=outside or "pass", after=after)
    if ranks > 1:
        code = code.replace("for iteration[0]", "if not last: time.sleep(120)\n    for iteration[0]")
    with forked_interpreters(), LauncherSignals(None) as signals:
        exit_code = launch_processes(
            Nodes(ranks, 1, 0, "127.0.0.1", 0), ["-c", code], config, signals, own_exit_codes=is_script
        )
    report = folder / "failure.json"
    return exit_code, json.loads(report.read_text()) if report.exists() else {}


@pytest.mark.parametrize(
    ("leaving", "ranks", "process_code", "exit_code"),
    [
        ("sys.exit(0)", 1, 0, 1),
        ("os._exit(0)", 1, 0, 1),
        ("sys.exit(256)", 1, 0, 1),
        ("sys.exit(75)", 1, 75, 1),
        ("os._exit(130)", 1, 130, 1),
        ("sys.exit(3)", 1, 3, 3),
        ("sys.exit(0)", 2, 0, 1),
        ("os._exit(0)", 2, 0, 1),
        ("os._exit(2)", 2, 2, 1),
        ("os._exit(75)", 2, 75, 1),
    ],
)
def test_a_rank_that_leaves_within_a_step_is_a_failure_with_its_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], leaving: str, ranks: int, process_code: int, exit_code: int
) -> None:
    began = time.monotonic()
    code, failure = ended(tmp_path, inside=leaving, ranks=ranks)
    assert (code, failure["rank"], failure["iteration"]) == (exit_code, ranks - 1, 5)
    assert failure["phase"] == "forward and backward"
    assert failure["exit_codes"][str(ranks - 1)] == process_code
    assert f"ended with exit code {process_code}" in failure["cause"]
    assert (f"exit code {process_code} of " in failure["message"]) == leaving.startswith("sys")
    assert f"error: rank {ranks - 1} (process {failure['process']} on " in capfd.readouterr().err
    assert time.monotonic() - began < 60, "the others were ended, not waited for"


def test_a_script_has_its_own_exit_code_outside_of_steps_alone(tmp_path: Path) -> None:
    assert ended(tmp_path, outside="sys.exit(0)", is_script=True) == (0, {})
    code, failure = ended(tmp_path, outside="os._exit(75)", is_script=True)
    assert (code, failure["exit_codes"]) == (75, {"0": 75}), "its own code, and no stop that the run has recorded"
    code, failure = ended(tmp_path, inside="os._exit(0)", is_script=True)
    assert (code, failure["exit_codes"]) == (1, {"0": 0})
    code, failure = ended(tmp_path, inside="sys.exit(0)", is_script=True)
    assert (code, failure["exit_codes"]) == (1, {"0": 0})


def test_ends_that_the_run_has_recorded_are_no_failures(tmp_path: Path) -> None:
    assert ended(tmp_path, ranks=1) == (0, {})
    assert ended(tmp_path, outside="record_end(75); sys.exit(75)") == (75, {})
    assert ended(tmp_path, outside="raise KeyboardInterrupt") == (130, {})
    refused = "from megatron_wrap.errors import DataError; raise DataError('row 3')"
    assert ended(tmp_path, outside=refused) == (2, {})
    code, failure = ended(tmp_path, after="os._exit(4)")
    assert (code, failure["exit_codes"]) == (4, {"0": 4}), "after the record"


def test_what_holds_a_process_after_the_run_is_named_and_a_scripts_own_work_is_not_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "holder.py").write_text("import time\ndef hold():\n    time.sleep(100)\n")
    thread = f"sys.path.insert(0, {str(tmp_path)!r}); import holder; threading.Thread(target=holder.hold).start()"
    assert ended(tmp_path, after=thread) == (0, {})
    assert f"rank 0 has not ended for 1 s after its run; it is in {tmp_path}/holder.py, line 3, in hold; " in (
        capfd.readouterr().err
    )
    assert ended(tmp_path, after="time.sleep(4)", is_script=True) == (0, {})


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
