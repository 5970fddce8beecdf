"""Adapters of the layers of both implementations, and of frozen weights in FP8; skipped without a GPU or
Transformer Engine."""

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import numpy
from _implementations import HAS_TE

from megatron_wrap.core import MegatronWrap
from megatron_wrap.platform import choose_platform

CONFIG = Path(__file__).parents[2] / "scripts/benchmark/overhead.yaml"
FP8 = "megatron_lm.train.dtype.fp8=hybrid"
STEPS = 6

pytestmark = pytest.mark.skipif(not HAS_TE, reason="Transformer Engine is not installed")


@pytest.fixture
def fp8():
    missing = choose_platform("cuda").missing_for_fp8("delayed")
    if missing is not None:
        pytest.skip(missing)


def batches() -> list[list[dict]]:
    """Random tokens that fill the context of 256, 8 samples a step."""
    tokens = numpy.random.default_rng(3).integers(0, 4096, (STEPS, 8, 257))
    return [[{"input_ids": row.tolist(), "loss_mask": [1] * 257} for row in batch] for batch in tokens]


def train(folder, implementation, *overrides, steps=STEPS, save=False):
    """(losses and norms of the gradient of the remaining steps, digest of the frozen weights before and after)."""
    overrides = [
        f"megatron_lm.model.arch.transformer_impl={implementation}",
        "megatron_lm.model.arch.ffn_hidden_size=768",
        "megatron_lm.train.learning-rate.lr=1e-2",
        "megatron_wrap.adapter.__select__=lora",
        "megatron_wrap.adapter.target_modules=all-linear",
        f"megatron_lm.train.common.save={folder}/checkpoints",
        f"megatron_wrap.logger.output_dir={folder}",
        *overrides,
    ]
    with MegatronWrap(CONFIG, overrides=overrides) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()

        def frozen():
            values = [value for chunk in wrap.state.chunks for value in chunk.parameters()]
            return [value.detach().clone() for value in values if not value.requires_grad]

        before = frozen()
        results = [wrap.train(batch) for batch in batches()[wrap.iteration : steps]]
        unchanged = all(torch.equal(value, later) for value, later in zip(before, frozen(), strict=True))
        if save:
            wrap.save()
    return [(result["loss"], result["grad_norm"]) for result in results], unchanged


def test_the_two_implementations_agree_in_fp32(tmp_path):
    ours, unchanged = train(tmp_path / "torch", "torch")
    theirs, theirs_unchanged = train(tmp_path / "te", "transformer_engine")
    numpy.testing.assert_allclose(theirs, ours, rtol=1e-4)
    assert unchanged
    assert theirs_unchanged
    assert ours[0][1] > 0


def test_with_fp8_the_losses_are_those_of_bf16(tmp_path, fp8):
    bf16 = "megatron_lm.train.dtype.__select__=bf16"
    in_bf16, _ = train(tmp_path / "bf16", "auto", bf16)
    in_fp8, unchanged = train(tmp_path / "fp8", "auto", bf16, FP8)
    numpy.testing.assert_allclose([loss for loss, _ in in_fp8], [loss for loss, _ in in_bf16], rtol=0.01)
    assert unchanged
    assert in_fp8 != in_bf16


def test_an_fp8_run_resumes_with_its_scales(tmp_path, fp8, ranks):
    """Bit for bit, in a process with deterministic kernels."""
    settings = ("megatron_lm.train.dtype.__select__=bf16", FP8)

    def run(folder, **options):
        [(results, _)] = ranks(1).run(train, tmp_path / folder, "auto", *settings, **options)
        return results

    uninterrupted = run("uninterrupted")
    assert run("resumed", steps=3, save=True) + run("resumed") == uninterrupted
