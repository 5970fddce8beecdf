"""Faults of one node that are provoked, found and named, and a healthy node."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_wrap.checkpoint.files.run_folder import TRACKER, CheckpointStore
from megatron_wrap.cli import doctor
from megatron_wrap.cli.main import main
from megatron_wrap.config import load_run_config
from megatron_wrap.errors import PlatformError
from megatron_wrap.launch.doctor import node as checks_of_node
from megatron_wrap.launch.doctor.checks import Finding, Subject
from megatron_wrap.launch.doctor.node import quick_answers
from megatron_wrap.platform.base import machine

ROOT = Path(__file__).parents[4]
RUN = ROOT / "tests/unit/small_run.yaml"
SAVE = "megatron_lm.train.common.save"


def subject(save: Path | str | None = None, **values: object) -> Subject:
    return Subject(load_run_config(RUN, [] if save is None else [f"{SAVE}={save}"]), **values)  # type: ignore[arg-type]


def complete_checkpoint(folder: Path, iteration: int) -> None:
    store = CheckpointStore(folder)
    partial = store.begin(iteration)
    for name in ("metadata.json", ".metadata"):
        (partial / name).write_text("{}")
    store.commit(partial, iteration, {})


# ---- a healthy node ----


def test_a_healthy_node_has_no_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    complete_checkpoint(tmp_path, 3)
    arguments = [str(RUN), f"{SAVE}={tmp_path}", "--nproc-per-node", "1"]
    files = sorted(tmp_path.rglob("*"))
    assert main(["doctor", *arguments, "--json"]) == 0
    items = json.loads(capsys.readouterr().out)
    assert [item for item in items if item["status"] != "ok"] == []
    assert {"torch", "Megatron-Core", "GPUs", "open files", "checkpoints", "clock of files", "hub cache"} <= {
        item["name"] for item in items
    }
    assert sorted(tmp_path.rglob("*")) == files
    assert main(["doctor", *arguments]) == 0
    assert capsys.readouterr().out.endswith("\nno errors\n")


def test_train_begins_with_what_takes_milliseconds(tmp_path: Path) -> None:
    """The shortest of four calls: the first imports modules, and others may wait for a core."""
    seconds = []
    for _ in range(4):
        start = time.monotonic()
        assert quick_answers(subject(tmp_path)) == []
        seconds.append(time.monotonic() - start)
    assert min(seconds) < 2
    with pytest.raises(PlatformError, match="GPUs: none"):
        quick_answers(Subject(load_run_config(RUN, ["megatron_wrap.init.platform=cuda"])))


# ---- faults of the machine, in a process that has all of them ----

FAULTS: dict[str, tuple[str, str]] = {
    "GPUs": ("error", "and megatron_wrap.init.platform is cuda"),
    "shared memory": ("warning", "1 of 1 MiB free in /dev/shm"),
    "open files": ("error", "a process may open 128, and a run of 1 process needs about 256; set `ulimit -n 256`"),
    "checkpoints": ("error", "names iteration 10, and there is no complete checkpoint"),
    "free space": ("error", "cannot be written (No space left on device); delete files"),
    "hub cache": ("warning", "cannot be read (Permission denied); change its permissions"),
}
IN_NAMESPACE = """
mount -t tmpfs -o size=1m tmpfs /dev/shm
mount -t tmpfs -o size=1m tmpfs "$1/disk"
printf 10 > "$1/disk/latest_checkpointed_iteration.txt"
cat /dev/zero > "$1/disk/zeros" 2> /dev/null
ulimit -S -n 128
shift
exec setpriv --bounding-set=-dac_override,-dac_read_search "$@"
"""
"""root may read every file, unless it has given up these capabilities."""


@pytest.fixture(scope="module")
def items_of_faulty_node(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """Name -> (status, text) on a node with a small /dev/shm, a full disk and other faults at once."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None or subprocess.call(["unshare", "-m", "true"]) != 0:
        pytest.skip("file systems are mounted in a namespace of their own, which needs root")
    folder = tmp_path_factory.mktemp("node")
    (folder / "disk").mkdir()
    (folder / "cache/hub").mkdir(parents=True)
    (folder / "cache/hub").chmod(0)
    command = [sys.executable, "-m", "megatron_wrap.cli.main", "doctor", str(RUN), "--json", "--nproc-per-node", "1"]
    command += ["megatron_wrap.init.platform=cuda", f"{SAVE}={folder}/disk"]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "HF_HUB_CACHE")}
    ended = subprocess.run(
        ["unshare", "-m", "bash", "-c", IN_NAMESPACE, "bash", str(folder), *command],
        env={**environment, "PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    return {item["name"]: (item["status"], item["text"]) for item in json.loads(ended.stdout)}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named(name: str, items_of_faulty_node: dict[str, tuple[str, str]]) -> None:
    status, text = items_of_faulty_node[name]
    assert (status, FAULTS[name][1] in text) == (FAULTS[name][0], True), text


def test_nothing_else_is_reported(items_of_faulty_node: dict[str, tuple[str, str]]) -> None:
    assert {name for name, (status, _) in items_of_faulty_node.items() if status != "ok"} == set(FAULTS)


# ---- faults of folders, packages and ports ----


def statuses(findings: object) -> list[str]:
    return [finding.status for finding in findings]  # type: ignore[attr-defined]


def remove_newest(folder: Path) -> None:
    shutil.rmtree(folder / "iter_0000005")


def set_back(folder: Path) -> None:
    (folder / TRACKER).write_text("3")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (remove_newest, "names iteration 5, which is missing or incomplete: the run would resume from iteration 3"),
        (set_back, "names iteration 3, and the checkpoint of iteration 5 is complete"),
    ],
)
def test_a_stale_tracker_is_a_warning(change: Callable[[Path], None], part: str, tmp_path: Path) -> None:
    for iteration in (3, 5):
        complete_checkpoint(tmp_path, iteration)
    assert list(checks_of_node.tracker(subject(tmp_path))) == [Finding("iteration 5")]
    change(tmp_path)
    (finding,) = checks_of_node.tracker(subject(tmp_path))
    assert finding.status == "warning"
    assert part in finding.text


