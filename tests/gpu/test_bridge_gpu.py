"""Hugging Face import and export on GPUs with both implementations in fp32: the cases of
tests/distributed/test_bridge.py for which there are enough GPUs; skipped without a GPU. Where Transformer Engine's
layers lack a feature of a family, the configuration is refused."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import _bridge_runs as runs
import numpy
from _implementations import IMPLEMENTATIONS, by_gpus, on_gpu

from megatron_wrap.config import load_run_config
from megatron_wrap.config.checks.run import check_values
from megatron_wrap.config.hugging_face import HF_PATH
from megatron_wrap.errors import ConfigError


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """original(family) -> its folder and transformers' logits on the CPU."""
    return runs.made_once(tmp_path_factory, runs.expected_logits, max_shard_size="100KB")


def refusal(folder, settings):
    """Why the configuration refuses the model of a folder; None if it does not."""
    try:
        check_values(load_run_config(runs.CONFIG, [f"{HF_PATH}={folder}", *settings]))
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("family", "layout"), by_gpus(runs.CASES, runs.LAYOUTS))
def test_logits_equal_transformers_and_the_export_equals_the_original(
    family, layout, implementation, ranks, original, tmp_path
):
    world_size, overrides = runs.LAYOUTS[layout]
    pool = ranks(world_size)
    folder, expected = original(family)
    settings = on_gpu(overrides, implementation)
    if (reason := refusal(folder, settings)) is not None:
        assert implementation == "transformer_engine"
        assert "transformer_impl" in reason
        return
    actual = pool.run(runs.logits_and_export, str(folder), settings, str(tmp_path / "out"), "60KB")[0]
    difference = numpy.abs(actual - expected).max()
    print(f"{family} {layout} {implementation}: logits differ by {difference:.1e}")
    assert difference <= 1e-4
    before, after = runs.stored(folder), runs.stored(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
