"""Reports about failed processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megatron_wrap.launch.process_watch import ProcessWatch
from megatron_wrap.parallel.heartbeat import Heartbeat

PROCESS = """
import sys
from pathlib import Path
from megatron_wrap.parallel.heartbeat import Heartbeat
import time
heartbeat = Heartbeat(Path(sys.argv[1]), int(sys.argv[2]), lambda: (7, "save"))
exec(compile("time.sleep(120)", "main thread waits here", "exec"))
"""


def test_a_failure_is_reported_with_what_each_process_said_last(tmp_path: Path) -> None:
    report = tmp_path / "outputs" / "failure.json"
    report.parent.mkdir()
    report.write_text("of an earlier run")
    watch = ProcessWatch(tmp_path, range(2), report, None)
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


def test_a_stopped_process_is_named_and_killed_and_the_others_show_their_stacks(tmp_path: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", PROCESS, str(tmp_path), str(rank)]) for rank in range(2)]
    stopped = processes[1]
    try:
        while not all((tmp_path / f"rank_{rank}.json").exists() for rank in range(2)):
            time.sleep(0.05)
        watch = ProcessWatch(tmp_path, range(2), tmp_path / "failure.json", 5)
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
