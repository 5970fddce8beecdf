"""Checkpoints that torch writes are read as torch reads them, into the memory of the tensors that request them."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_wrap.checkpoint.files import hashed_files
from megatron_wrap.checkpoint.files.verified_reading import BlockVerification
from megatron_wrap.platform.megatron_core import checkpoint_reader, restricted_pickle
from megatron_wrap.platform.megatron_core.checkpoint_reader import RestrictedReader, read_by


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, torch.Tensor]:
    state = {
        "matrix": torch.randn(40, 30),
        "half": torch.randn(7, dtype=torch.float32).to(torch.bfloat16),
        "number": torch.tensor(3),
        "columns": torch.randn(5, 6).T,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is one process
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    return state


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("target_dtype", [None, torch.float64])
def test_tensors_come_from_the_memory_that_was_compared(target_dtype, on_cpu, saved, tmp_path: Path, monkeypatch):
    """Those on a GPU are copied there by the calling thread."""
    monkeypatch.setattr(checkpoint_reader, "_is_on_cpu", lambda _: on_cpu)
    names = [path.name for path in tmp_path.glob("*.distcp")]
    hashed = hashed_files.hash_files(tmp_path, names)
    loaded = {name: torch.zeros(value.size(), dtype=target_dtype or value.dtype) for name, value in saved.items()}
    with warnings.catch_warnings(), BlockVerification(tmp_path, hashed, torch.device("cpu")) as verification:
        warnings.simplefilter("ignore")
        with read_by(verification):
            monkeypatch.setattr(RestrictedReader, "_slice_file", None)  # no file is opened by the reader
            dcp.load(loaded, storage_reader=RestrictedReader(tmp_path), no_dist=True)
        assert verification.compared() == {(name, 0) for name in names}
    for name, value in saved.items():
        torch.testing.assert_close(loaded[name], value.to(target_dtype or value.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("target_dtype", [None, torch.float64])
def test_tensors_are_those_of_torch(target_dtype, saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    by_torch: list[torch.Tensor] = []

    def torch_load(content):
        by_torch.append(load(content))
        return by_torch[-1]

    load = restricted_pickle.torch_load
    monkeypatch.setattr(restricted_pickle, "torch_load", torch_load)
    loaded = {name: torch.zeros(value.size(), dtype=target_dtype or value.dtype) for name, value in saved.items()}
    addresses = {name: value.data_ptr() for name, value in loaded.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(loaded, storage_reader=RestrictedReader(tmp_path), no_dist=True)
    for name, value in saved.items():
        torch.testing.assert_close(loaded[name], value.to(target_dtype or value.dtype), rtol=0, atol=0)
    assert {name: value.data_ptr() for name, value in loaded.items()} == addresses
    copied = {tuple(tensor.size()) for tensor in by_torch}
    assert copied == ({tuple(value.size()) for value in saved.values()} if target_dtype else {(6, 5)})
