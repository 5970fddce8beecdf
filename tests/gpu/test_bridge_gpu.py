"""Hugging Face in and out on GPUs with both implementations, in fp32: the cases of tests/distributed/test_bridge.py
that the GPUs here hold; skipped where there is no GPU."""

import importlib.util

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import _bridge_runs as runs
import numpy

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
IMPLEMENTATIONS = ["torch", pytest.param("transformer_engine", marks=pytest.mark.skipif(not HAS_TE, reason="not here"))]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """original(family) -> its folder and transformers' logits on the CPU."""
    made = {}

    def make(name):
        if name not in made:
            folder = runs.make_folder(name, tmp_path_factory.mktemp(name), max_shard_size="100KB")
            made[name] = folder, runs.expected_logits(folder)
        return made[name]

    return make


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("family", "layout"), runs.CASES, ids=["-".join(case) for case in runs.CASES])
def test_logits_are_those_of_transformers_and_the_export_is_the_original(
    family, layout, implementation, ranks, original, tmp_path
):
    world_size, overrides = runs.LAYOUTS[layout]
    pool = ranks(world_size)
    folder, expected = original(family)
    overrides = (
        *overrides,
        "megatron_wrap.init.platform=cuda",
        f"megatron_lm.model.arch.transformer_impl={implementation}",
    )
    found = pool.run(runs.logits_and_export, str(folder), overrides, str(tmp_path / "out"), "60KB")[0]
    difference = numpy.abs(found - expected).max()
    print(f"{family} {layout} {implementation}: logits differ by {difference:.1e}")
    assert difference <= 1e-4
    before, after = runs.stored(folder), runs.stored(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
