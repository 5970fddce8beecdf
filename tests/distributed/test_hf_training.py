"""Thirty steps of supervised fine-tuning from one Hugging Face folder, compared with a transformers model, torch's
AdamW and gradient clipping and transformers' cosine schedule. Loss and gradient norm agree at every step."""

from __future__ import annotations

import _bridge_runs as runs
import numpy
import pytest
from _covering import quick
from _hf_training_runs import CLIP, samples, their_loss, train_ours, train_transformers
from _layouts import layout

STEPS = 30
SWITCHES = {"linear": ("megatron_wrap.model_provider.linear_cross_entropy=true",)}


MUON = "megatron_lm.train.optimizer."


def test_steps_of_muon_agree_with_torch_s_on_transformers_matrices(ranks, tmp_path):
    """Fused, sharded matrices on four ranks; both sides iterate in fp32, because bf16 magnifies rounding."""
    folder, steps = runs.make_folder("llama", tmp_path / "folder"), 20
    expected = train_transformers(folder, steps, muon=True)
    world_size, overrides = layout("tp2-pp2")
    muon = (f"{MUON}__select__=muon", f"{MUON}muon_ns_dtype=fp32")
    actual = ranks(world_size).run(train_ours, str(folder), (*overrides, *muon), str(tmp_path), steps)[0][0]
    assert expected[-1][0] < 0.97 * expected[0][0]
    numpy.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """theirs(family) -> the folder, and transformers' (loss, norm) of each step."""
    return runs.made_once(tmp_path_factory, lambda folder: train_transformers(folder, STEPS))


QUICK = ["llama one", "qwen3 tp2-pp2"]


@pytest.mark.parametrize("case", quick([*QUICK, "llama cp2", "smollm3 tp2-pp2-linear", "seed-oss cp2"], QUICK))
def test_thirty_steps_agree_with_transformers(case, ranks, theirs, tmp_path):
    family, name = case.split()
    import torch
    from transformers import AutoModelForCausalLM

    folder, expected = theirs(family)
    world_size, overrides = layout(name, SWITCHES)
    actual, evaluation, _ = ranks(world_size).run(train_ours, str(folder), overrides, str(tmp_path), STEPS)[0]
    assert max(norm for _, norm in expected) > CLIP  # gradients were clipped
    assert expected[-1][0] < 0.9 * expected[0][0]
    numpy.testing.assert_allclose(actual, expected, rtol=1e-5)

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        assert their_loss(model.eval(), samples(6, seed=32)).item() == pytest.approx(evaluation, rel=1e-5)