def test_a_checkpoint_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    """Weights and two moments of Adam in fp32, for which 61 TB would be needed."""
    large = ["hidden_size=65536", "ffn_hidden_size=262144", "num_layers=100"]
    overrides = [f"{SAVE}={tmp_path}", *(f"megatron_lm.model.arch.{value}" for value in large)]
    config = load_run_config(RUN, overrides)
    needed = checks_of_node.checkpoint_bytes(config)
    # per layer: queries and the output of 4 heads, keys and values of 2, three matrices of the MLP
    matrices = 100 * 65536 * (2 * 65536 + 2 * 65536 // 2 + 3 * 262144)
    assert needed is not None
    assert 12 * matrices < needed < 12.01 * matrices
    (finding,) = checks_of_node.free_space(Subject(config))
    assert finding.status == "error"
    assert "a checkpoint of this run takes about" in finding.text


def test_a_repository_that_is_not_in_the_cache_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(checks_of_node, "_hub_ids", lambda config: ["someone/model-of-this-test"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert statuses(checks_of_node.hub_cache(subject())) == ["ok", "warning"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert statuses(checks_of_node.hub_cache(subject())) == ["ok", "error"]


def test_packages_that_do_not_fit_each_other_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, version in (("transformer_engine", "2.20.2"), ("megatron_core", "0.17.1")):
        metadata = tmp_path / f"{name}-{version}.dist-info/METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(machine, "_version", machine._version.__wrapped__)  # those of this process are read once
    (of_engine,) = checks_of_node.transformer_engine(subject())
    assert (of_engine.status, of_engine.text[:23]) == ("error", "2.20.2 cannot be import")
    (of_core,) = checks_of_node.megatron_core(subject())
    assert (of_core.status, "megatron-core 0.17.1 is not supported" in of_core.text) == ("error", True)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_that_is_closed_or_taken_is_named(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_MEETING_SECONDS", 1)
    monkeypatch.delenv("RANK", raising=False)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        taken.close() if rank else None
        variables = {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert main(["doctor", "--json", "--nproc-per-node", "1"]) == 1
    *_, item = json.loads(capsys.readouterr().out)
    assert (item["status"], f"2 nodes do not meet at 127.0.0.1:{port} (" in item["text"]) == ("error", True)


def test_wrong_usage_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--jsom"])
    assert end.value.code == 2


def test_a_vocabulary_that_is_the_tokenizers_leaves_the_size_of_a_checkpoint_unknown():
    config = load_run_config(ROOT / "configs/tiny-llama-mock.yaml", ["megatron_lm.model.arch.vocab_size=null"])
    assert checks_of_node.checkpoint_bytes(config) is None
    assert not [answer for answer in quick_answers(Subject(config)) if "checkpoint of this run" in answer.text]
