"""Checkpoint folders: visible only when complete, and never fewer than before, also after a killed process."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_wrap.checkpoint.files import hashed_files
from megatron_wrap.checkpoint.files.run_folder import MANIFEST, TRACKER, CheckpointStore, missing_part, read_manifest


def fill(folder: Path, text: str = "tensors") -> Path:
    """Write the files of a Megatron-Core checkpoint that a store checks."""
    (folder / "__0_0.distcp").write_text(text)
    (folder / ".metadata").write_text("tensor metadata")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    return folder


def save(store: CheckpointStore, iteration: int, text: str = "tensors") -> Path:
    return store.commit(fill(store.begin(iteration), text), iteration, {"layout": {"tp": 1}})


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "runs" / "checkpoints")


def test_a_missing_folder_has_no_checkpoints(store: CheckpointStore) -> None:
    assert (store.latest(), store.iterations(), store.prune(1)) == (None, [], [])
    assert not store.folder.exists()


def test_nothing_is_visible_before_commit_and_then_under_megatron_lm_s_name(store: CheckpointStore) -> None:
    assert save(store, 10) == store.folder / "iter_0000010"
    partial = fill(store.begin(12345678))
    assert store.latest() == 10
    assert partial.parent == store.folder
    assert partial.name.startswith(".iter_12345678.partial")
    facts = read_manifest(store.commit(partial, 12345678, {"layout": {"tp": 1}}))
    assert (facts["iteration"], facts["layout"]) == (12345678, {"tp": 1})
    assert facts["files"]["__0_0.distcp"] == len("tensors")
    assert (store.folder / "latest_checkpointed_iteration.txt").read_text() == "12345678"
    assert not partial.exists()


def test_stale_partial_folders_are_removed_at_the_next_save(store: CheckpointStore) -> None:
    first, dead = fill(store.begin(1)), store.begin(1)
    assert first != dead
    assert [path.name for path in store.folder.iterdir()] == [dead.name]
    assert save(CheckpointStore(store.folder), 2).is_dir()
    assert sorted(path.name for path in store.folder.iterdir()) == ["iter_0000002", TRACKER]


@pytest.mark.parametrize(
    ("damage", "left"),
    [
        (shutil.rmtree, [5]),
        (lambda newest: (newest / "__0_0.distcp").unlink(), [5]),
        (lambda newest: os.truncate(newest / "__0_0.distcp", 3), [5]),
        (lambda newest: (newest / ".metadata").unlink(), [5]),
        (lambda newest: (newest.parent / TRACKER).write_bytes(b"\xff\xfe"), [5, 10]),
        (lambda newest: (newest.parent / TRACKER).unlink(), [5, 10]),
    ],
    ids=["missing folder", "missing file", "short file", "no metadata", "garbled tracker", "no tracker"],
)
def test_latest_is_never_an_incomplete_checkpoint(
    store: CheckpointStore, damage: Callable[[Path], object], left: list[int]
) -> None:
    newest = save(store, 10)
    save(store, 5)
    (store.folder / TRACKER).write_text("10")
    damage(newest)
    assert (store.latest(), store.iterations()) == (left[-1], left)


def test_a_tracker_set_back_by_hand_determines_the_latest(store: CheckpointStore) -> None:
    for iteration in (5, 10, 15):
        save(store, iteration)
    (store.folder / TRACKER).write_text("5\n")
    assert store.latest() == 5


def test_saving_an_iteration_again_replaces_it(store: CheckpointStore) -> None:
    save(store, 1, "old")
    final = save(store, 1, "new")
    assert (final / "__0_0.distcp").read_text() == "new"
    assert sorted(path.name for path in store.folder.iterdir()) == ["iter_0000001", TRACKER]


def test_a_kill_while_replacing_keeps_the_older_checkpoint(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = save(store, 1, "old")
    partial = fill(store.begin(1), "new")
    renames = []

    def die_at_the_second(self: Path, target: Path) -> Path:
        renames.append(target)
        if len(renames) == 2:
            raise KeyboardInterrupt
        os.rename(self, target)
        return target

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            store.commit(partial, 1, {})
    assert not final.exists()
    survivor = CheckpointStore(store.folder)
    result = survivor.find(1)
    assert survivor.latest() == 1
    assert survivor.iterations() == [1]
    assert result is not None
    assert (result / "__0_0.distcp").read_text() == "old"
    save(survivor, 2)
    assert (final / "__0_0.distcp").read_text() == "old"
    assert survivor.iterations() == [1, 2]


@pytest.mark.parametrize(
    ("saved", "keep", "best", "removed", "latest"),
    [
        ((1, 2, 3), None, None, [], 3),
        ((1, 2, 3), 2, None, [1], 3),
        ((1, 2, 3), 1, None, [1, 2], 3),
        ((1, 2, 3), 0, None, [1, 2], 3),
        ((1, 2, 3), 9, None, [], 3),
        ((1, 2, 3, 4), 1, 2, [1, 3], 4),
        ((10, 20, 30, 12), 1, None, [10], 12),  # the tracker was set back
    ],
)
def test_prune_keeps_the_newest_and_the_best(
    store: CheckpointStore, saved: tuple[int, ...], keep: int | None, best: int | None, removed: list[int], latest: int
) -> None:
    for iteration in saved:
        save(store, iteration)
    if best is not None:
        store.record_best(best)
        assert (store.folder / "best_checkpointed_iteration.txt").read_text() == str(best)
    assert store.prune(keep, best=best) == removed
    assert store.iterations() == sorted({*saved} - {*removed})
    assert store.latest() == latest


def test_prune_counts_only_complete_checkpoints(store: CheckpointStore) -> None:
    for iteration in (1, 2, 3):
        save(store, iteration)
    (store.folder_of(3) / ".metadata").unlink()
    assert store.prune(1) == [1]
    assert store.iterations() == [2]


def test_a_failed_write_keeps_the_earlier_checkpoint(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 1)
    partial = fill(store.begin(2))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            store.commit(partial, 2, {})
    assert store.latest() == 1
    store.begin(3)
    assert not partial.exists()


def test_a_megatron_lm_folder_without_manifest_is_complete(store: CheckpointStore) -> None:
    final = save(store, 4)
    (final / MANIFEST).unlink()
    assert missing_part(final) is None
    assert read_manifest(final) == {}
    (final / ".metadata").unlink()
    assert missing_part(final) == ".metadata is missing"


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", [".metadata", "metadata.json", MANIFEST])
def test_a_flipped_bit_in_a_small_file_makes_the_one_before_it_the_latest(store: CheckpointStore, name: str) -> None:
    save(store, 1)
    damaged = save(store, 2)
    flip_a_bit(damaged / name)
    assert name in str(missing_part(damaged))
    assert store.latest() == 1
    assert list(store.passed_over()) == [damaged]
    aside = store.set_aside(damaged)
    assert aside is not None
    assert aside.is_dir()
    assert not damaged.exists()
    assert store.tracked() == "1"
    assert store.passed_over() == {}


@pytest.mark.parametrize("name", ["../other/__0_0.distcp", "/dev/zero", "elsewhere.distcp", "pipe.distcp"])
def test_a_manifest_names_files_of_its_folder_alone(store: CheckpointStore, name: str) -> None:
    checkpoint = save(store, 1)
    os.mkfifo(checkpoint / "pipe.distcp")
    facts = {key: value for key, value in read_manifest(checkpoint).items() if key != "digest"}
    for changed in ({"files": {name: 0}, "hashes": {}}, {"hashes": {name: facts["hashes"]["__0_0.distcp"]}}):
        manifest = {**facts, **changed}
        (checkpoint / MANIFEST).write_text(json.dumps({**manifest, "digest": hashed_files.digest(manifest)}))
        assert Path(name).name in str(missing_part(checkpoint))


@pytest.mark.parametrize("name", [".metadata", "metadata.json", MANIFEST])
def test_a_link_out_of_the_folder_is_no_part_of_a_checkpoint(store: CheckpointStore, tmp_path: Path, name: str) -> None:
    checkpoint = save(store, 1)
    shutil.move(checkpoint / name, tmp_path / "elsewhere")
    (checkpoint / name).symlink_to(tmp_path / "elsewhere")
    assert f"names {name!r}, which is a link to {tmp_path / 'elsewhere'}" in str(missing_part(checkpoint))


def test_a_pipe_instead_of_the_tracker_is_not_read(store: CheckpointStore) -> None:
    save(store, 1)
    (store.folder / TRACKER).unlink()
    os.mkfifo(store.folder / TRACKER)
    assert store.latest() == 1


def test_the_only_checkpoint_is_never_set_aside(store: CheckpointStore) -> None:
    only = save(store, 1)
    assert store.set_aside(only) is None
    assert only.is_dir()


def test_the_hashes_are_those_of_the_blocks(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashed_files, "BLOCK_BYTES", 4)
    checkpoint = save(store, 1, "eightbit+")
    blocks = [hashlib.sha256(block).hexdigest() for block in (b"eigh", b"tbit", b"+")]
    recorded = read_manifest(checkpoint)["hashes"]
    whole = hashlib.sha256("".join(blocks).encode()).hexdigest()
    assert recorded["__0_0.distcp"] == {"blocks": blocks, "list": whole}
    assert hashed_files.find_damage(checkpoint, recorded) is None
    flip_a_bit(checkpoint / "__0_0.distcp")
    assert "__0_0.distcp differs" in str(hashed_files.find_damage(checkpoint, recorded))
    assert [hashed_files.find_damage(checkpoint, recorded, part, 5) is None for part in range(5)].count(False) == 1


def test_files_are_hashed_while_the_program_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python starts no further threads then."""
    monkeypatch.setattr(hashed_files, "_FEW_BYTES", 0)
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    expected = hashed_files.hash_files(tmp_path, ["a", "b"])

    def submit(*arguments: object) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(hashed_files.ThreadPoolExecutor, "submit", submit)
    assert hashed_files.hash_files(tmp_path, ["a", "b"]) == expected
