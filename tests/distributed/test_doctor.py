"""`megatron-wrap doctor` on two nodes: two agents of torchrun on this machine, each with an environment of its own."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = ROOT / "tests/unit/small_run.yaml"
SAVE = "megatron_lm.train.common.save"
OTHER_PYTHON = "import platform\nplatform.python_version = lambda: '3.99.1'\n"
OTHER_CLOCK = "import time\ntrue_time = time.time\ntime.time = lambda: true_time() + 90\n"
SLOW_LOOPBACK = (
    'ip link set lo mtu 1500 up && tc qdisc add dev lo root tbf rate 20mbit burst 64kb latency 1s && exec "$@"'
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def node(
    arguments: Sequence[str], rank: int, port: int, folder: Path, paths: Sequence[Path] = (), before: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """The command on one of two nodes.

    Args:
        folder: its working directory.
        paths: at the front of sys.path.
        before: words before the command.
    """
    folder.mkdir(exist_ok=True)
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GPUS_PER_NODE", "GLOO_SOCKET_IFNAME")
    environment: Mapping[str, str] = {key: value for key, value in os.environ.items() if key not in variables}
    return subprocess.Popen(
        [*before, sys.executable, "-m", "megatron_wrap.cli.main", *arguments, "--nproc-per-node", "1"],
        cwd=folder,
        env={
            **environment,
            "PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT])),
            "NNODES": "2",
            "NODE_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def report(processes: Sequence[subprocess.Popen[str]], exit_code: int) -> dict[str, tuple[str, str]]:
    """Name -> (status, text) of the report that node 0 prints; both nodes end with the exit code."""
    outputs = [process.communicate(timeout=180) for process in processes]
    assert [process.returncode for process in processes] == [exit_code] * 2, outputs
    assert outputs[1][0] == ""
    return {item["name"]: (item["status"], item["text"]) for item in json.loads(outputs[0][0])}


def stub(folder: Path, name: str, version: str) -> None:
    """Metadata of another version of a package, which is found before that of the installed one."""
    metadata = folder / f"{name}-{version}.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.matrix
def test_two_healthy_nodes_have_no_warning(imported_for_ranks: None, tmp_path: Path) -> None:
    from _interpreters import forked_interpreters  # not where this file is a program

    port, arguments = free_port(), ["doctor", str(RUN), "--json", f"{SAVE}={tmp_path}"]
    with forked_interpreters():
        items = report([node(arguments, rank, port, tmp_path / "work") for rank in range(2)], 0)
    assert {name: item for name, item in items.items() if item[0] != "ok"} == {}
    assert {"shared folder", "link", "clock", "all-reduce"} <= items.keys()
    assert items["all-reduce"][1].startswith("2 processes over gloo: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["work"]


FAULTS = {
    "Python": ("error", "node 1 ({host}) has 3.99"),
    "torch": ("error", "node 1 ({host}) has 2.12.0"),
    "Megatron-Core": ("error", "node 1 ({host}) has 0.16.7"),
    "shared folder": ("error", "node 1 ({host}): a file that node 0 ({host}) wrote is not seen in "),
    "clock": ("error", "node 1 ({host}): 90.0 s ahead of node 0"),
    "clock of files": ("warning", "node 1 ({host}): this node is 90 s ahead of the file system of "),
}


@pytest.fixture(scope="module")
def items_of_different_nodes(
    imported_for_ranks: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[str, str]]:
    """The report about two nodes, one of which has other packages, another clock and a folder of its own."""
    from _interpreters import forked_interpreters

    folder = tmp_path_factory.mktemp("nodes")
    stub(folder / "other", "torch", "2.12.0")
    stub(folder / "other", "megatron_core", "0.16.7")
    before = ["faketime", "-f", "+90s"] if shutil.which("faketime") else []
    (folder / "other/sitecustomize.py").write_text(OTHER_PYTHON + ("" if before else OTHER_CLOCK))
    port, arguments = free_port(), ["doctor", str(RUN), "--json", f"{SAVE}=."]
    with forked_interpreters():  # its packages are those of this process
        here = node(arguments, 0, port, folder / "here")
    there = node(arguments, 1, port, folder / "there", [folder / "other"], before)
    return report([here, there], 1)


@pytest.mark.parametrize("name", FAULTS)
def test_a_difference_between_nodes_is_found_and_named(
    name: str, items_of_different_nodes: dict[str, tuple[str, str]]
) -> None:
    status, text = items_of_different_nodes[name]
    assert (status, FAULTS[name][1].format(host=socket.gethostname()) in text) == (FAULTS[name][0], True), text


def test_nothing_else_is_reported_about_different_nodes(items_of_different_nodes: dict[str, tuple[str, str]]) -> None:
    assert {name for name, (status, _) in items_of_different_nodes.items() if status != "ok"} == set(FAULTS)


@pytest.mark.matrix
def test_a_slow_link_is_found_and_named(tmp_path: Path) -> None:
    """Two nodes in a network namespace whose loopback interface passes 20 Mbit/s."""
    namespace = ["unshare", "-n", "bash", "-c", SLOW_LOOPBACK, "bash"]
    if shutil.which("tc") is None or subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a network namespace with a slow interface needs root, and tc of iproute2")
    port = free_port()
    command = [sys.executable, str(Path(__file__)), str(tmp_path), str(port)]
    ended = subprocess.run([*namespace, *command], capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == 0, ended.stderr
    items = json.loads(ended.stdout)
    status, text = items["link"]
    assert status == "warning"
    assert "MB/s" in text
    assert "set GLOO_SOCKET_IFNAME" in text
    assert {name for name, (status, _) in items.items() if status != "ok"} <= {"link", "all-reduce"}


@pytest.mark.matrix
def test_train_does_not_begin_on_nodes_with_different_packages(tmp_path: Path) -> None:
    stub(tmp_path / "other", "megatron_core", "0.16.7")
    port, arguments = free_port(), ["train", str(RUN), "megatron_lm.train.common.train_iters=1"]
    processes = [
        node(arguments, rank, port, tmp_path / f"node{rank}", [tmp_path / "other"] * rank) for rank in range(2)
    ]
    outputs = [process.communicate(timeout=180) for process in processes]
    assert [process.returncode for process in processes] == [2, 2], outputs
    assert "error: the nodes have different versions of Megatron-Core: " in outputs[0][1]
    assert f"node 1 ({socket.gethostname()}) has 0.16.7" in outputs[0][1]
    assert outputs[1][1] == ""


if __name__ == "__main__":  # in the namespace, whose loopback interface this process has too
    work, meeting_port = Path(sys.argv[1]), int(sys.argv[2])
    doctor = ["doctor", str(RUN), "--json"]
    print(json.dumps(report([node(doctor, rank, meeting_port, work) for rank in range(2)], 0)))
