"""`megatron-wrap checkpoints`: what is listed, what --verify finds, exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_wrap.checkpoint.files.run_folder import MANIFEST, RESOLVED, CheckpointStore
from megatron_wrap.cli.main import main

Shown = Callable[..., list[str]]
LAYOUT = {"tp": 2, "pp": 1, "cp": 1, "dp": 4, "ep": 1, "virtual": None, "platform": "cpu"}


def save(store: CheckpointStore, iteration: int) -> Path:
    partial = store.begin(iteration)
    (partial / "__0_0.distcp").write_bytes(bytes(3000))
    (partial / ".metadata").write_text("tensor metadata")
    (partial / "metadata.json").write_text("{}")
    return store.commit(partial, iteration, {"layout": LAYOUT, "megatron_core": "0.16.1"})


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Three checkpoints, of which the second has the best evaluation."""
    store = CheckpointStore(tmp_path / "checkpoints")
    for iteration in (10, 20, 30):
        save(store, iteration)
    store.record_best(20)
    return store


@pytest.fixture
def shown(store: CheckpointStore, capsys: pytest.CaptureFixture[str]) -> Shown:
    def call(*options: str, code: int = 0) -> list[str]:
        assert main(["checkpoints", str(store.folder), *options]) == code
        return capsys.readouterr().out.splitlines()

    return call


def test_a_line_has_the_facts_of_a_checkpoint(shown: Shown) -> None:
    head, *lines = shown()
    assert head.split() == ["checkpoint", "size", "saved", "layout", "megatron-core", "state"]
    assert [line.split()[0] for line in lines] == ["iter_0000010", "iter_0000020", "iter_0000030"]
    assert all("tp2 pp1 cp1 dp4  0.16.1" in line and "kB  20" in line for line in lines)
    assert [line.split("  ")[-1].strip() for line in lines] == ["complete", "complete, best", "complete, newest"]


def test_verify_reads_all_files(shown: Shown, store: CheckpointStore) -> None:
    assert all(re.search("  verified(, [a-z]+)?$", line) for line in shown("--verify")[1:])
    (store.folder_of(10) / "__0_0.distcp").write_bytes(bytes(2999) + b"x")
    assert "complete" in shown()[1]
    lines = shown("--verify", code=1)
    assert "damaged: __0_0.distcp differs from its SHA-256" in lines[1]
    assert lines[-1].endswith("iter_0000010")


def test_incomplete_and_renamed_checkpoints_are_listed(shown: Shown, store: CheckpointStore) -> None:
    save(CheckpointStore(store.folder / "reference"), 0)
    (store.folder_of(20) / "metadata.json").unlink()
    target = store.set_aside(store.folder_of(30))
    assert target is not None
    lines = shown()
    assert [line.split()[0] for line in lines[1:]] == [
        *("iter_0000010", "iter_0000020", "reference/iter_0000000", target.name)
    ]
    assert "complete, newest" in lines[1]
    assert "incomplete: metadata.json is missing, best" in lines[2]
    assert "set aside as damaged" in lines[4]
    assert shown("--verify", code=1)[-1].endswith(": iter_0000020")


def test_a_checkpoint_of_megatron_lm_has_no_hashes(shown: Shown, store: CheckpointStore) -> None:
    (store.folder_of(10) / MANIFEST).unlink()
    (store.folder_of(10) / RESOLVED).unlink(missing_ok=True)
    assert shown("--verify")[1].endswith("complete, saved without hashes")


def test_a_folder_without_checkpoints_is_an_error(store: CheckpointStore, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, advice in (
        (store.folder.parent, f"give {store.folder}"),
        (store.folder_of(10), f"give the folder of the run, {store.folder}"),
        (store.folder / "none", "no such folder"),
    ):
        assert main(["checkpoints", str(folder)]) == 2
        assert advice in capsys.readouterr().err


def test_the_list_needs_no_torch(store: CheckpointStore) -> None:
    """In a process of its own, because this one has torch."""
    program = (
        "import sys; from megatron_wrap.cli.main import main\n"
        f"main(['checkpoints', {str(store.folder)!r}, '--verify'])\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
