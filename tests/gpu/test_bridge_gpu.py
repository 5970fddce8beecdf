"""Hugging Face import and export on GPUs with both implementations in fp32: the cases of
tests/distributed/test_bridge.py for which there are enough GPUs; skipped without a GPU."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import _bridge_runs as runs
import numpy
from _implementations import IMPLEMENTATIONS, by_gpus, on_gpu


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """original(family) -> its folder and transformers' logits on the CPU."""
    return runs.made_once(tmp_path_factory, runs.expected_logits, max_shard_size="100KB")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("family", "layout"), by_gpus(runs.CASES, runs.LAYOUTS))
def test_logits_equal_transformers_and_the_export_equals_the_original(
    family, layout, implementation, ranks, original, tmp_path
):
    world_size, overrides = runs.LAYOUTS[layout]
    pool = ranks(world_size)
    folder, expected = original(family)
    actual = pool.run(
        runs.logits_and_export, str(folder), on_gpu(overrides, implementation), str(tmp_path / "out"), "60KB"
    )[0]
    difference = numpy.abs(actual - expected).max()
    print(f"{family} {layout} {implementation}: logits differ by {difference:.1e}")
    assert difference <= 1e-4
    before, after = runs.stored(folder), runs.stored(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
