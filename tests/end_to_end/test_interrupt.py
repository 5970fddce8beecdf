"""Signals at a run on several processes, and its end with the program that started it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from _launcher import Launcher, wait_for


@pytest.mark.matrix
def test_signals_save_and_the_run_continues(tmp_path: Path) -> None:
    run = Launcher(tmp_path)
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does
    code, lines = run.end()
    resumes = "the same command resumes from it"
    of_iteration = (
        f"after iteration {run.saved} of 100000; newest checkpoint: checkpoints/iter_{run.saved:07d}; {resumes}"
    )
    announced = "the run saves after this step and ends"
    assert (code, lines) == (
        130,
        [f"Ctrl-C: {announced}; a second Ctrl-C ends it at once", f"interrupted {of_iteration}"],
    )
    interrupted = run.saved

    run = Launcher(tmp_path)
    os.kill(run.ranks[1], signal.SIGUSR1)
    code, lines = run.end()
    assert run.saved > interrupted
    of_iteration = (
        f"after iteration {run.saved} of 100000; newest checkpoint: checkpoints/iter_{run.saved:07d}; {resumes}"
    )
    assert (code, lines) == (75, [f"stopped by SIGUSR1 {of_iteration}"])


@pytest.mark.matrix
def test_a_second_run_is_refused_a_run_ends_with_its_launcher_and_a_stopped_process_is_named(tmp_path: Path) -> None:
    run = Launcher(tmp_path)
    refused = run.refused()
    assert refused.startswith("error: outputs/tiny-llama-mock is in use by another run, process "), refused
    os.kill(run.process.pid, signal.SIGKILL)
    wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in run.ranks), 60)
    assert not any(Path(f"/proc/{rank}").exists() for rank in run.ranks)
    assert run.saved >= 1
    assert run.end()[0] == -signal.SIGKILL

    run = Launcher(tmp_path, "megatron_wrap.init.stopped_process_seconds=8")
    time.sleep(2)  # until a process has said where it is, once a second, since its first step
    os.kill(run.ranks[1], signal.SIGSTOP)
    code, lines = run.end()
    report = "outputs/tiny-llama-mock/failure.json"
    assert code == 1
    assert re.fullmatch(
        rf"error: rank 1 \(process {run.ranks[1]} on .*, iteration \d+(, [a-z ]+)?\) is stopped: no sign of life for "
        rf"\d+ s; {report} has the state of all; outputs/tiny-llama-mock/logs has the messages of each rank",
        lines[-1],
    )
    failure = json.loads((tmp_path / report).read_text())
    assert (failure["rank"], failure["process"]) == (1, run.ranks[1])
    assert [state["rank"] for state in failure["processes"]] == [0, 1]
    assert "train_step" in failure["stacks"]["0"]


STUCK = """
import os
import time
from megatron_wrap.flow import MegatronWrapMinimalMockFlow


class Stuck(MegatronWrapMinimalMockFlow):
    begin, calls = None, 0

    def calculate_loss(self, loss_inputs, model_forward_output):
        Stuck.begin, Stuck.calls = Stuck.begin or time.monotonic(), Stuck.calls + 1
        while os.environ["RANK"] == "1" and Stuck.calls > 20 and time.monotonic() > Stuck.begin + 4:
            pass
        return super().calculate_loss(loss_inputs, model_forward_output)
"""


@pytest.mark.matrix
def test_a_process_without_progress_is_named_with_its_location_and_all_have_stacks(tmp_path: Path) -> None:
    (tmp_path / "stuck_flow.py").write_text(STUCK)
    flow = ("megatron_wrap.flow.__select__=custom", "megatron_wrap.flow.flow_key=stuck_flow:Stuck")
    run = Launcher(tmp_path, *flow, "megatron_wrap.init.stopped_process_seconds=5")
    code, lines = run.end()
    assert code == 1
    assert re.match(
        rf"error: rank 1 \(process {run.ranks[1]} on .*, iteration \d+, forward and backward\) is stuck: no progress "
        rf"for \d+ s; it is in .*stuck_flow.py, line 1[23], in calculate_loss; ",
        lines[-1],
    ), lines
    failure = json.loads((tmp_path / "outputs/tiny-llama-mock/failure.json").read_text())
    assert "calculate_loss" in failure["stacks"]["1"]
    assert "train_step" in failure["stacks"]["0"]
    [waits_for] = failure["collectives"]["0"]["pending"]
    assert "gloo:all" in waits_for
    assert failure["collectives"]["1"]["pending"] == []
    assert Path(tmp_path, failure["collectives"]["1"]["file"]).exists()
