"""`--launcher kubernetes` with a stub of kubectl."""

from __future__ import annotations

from pathlib import Path

import pytest
from _kubectl import StubKubectl, pod, train_job

from megatron_wrap.bridge.loading.hub import read_run
from megatron_wrap.cli.main import main
from megatron_wrap.errors import PlatformError
from megatron_wrap.launch import kubernetes
from megatron_wrap.launch.interface import Nodes, nodes_of

CONFIG = Path(__file__).parents[3] / "configs" / "tiny-llama-mock.yaml"
SAVED = "stopped by SIGTERM after iteration 4 of 10"
"""A line of a run."""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Plays a job's life, and returns the exit code of the command that submits and follows it, and the calls."""
    monkeypatch.setattr(kubernetes, "_POLL_SECONDS", 0.01)

    numbers = iter(range(9))

    def run(scenes, logs=None, errors=None, wait=True):
        stub = StubKubectl(tmp_path / f"bin{next(numbers)}", scenes, logs or {}, errors or {})
        monkeypatch.setenv("PATH", str(stub.folder), prepend=":")
        words = ["train", str(CONFIG), "--launcher", "kubernetes", *(["--wait"] if wait else [])]
        settings = [f"megatron_wrap.logger.output_dir={tmp_path}", "megatron_wrap.launch.kubernetes.namespace=research"]
        return main([*words, *settings]), stub.calls

    return run


def test_a_run_is_followed_over_an_interruption_to_its_end(command, capfd):
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    running, waiting = train_job(), pod(0, 0, "Pending", conditions=[unschedulable])
    stopped = pod(0, 0, "Failed", 75)
    scenes = [
        (None, []),
        (running, []),
        (running, [waiting]),
        (running, [pod(0, 0, "Running")]),
        (running, [stopped, pod(0, 1, "Pending")]),
        (running, [stopped, pod(0, 1, "Running")]),
        (train_job("Complete"), [stopped, pod(0, 1, "Succeeded", 0)]),
    ]
    code, calls = command(scenes, {"pod-0-0": SAVED, "pod-0-1": "iteration 10"})
    output, errors = capfd.readouterr()
    assert code == 0
    assert output.index(SAVED) < output.index("iteration 10") < output.index("next:")
    assert output.count(SAVED) == output.count("iteration 10") == 1
    assert "Unschedulable: 0/3 nodes" in errors
    assert "pod-0-0 ended with exit code 75" in errors
    applied = [call for call in calls if "apply" in call]
    assert [call[:2] for call in applied] == [["--namespace", "research"]]
    assert Path(applied[0][4]).name == "trainjob.yaml"
    assert not [call for call in calls if "delete" in call]


def test_the_exit_code_of_a_failed_run_is_that_of_the_pod_that_failed_first(command, capfd):
    before = [pod(0, 0, "Failed", 75), pod(1, 0, "Failed", 1)]
    pods = [*before, pod(0, 1, "Failed", 1), pod(1, 1, "Failed", 137)]
    for number, each in enumerate(pods):
        each["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"] = f"2026-11-24T01:0{9 - number}:00Z"
    pods[3]["status"]["containerStatuses"][0]["state"]["terminated"]["reason"] = "OOMKilled"
    scenes = [(None, []), (train_job("Failed"), pods)]
    code, calls = command(scenes, {"pod-0-1": "connection closed", "pod-1-1": "out of memory"})
    output, errors = capfd.readouterr()
    assert code == 137
    assert "out of memory" in output
    assert "pod-1-1 ended with exit code 137 (OOMKilled)" in errors.splitlines()[-1]
    assert "jobset failed" in errors.splitlines()[-1]
    assert calls[-1][2:6] == ["logs", "--tail", "30", "pod-1-1"]


def test_a_wrong_input_ends_with_its_exit_code(command, capfd):
    pods = [pod(0, 0, "Failed", 2), pod(1, 0, "Failed", 1)]
    assert command([(None, []), (train_job("Failed"), pods)], {"pod-0-0": "error: rows.jsonl:3: no"})[0] == 2
    assert "error: rows.jsonl:3: no" in capfd.readouterr().out


def test_a_job_that_is_deleted_or_evicted_is_a_failure(command, capfd):
    evicted = pod(0, 0, "Failed", reason="Evicted")
    scenes = [(None, []), (train_job(), [pod(0, 0, "Running")]), (train_job("Failed"), [evicted]), (None, [])]
    assert command(scenes)[0] == 1
    assert "Evicted" in capfd.readouterr().err


def test_a_job_that_runs_is_refused_and_one_that_has_ended_is_replaced(command, capfd):
    code, calls = command([(train_job(), [])], wait=False)
    assert code == 2
    assert "kubectl --namespace research delete trainjob tiny-llama-mock" in capfd.readouterr().err
    assert not [call for call in calls if "apply" in call]
    code, calls = command([(train_job("Failed"), [])], wait=False)
    assert code == 0
    assert [call[2] for call in calls] == ["get", "delete", "apply"]
    output = capfd.readouterr().out
    assert "trainjob.yaml" in output
    assert "kubectl --namespace research logs --follow" in output


def test_what_kubectl_refuses_is_one_error(command, capfd):
    refused = 'error: unable to recognize "trainjob.yaml": no matches for kind "TrainJob" in version "v1alpha1"'
    code, _ = command([(None, [])], errors={"apply": refused})
    lines = capfd.readouterr().err.splitlines()
    assert code == 2
    assert len(lines) == 1
    assert refused in lines[0]
    assert "install Kubeflow Trainer v2" in lines[0]


def test_without_kubectl_there_is_one_error_and_the_manifest_can_be_written(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["train", str(CONFIG), "--launcher", "kubernetes", f"megatron_wrap.logger.output_dir={tmp_path / 'run'}"]
    assert main(words) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "kubectl is not installed" in line
    assert not (tmp_path / "run").exists()
    assert main([*words, "--dry-run"]) == 0
    assert (tmp_path / "run" / "trainjob.yaml").is_file()


def test_a_connection_that_fails_while_waiting_is_tried_again(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(kubernetes, "_POLL_SECONDS", 0)

    class Kubectl:
        answers = iter([PlatformError("no route"), train_job(), PlatformError("no route"), train_job("Complete")])

        def get(self, kind, *words):
            if kind == "pods":
                return {"items": []}
            answer = next(self.answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

    assert kubernetes.KubernetesJob(Kubectl(), "run", tmp_path).wait() == (0, True)
    assert capfd.readouterr().err.count("no route") == 1


def test_torchruns_own_variables_describe_the_node_of_a_pod(monkeypatch):
    pod_variables = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "run-node-0-0.run", "MASTER_PORT": "29500"}
    for name, value in {**pod_variables, "NPROC_PER_NODE": "4"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    config = read_run(CONFIG, ["megatron_wrap.init.platform=cpu"])
    assert nodes_of(config) == Nodes(4, 2, 1, "run-node-0-0.run", 29500)
    monkeypatch.setenv("GPUS_PER_NODE", "3")  # precedes torchrun's
    assert nodes_of(config).processes_per_node == 3
