"""Outputs of a reference model on disk, by the hash of their sample."""

import hashlib
import json
import os
import pickle

import numpy as np
import pytest
from safetensors.numpy import save_file

from megatron_wrap.data.cache import precomputed
from megatron_wrap.data.cache.precomputed import PrecomputedOutputs, PrecomputedWriter, sample_hash
from megatron_wrap.errors import ConfigError, DataError


def test_a_hash_is_that_of_the_canonical_json():
    expected = hashlib.sha256('{"a":[1,2],"ä":"b"}'.encode()).digest()
    assert sample_hash({"ä": "b", "a": [1, 2]}) == expected
    assert sample_hash({"a": np.array([1, 2]), "ä": "b", "source": "file"}) == expected
    assert sample_hash({"a": [1, 3], "ä": "b"}) != expected
    with pytest.raises(DataError, match="ellipsis"):
        sample_hash({"a": ...})
    with pytest.raises(DataError, match="int"):
        sample_hash(3)


def test_outputs_are_found_by_hash(tmp_path, monkeypatch):
    monkeypatch.setattr(precomputed, "_SAMPLES_OF_A_FILE", 3)
    generator = np.random.default_rng(0)
    samples = [{"index": index} for index in range(7)]
    scalars = generator.standard_normal(7).astype(np.float32)
    tokens = [generator.standard_normal(length).astype(np.float32) for length in (3, 1, 0, 5, 2, 2, 4)]
    writer = PrecomputedWriter(tmp_path / "outputs", {"flow_key": "mine"})
    for index, sample in enumerate(samples):
        writer.add(sample_hash(sample), {"answer": scalars[index], "tokens": tokens[index]})
    with pytest.raises(DataError, match=r"precomputed\.json"):
        PrecomputedOutputs(tmp_path / "outputs")  # not complete
    assert writer.close() == 7
    stored = PrecomputedOutputs(tmp_path / "outputs")
    assert (len(stored), stored.metadata["flow_key"]) == (7, "mine")
    assert len(list((tmp_path / "outputs").glob("*.safetensors"))) == 3
    for index in (6, 0, 2, 3, 1, 5, 4):
        actual = stored.get(sample_hash(samples[index]))
        assert actual is not None
        assert actual["answer"] == float(scalars[index])
        assert np.array_equal(actual["tokens"], tokens[index])
    assert stored.get(sample_hash({"index": 7})) is None
    assert stored.get(sample_hash(samples[0])[:8] + bytes(24)) is None  # the same beginning only
    with pytest.raises(ConfigError, match="contains precomputed outputs already"):
        PrecomputedWriter(tmp_path / "outputs", {})
    (tmp_path / "outputs" / "outputs-00001.safetensors").write_bytes(b"damaged")
    with pytest.raises(DataError, match="outputs-00001"):
        PrecomputedOutputs(tmp_path / "outputs")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"../elsewhere.safetensors": 1}, "which is outside its folder"),
        ({"/etc/passwd": 1}, "which is outside its folder"),
        ({"link.safetensors": 1}, "which is a link to"),
        ({"pickle.safetensors": 1}, r"pickle\.safetensors cannot be read"),
        ({"others.safetensors": 1}, r"others\.safetensors has no hashes"),
        (["others.safetensors"], "has no precomputed outputs"),
        ([3], "has no precomputed outputs"),
        (None, "has no precomputed outputs"),
    ],
)
def test_a_foreign_folder_runs_no_code_and_names_its_own_files(tmp_path, files, words):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "marker"),)

    folder = tmp_path / "outputs"
    folder.mkdir()
    for path in (folder / "pickle.safetensors", tmp_path / "elsewhere.safetensors"):
        path.write_bytes(pickle.dumps(Attack()))
    (folder / "link.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    save_file({"answer": np.ones(1), "hashes": np.ones((1, 32))}, folder / "others.safetensors")
    (folder / precomputed.MANIFEST).write_text(json.dumps({"format": 1, "files": files}))
    with pytest.raises(DataError, match=words):
        PrecomputedOutputs(folder)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tokens.ends", [2, 1, 5]),
        ("tokens.ends", [2, 3, 4]),
        ("tokens.ends", [-1, 3, 5]),
        ("tokens.ends", [2, 5]),
        ("tokens", [0.0] * 6),
        ("answer", [0.0] * 2),
        ("answer", 0.0),
    ],
)
def test_outputs_with_other_rows_than_the_file_has_samples_are_refused(tmp_path, name, values):
    hashes = np.arange(96, dtype=np.uint8).reshape(3, 32)
    tensors = {"hashes": hashes, "answer": np.zeros(3), "tokens": np.arange(5.0), "tokens.ends": np.array([2, 2, 5])}
    (tmp_path / precomputed.MANIFEST).write_text(json.dumps({"format": 1, "files": {"a.safetensors": 3}}))
    save_file(tensors, tmp_path / "a.safetensors")
    actual = PrecomputedOutputs(tmp_path).get(hashes[2].tobytes())
    assert actual is not None
    assert actual["tokens"].tolist() == [2, 3, 4]
    save_file({**tensors, name: np.array(values)}, tmp_path / "a.safetensors")
    with pytest.raises(DataError, match=r"a\.safetensors: .* is not of the 3 samples"):
        PrecomputedOutputs(tmp_path)
