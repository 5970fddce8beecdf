"""Names in files stay in their folder, links included; the links of the Hugging Face hub's cache are followed."""

import json
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from megatron_wrap.bridge.loading.weight_folder import file_tensors
from megatron_wrap.checkpoint.files.run_folder import TRACKER, CheckpointStore
from megatron_wrap.checkpoint.saved_run import find_checkpoint
from megatron_wrap.data.cache.precomputed import PrecomputedOutputs, PrecomputedWriter
from megatron_wrap.errors import CheckpointError, DataError
from megatron_wrap.inside_folder import leaves_folder


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "", "a/..", "x\0", ".."])
def test_names_outside_are_found(tmp_path: Path, name: str):
    assert "outside its folder" in str(leaves_folder(tmp_path, name))


def test_links_are_followed(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "run" / "own").write_text("x")
    (tmp_path / "run" / "inner").symlink_to("own")
    (tmp_path / "run" / "outer").symlink_to(tmp_path / "file")
    (tmp_path / "link").symlink_to("run")
    for folder in ("run", "link"):
        assert leaves_folder(tmp_path / folder, "inner") is None
        assert leaves_folder(tmp_path / folder, "not-there") is None
        assert f"a link to {tmp_path / 'file'}" in str(leaves_folder(tmp_path / folder, "outer"))


def test_a_snapshot_of_the_hub_has_links_to_its_blobs(tmp_path: Path):
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0123", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"x": numpy.zeros(2)}, blobs / "ff")
    (snapshot / "model.safetensors").symlink_to("../../blobs/ff")
    (tmp_path / "named").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "named"):
        assert file_tensors(folder / "model.safetensors")["x"].shape == (2,)


def test_weights_whose_link_leads_out_of_their_folder_are_refused(tmp_path: Path):
    (tmp_path / "model").mkdir()
    save_file({"x": numpy.zeros(2)}, tmp_path / "other")
    (tmp_path / "model/model.safetensors").symlink_to(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"names 'model.safetensors', which is a link to .*other, outside"):
        file_tensors(tmp_path / "model/model.safetensors")


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"x")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    return folder


@pytest.mark.parametrize("tracked", ["../other", "/other", "iter_0000009", "-1"])
def test_a_tracker_leads_to_no_other_folder(tmp_path: Path, tracked: str):
    checkpoint(tmp_path / "other")
    own_path = checkpoint(tmp_path / "run/iter_0000002")
    (tmp_path / "run" / TRACKER).write_text(tracked)
    assert find_checkpoint(tmp_path / "run") == own_path
    assert CheckpointStore(tmp_path / "run").latest() == 2


def test_a_checkpoint_that_is_a_link_is_loaded_by_its_own_path(tmp_path: Path):
    other = checkpoint(tmp_path / "other/iter_0000002")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/iter_0000002").symlink_to(other)
    with pytest.raises(CheckpointError, match=r"names 'iter_0000002', which is a link .*by its own path"):
        find_checkpoint(tmp_path / "run")
    assert find_checkpoint(other) == other


def test_precomputed_outputs_are_files_of_their_folder(tmp_path: Path):
    writer = PrecomputedWriter(tmp_path / "outputs", {})
    writer.add(b"0" * 32, {"log_prob": numpy.array(1, numpy.float32)})
    writer.close()
    manifest = tmp_path / "outputs/precomputed.json"
    content = json.loads(manifest.read_text())
    content["files"] = {"../outputs-00000.safetensors": 1}
    manifest.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"precomputed.json names '\.\./outputs-00000.safetensors', which is outside"):
        PrecomputedOutputs(tmp_path / "outputs")
