"""Hugging Face in and out on one GPU with both implementations, in fp32; skipped where there is no GPU."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import numpy

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import _bridge_runs as runs

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
IMPLEMENTATIONS = ["torch", pytest.param("transformer_engine", marks=pytest.mark.skipif(not HAS_TE, reason="not here"))]
FAMILIES = [name for name in runs.FAMILIES if name not in ("llama-four-layers", "qwen2-tied")]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """original(family) -> its folder and transformers' logits on the CPU."""
    made = {}

    def make(name):
        if name not in made:
            folder = runs.make_folder(name, tmp_path_factory.mktemp(name))
            made[name] = folder, runs.expected_logits(folder)
        return made[name]

    return make


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_and_the_export_is_the_original(family, implementation, original, tmp_path):
    from safetensors.torch import load_file

    folder, expected = original(family)
    overrides = ("megatron_wrap.init.platform=cuda", f"megatron_lm.model.arch.transformer_impl={implementation}")
    found = runs.logits_and_export(str(folder), overrides, str(tmp_path / "out"), "5GB")
    assert numpy.abs(found - expected).max() <= 1e-4
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
