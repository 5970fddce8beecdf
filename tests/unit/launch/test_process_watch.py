"""Reports about failed processes."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from _forked import run_forked
from torch.distributed.flight_recorder.components import loader

from megatron_wrap.launch.process_records import ProcessRecords
from megatron_wrap.launch.process_watch import ProcessWatch, Stall
from megatron_wrap.parallel.watch import flight_recorder
from megatron_wrap.parallel.watch.ending import LAUNCHER_FOLDER, record_end
from megatron_wrap.parallel.watch.heartbeat import Heartbeat

PROCESS = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
from pathlib import Path
from megatron_wrap.parallel.watch.heartbeat import Heartbeat
import time
heartbeat = Heartbeat(Path(sys.argv[1]), int(sys.argv[2]), lambda: (7, "save"))
exec(compile("time.sleep(120)", "main thread waits here", "exec"))
"""


def test_a_failure_is_reported_with_what_each_process_said_last(tmp_path: Path) -> None:
    report = tmp_path / "outputs" / "failure.json"
    report.parent.mkdir()
    report.write_text("of an earlier run")
    watch = ProcessWatch(ProcessRecords(tmp_path), range(2), report, None)
    assert not report.exists()
    heartbeat = Heartbeat(tmp_path, 0, lambda: (3, "optimizer"))
    state = tmp_path / "rank_0.json"
    while not state.exists():
        time.sleep(0.01)
    heartbeat.close()
    sentence = watch.failed({0: -signal.SIGKILL, 1: 1}, 0, "message of the error")
    assert sentence.startswith(f"rank 0 (process {os.getpid()} on ")
    assert sentence.endswith(
        f", iteration 3, optimizer) was ended by SIGKILL, as the kernel does when memory runs out; {report} has the "
        "state of all"
    )
    written = json.loads(report.read_text())
    assert (written["rank"], written["iteration"], written["phase"]) == (0, 3, "optimizer")
    assert (written["message"], written["exit_codes"]) == ("message of the error", {"0": -9, "1": 1})
    assert written["processes"][1] == {"rank": 1}  # it has said nothing


def test_a_signal_is_the_cause_only_of_a_process_that_has_recorded_no_error(tmp_path: Path) -> None:
    for message, cause in (("message of the error", "ended with exit code 1"), ("", "was ended by SIGTERM")):
        watch = ProcessWatch(ProcessRecords(tmp_path), range(2), tmp_path / "failure.json", None)
        assert f") {cause}; " in watch.failed({0: 1, 1: -signal.SIGTERM}, 1, message)


