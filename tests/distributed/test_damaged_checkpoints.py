"""Damaged tensor and small files: found before the first step, and the checkpoint before is resumed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import _checkpoint_runs as runs
import pytest
import torch

from megatron_wrap.checkpoint.files.hashed_files import digest

RESUME = "megatron_wrap.checkpoint.resume"


def resumed(folder: str, choice: str = "auto") -> str:
    """Iteration and digest of the resumed state, or the refusal."""
    from megatron_wrap.errors import CheckpointError

    try:
        with runs.started(folder, (f"{RESUME}={choice}",)) as wrap:
            return f"{wrap.iteration} {runs.state_digest(wrap)}"
    except CheckpointError as error:
        return str(error)


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def zeroed(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-400] + bytes(400))


def swapped(file: Path) -> None:
    other = next(path for path in file.parent.glob("*.distcp") if path != file)
    first, second = file.read_bytes(), other.read_bytes()
    file.write_bytes(second), other.write_bytes(first)


def damage_cases(checkpoint: Path) -> list[tuple[Callable[[Path], object], str]]:
    tensors = sorted(path.name for path in checkpoint.glob("*.distcp"))
    cases = [(damage, tensors[-1]) for damage in (flipped, cut, zeroed, Path.unlink)]
    cases += [(flipped, name) for name in (".metadata", "metadata.json", "resolved.yaml", "megatron_wrap.json")]
    return cases + ([(swapped, tensors[0])] if len(tensors) > 1 else [])


@pytest.mark.parametrize(
    ("count", "every"),
    [
        (2, 2),  # every second case, which has tensors and metadata
        pytest.param(1, 1, marks=pytest.mark.matrix),
        pytest.param(2, 1, marks=pytest.mark.matrix),
    ],
)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_resumed(count, every, ranks, tmp_path):
    ranks(count).run(runs.train, tmp_path / "saved", (), 2, (1, 2))
    saved = tmp_path / "saved"
    second = ranks(count).run(resumed, saved)[0]
    assert second.startswith("2 ")
    first = None
    for index, (damage, name) in enumerate(damage_cases(saved / "iter_0000002")[::every]):
        copy = tmp_path / f"copy{index}"
        shutil.copytree(saved, copy)
        damage(copy / "iter_0000002" / name)
        results = ranks(count).run(resumed, copy)
        first = first or results[0]
        assert first.startswith("1 "), first
        assert results == [first] * count, (damage, name)
        assert len(list(copy.glob("iter_0000002.damaged-*"))) == 1
        assert not (copy / "iter_0000002").exists()
    for tracker in ("garbage", "7", ""):
        (saved / "latest_checkpointed_iteration.txt").write_text(tracker)
        assert set(ranks(count).run(resumed, saved)) == {second}


class Attack:
    """Creates a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_an_object_that_runs_code_on_one_rank_is_refused_by_all(ranks, tmp_path):
    ranks(2).run(runs.train, tmp_path / "saved", (), 1, (1,))
    checkpoint, marker = tmp_path / "saved" / "iter_0000001", tmp_path / "marker"
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    index = max((index for index in metadata.storage_data if index.fqn.startswith("rng_state")), key=str)
    info = metadata.storage_data[index]
    with (checkpoint / info.relative_path).open("ab") as file:
        info.offset = file.tell()
        torch.save([Attack(marker)], file)
        info.length = file.tell() - info.offset
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    facts = json.loads((checkpoint / "megatron_wrap.json").read_text())
    facts = {**facts, "files": {}, "hashes": {}}
    (checkpoint / "megatron_wrap.json").write_text(json.dumps({**facts, "digest": digest(facts)}))
    refusal = f"{checkpoint / info.relative_path} is refused: it refers to posix.mkdir, "
    assert [text[: len(refusal)] for text in ranks(2).run(resumed, tmp_path / "saved")] == [refusal] * 2
    assert checkpoint.is_dir()
    assert not marker.exists()


def test_strict_refuses_and_a_changed_manifest_is_damage(ranks, tmp_path):
    saved = tmp_path / "saved"
    ranks(1).run(runs.train, saved, (), 2, (1, 2))
    tensors = next((saved / "iter_0000002").glob("*.distcp"))
    flipped(tensors)
    assert "resume is strict" in ranks(1).run(resumed, saved, "strict")[0]
    flipped(tensors)
    assert ranks(1).run(resumed, saved)[0].startswith("2 ")
    shutil.rmtree(saved / "iter_0000001")
    manifest = saved / "iter_0000002" / "megatron_wrap.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "digest": "0"}))
    assert "differs from its SHA-256" in ranks(1).run(resumed, saved)[0]
