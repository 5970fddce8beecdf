"""Checkpoints whose files run code when they are unpickled: refused where a run reads them, and nothing is executed."""

import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from _runs import started

from megatron_wrap.checkpoint.files.hashed_files import digest
from megatron_wrap.cli.main import main
from megatron_wrap.errors import CheckpointError

pytestmark = pytest.mark.process_group

TRAIN = "megatron_lm.train.common"
SAMPLES = [{"input_ids": [index, 7, 8, 9], "loss_mask": [0, 1, 1, 1]} for index in range(4)]
MARKER = "executed"


class Attack:
    """Creates a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.path.abspath(MARKER),)


def in_metadata(checkpoint: Path) -> str:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Attack()))
    return ".metadata"


def beside_metadata(checkpoint: Path) -> str:
    content = pickle.loads((checkpoint / ".metadata").read_bytes())
    content.planner_data = Attack()
    (checkpoint / ".metadata").write_bytes(pickle.dumps(content))
    return ".metadata"


def in_common(checkpoint: Path) -> str:
    torch.save({"iteration": 1, "args": Attack()}, checkpoint / "common.pt")
    return "common.pt"


def in_data(checkpoint: Path) -> str:
    """An object of a `.distcp` file instead of the random generators."""
    return in_object(checkpoint, "rng_state")


def in_common_object(checkpoint: Path) -> str:
    """Where Megatron-Core 0.19 stores the common state; 0.16 needs `common.pt`."""
    (checkpoint / "common.pt").unlink()
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    stored = any(index.fqn.startswith("common_state") for index in metadata.storage_data)
    return in_object(checkpoint, "common_state") if stored else ""


def in_object(checkpoint: Path, name: str) -> str:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    (index,) = [index for index in metadata.storage_data if index.fqn.startswith(name)]
    file = checkpoint / metadata.storage_data[index].relative_path
    with file.open("ab") as opened:
        begin = opened.tell()
        torch.save([Attack()], opened)
        length = opened.tell() - begin
    metadata.storage_data[index] = type(metadata.storage_data[index])(file.name, begin, length)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    return file.name


def outside(checkpoint: Path) -> str:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = f"../other/{info.relative_path}"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    return ".metadata"


def linked(checkpoint: Path) -> str:
    file = next(checkpoint.glob("*.distcp"))
    shutil.move(file, Path("moved").absolute())
    file.symlink_to(Path("moved").absolute())
    return ".metadata"


ATTACKS = {
    in_metadata: r"it refers to (posix|nt)\.mkdir",
    beside_metadata: r"it refers to (posix|nt)\.mkdir",
    in_common: r"it refers to (posix|nt)\.mkdir",
    in_data: r"it refers to (posix|nt)\.mkdir",
    in_common_object: r"(it refers to (posix|nt)\.mkdir|common\.pt is missing)",
    outside: r"names '\.\./other/__0_0\.distcp', which is outside its folder",
    linked: r"names '__0_0\.distcp', which is a link to .*moved, outside its folder",
}


def changed(attack: Any) -> tuple[str, Path]:
    """The file that the attack changes in a new copy of a run's checkpoint, whose manifest lists no files."""
    shutil.rmtree("ckpt", ignore_errors=True)
    shutil.copytree("saved", "ckpt")
    checkpoint = Path("ckpt/iter_0000001")
    name = attack(checkpoint)
    manifest = json.loads((checkpoint / "megatron_wrap.json").read_text())
    manifest = {**manifest, "files": {}, "hashes": {}}
    (checkpoint / "megatron_wrap.json").write_text(json.dumps({**manifest, "digest": digest(manifest)}))
    return name, checkpoint


def test_nothing_in_a_checkpoint_is_executed_by_load_resume_and_export(monkeypatch, capsys):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # torch.load then permits any pickle
    with started(f"{TRAIN}.save=saved") as wrap:
        wrap.train(SAMPLES)
        wrap.save()
        for attack, reason in ATTACKS.items():
            name, checkpoint = changed(attack)
            with pytest.raises(CheckpointError) as refused:
                wrap.load(checkpoint)
            assert re.search(f"{re.escape(str(checkpoint / name))} .*{reason}", str(refused.value)), str(refused.value)
        wrap.load("saved")
    for attack, key in (
        (in_metadata, f"{TRAIN}.save=ckpt"),
        (in_common, f"{TRAIN}.save=ckpt"),
        (in_data, f"{TRAIN}.save=ckpt"),
        (outside, f"{TRAIN}.load=ckpt"),
        (beside_metadata, "megatron_wrap.models.reference={checkpoint: ckpt}"),
    ):
        name, checkpoint = changed(attack)
        message = re.escape(str(checkpoint / name)) + f" .*{ATTACKS[attack]}"
        with pytest.raises(CheckpointError, match=message), started(key):
            pytest.fail(f"loaded by {key}")
        assert checkpoint.is_dir()  # it is not damaged, so it is not set aside
    for attack in (in_metadata, in_common):
        _, checkpoint = changed(attack)
        capsys.readouterr()
        assert main(["export-hf", str(checkpoint), "exported"]) == 2
        printed = capsys.readouterr().err
        assert re.search(f"(?m)^error: .*{ATTACKS[attack]}", printed), printed
    _, checkpoint = changed(in_data)
    assert main(["export-hf", str(checkpoint), "exported"]) == 0  # it does not read the random generators
    assert not Path(MARKER).exists()