def test_a_killed_process_leaves_the_stacks_of_the_others_and_one_that_ends_well_does_not(tmp_path: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", PROCESS, str(tmp_path), str(rank)]) for rank in range(3)]
    report = tmp_path / "failure.json"
    watch = ProcessWatch(ProcessRecords(tmp_path), range(3), report, 5)
    try:
        while not all((tmp_path / f"rank_{rank}.json").exists() for rank in range(3)):
            time.sleep(0.05)
        time.sleep(1.5)  # until the watch has read them
        processes[2].send_signal(signal.SIGTERM)
        assert processes[2].wait(60) == 0
        processes[1].kill()
        stacks = tmp_path / "rank_0.stacks"
        while not stacks.stat().st_size:
            time.sleep(0.01)
        time.sleep(0.2)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    watch.failed({0: -9, 1: -9}, 1, "", {0: "its traceback", 1: "of the first", 2: ""})
    written = json.loads(report.read_text())
    assert list(written["stacks"]) == ["0"]
    assert written["stacks"]["0"].count("main thread waits here") == 1
    assert (written["traceback"], written["tracebacks"]) == ("of the first", {"0": "its traceback"})


def states(iteration: int, phase: str, *progress: int) -> list[dict[str, object]]:
    return [{"iteration": iteration, "phase": phase, "progress": number} for number in progress]


def test_a_step_without_progress_counts_beyond_the_limit_and_the_longest_pause() -> None:
    stall = Stall(5)
    assert stall.update([None, *states(1, "data", 1)], 1) is None  # one has said nothing
    for second in range(500):
        assert stall.update(states(3, "forward and backward", 1, 1), 1) is None, second  # kernels are compiled
    for iteration in (4, 5):
        assert stall.update(states(iteration, "data", iteration, 1), 1) is None
    for _ in range(60):
        assert stall.update(states(5, "save", 6, 1), 1) is None
        assert stall.update(states(5, "", 6, 1), 1) is None
    assert [stall.update(states(6, "optimizer", 7, 2), 1) for _ in range(7)] == [None] * 5 + [5, None]
    assert stall.update(states(6, "optimizer", 8, 2), 1) is None  # it continues after all, one second later
    assert stall.update(states(7, "optimizer", 9, 3), 3) is None
    assert [stall.update(states(7, "optimizer", 9, 3), 4) for _ in range(3)] == [None, None, 12]  # ten times one second
    data = [*states(8, "optimizer", 10), *states(8, "data", 4)]
    assert [stall.update(data, 100) for _ in range(8)] == [None] * 6 + [600, None]


@pytest.mark.process_group
def test_the_collectives_of_a_process_are_read_from_torchs_file(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from megatron_wrap.parallel.watch import flight_recorder
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for size in (3, 5):
    dist.all_reduce(torch.ones(size))
work = dist.all_gather([torch.ones(2, 4)], torch.ones(2, 4), async_op=True)
Path(sys.argv[1]).write_bytes(flight_recorder.record())
"""
    file = tmp_path / "rank_0"
    done = run_forked(program, file)
    assert done.returncode == 0, done.stderr
    assert len(loader.read_dump("rank_", str(file))["entries"]) == 3  # what torchfrtrace reads
    content = pickle.loads(file.read_bytes())
    for entry, retired in zip(content["entries"], (True, True, False), strict=True):
        entry["retired"] = retired
    [pending] = flight_recorder.pending(pickle.dumps(content))
    assert pending == "gloo:all_gather of [2, 4], number 3 of group default_pg, scheduled"
    with pytest.raises(pickle.UnpicklingError, match="plain value"):
        flight_recorder.pending(pickle.dumps(Path(".")))
    with pytest.raises(pickle.UnpicklingError):
        flight_recorder.pending(b"no pickle")


def test_a_stopped_process_is_named_and_killed_and_the_others_show_their_stacks(tmp_path: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", PROCESS, str(tmp_path), str(rank)]) for rank in range(2)]
    stopped = processes[1]
    try:
        while not all((tmp_path / f"rank_{rank}.json").exists() for rank in range(2)):
            time.sleep(0.05)
        watch = ProcessWatch(ProcessRecords(tmp_path), range(2), tmp_path / "failure.json", 5)
        os.kill(stopped.pid, signal.SIGSTOP)
        assert stopped.wait(60) == -signal.SIGKILL
        sentence = watch.failed({0: 1, 1: -9}, 0, "")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert f"rank 1 (process {stopped.pid} on " in sentence
    assert ", iteration 7, save) is stopped: no sign of life for " in sentence
    assert "main thread waits here" in json.loads((tmp_path / "failure.json").read_text())["stacks"]["0"]


def test_a_silent_process_that_had_ended_before_the_signal_has_its_own_exit_code(tmp_path: Path) -> None:
    code = PROCESS.replace("exec(", 'from megatron_wrap.metrics.phases import doing\nwith doing("save"): exec(')
    code = f"import os{code.replace('sys.exit(0)', 'os._exit(0)')}"
    programs = [[sys.executable, "-c", code, str(tmp_path), str(rank)] for rank in range(2)]
    with subprocess.Popen(programs[0]) as other, subprocess.Popen(programs[1]) as leaving:
        records = ProcessRecords(tmp_path)
        watch = ProcessWatch(records, range(2), tmp_path / "failure.json", None)
        while not all((records.state(rank) or {}).get("inside") for rank in range(2)):
            time.sleep(0.01)
        watch._stopped = 1, "does not run: no sign of life for 60 s"
        leaving.terminate()  # it ends with exit code 0, for which torchrun's agent ends no other
        try:
            assert other.wait(30) == -signal.SIGKILL
        finally:
            other.kill()
    assert watch.failed({0: -signal.SIGKILL, 1: 0}, 1, "").startswith("rank 1 (process ")
    assert json.loads((tmp_path / "failure.json").read_text())["cause"].startswith("ended with exit code 0")


def test_nccls_watchdog_writes_into_the_launchers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    monkeypatch.delenv("TORCH_FR_DUMP_TEMP_FILE", raising=False)
    with flight_recorder.written_into(tmp_path):
        assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "collectives_")
        assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7"
    assert "TORCH_FR_DUMP_TEMP_FILE" not in os.environ
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7"


def test_the_end_of_a_run_is_recorded_on_a_full_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, *arguments: object, **options: object) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv(LAUNCHER_FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    records = ProcessRecords(tmp_path, own_exit_codes=False)
    monkeypatch.setattr(Path, "write_text", write)
    for code in (75, 0):
        assert not records.has_recorded(1, code)
        record_end(code)
        assert records.has_recorded(1, code)
    record_end(None, "an error")
    assert not records.accounts_for(1, 0)
