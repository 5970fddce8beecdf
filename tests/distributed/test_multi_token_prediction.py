"""Layers for multi-token prediction: training is that of transformers' `MtpModel` and of plain torch, on every layout;
exports are bitwise; without a loss the layers stay as they are."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import _bridge_runs as bridge
import _prediction_runs as runs
import numpy
import pytest
from _agreement import assert_layouts_agree
from _covering import quick
from _layouts import DISTRIBUTED, layout
from layout_runs import token_samples

TIED = (
    "megatron_lm.model.arch.untie_embeddings_and_output_weights=false",
    "megatron_wrap.model_provider.linear_cross_entropy=true",
)


def on(name: str) -> tuple[int, tuple[str, ...]]:
    """Processes and overrides of a layout."""
    return bridge.LAYOUTS[name] if name in bridge.LAYOUTS else layout(name)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """theirs(family) -> the folder, and transformers' steps and losses of its layers for multi-token prediction."""

    @functools.cache
    def of(name: str) -> tuple[Path, Any]:
        folder = runs.make_folder(name, tmp_path_factory.mktemp(name))
        return folder, runs.train_transformers(folder)

    return of


QUICK = ["deepseek-v3 cp2-packed", "qwen3.5 pp2-vpp2", "qwen3-next tp2", "qwen3.5 tp2-pp2", "qwen3.5-moe ep2-packed"]
CASES = [
    *QUICK,
    *("deepseek-v3 tp2-pp2", "deepseek-v3 ep2-tp2", "qwen3-next cp2-packed", "qwen3-next ep2-tp2", "qwen3.5 cp2"),
    *("qwen3.5-moe pp2", "glm4-moe one", "glm4-moe pp2-vpp2", "glm4-moe ep2-packed", "glm4-moe-plain pp2"),
]
"""Family and layout: each family on stages, with packed rows, and where it has experts with expert parallelism."""


@pytest.mark.parametrize("case", quick(CASES, QUICK))
def test_five_steps_are_those_of_transformers_and_exports_are_bitwise(case, ranks, theirs, tmp_path):
    family, name = case.split()
    folder, (steps, of_layers) = theirs(family)
    processes, overrides = on(name)
    arguments = (str(folder), (*runs.arch_overrides(family), *overrides), str(tmp_path), ("before",))
    actual, of_ours = ranks(processes).run(runs.train_ours, *arguments)[0]
    numpy.testing.assert_allclose(actual, steps, rtol=1e-4)
    numpy.testing.assert_allclose(of_ours, of_layers, rtol=1e-4)
    before, original = runs.stored(tmp_path / "before"), runs.stored(folder)
    assert before.keys() == original.keys()
    assert [name for name in original if not before[name].equal(original[name])] == []


def test_without_a_coefficient_the_layers_stay_as_they_are(ranks, theirs, tmp_path):
    """The losses and norms are those of a run without the layers; PP2 has them on the last stage."""
    family = "deepseek-v3"
    folder, _ = theirs(family)
    kept = (f"{runs.ARCH}mtp_num_layers=1", f"{runs.ARCH}mtp_loss_scaling_factor=0")
    plain, _ = ranks(1).run(runs.train_ours, str(folder), (), str(tmp_path / "plain"))[0]
    actual, of_layers = ranks(2).run(
        runs.train_ours, str(folder), (*kept, *layout("pp2")[1]), str(tmp_path), ("after",)
    )[0]
    numpy.testing.assert_allclose(actual, plain, rtol=1e-5)
    assert of_layers == [[]] * runs.STEPS
    after, original = runs.stored(tmp_path / "after"), runs.stored(folder)
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    layer = [name for name in original if name.startswith("model.layers.2.") and not name.endswith(copies)]
    assert layer
    assert [name for name in layer if not after[name].equal(original[name])] == []
    assert not after["model.layers.1.mlp.gate.weight"].equal(original["model.layers.1.mlp.gate.weight"])
    assert after["model.layers.2.embed_tokens.weight"].equal(after["model.embed_tokens.weight"])


AGREEING = {
    "each axis": ("packed-pp2-vpp2 tp2-sp cp2 dp2-dopt", ()),
    "noise": ("pp2-dp2 tp2-sp-pp2", ("megatron_lm.train.common.neftune_noise_alpha=20",)),
    "tied": ("packed-pp2-vpp2 tp2-sp-pp2 dp2-dopt", TIED),
    "others": ("mbs1 padded pp2-cp2 packed-tp2-sp-cp2 token-budget-dp2", ()),
}


@pytest.mark.parametrize("name", quick(AGREEING, ("each axis",)))
def test_losses_and_gradients_are_the_same_on_every_layout(name, ranks):
    layouts, further = AGREEING[name]
    samples = token_samples(16, 48)
    for sample in samples[:2]:  # without a loss token for the layers
        sample["loss_mask"] = [1, 1] + [0] * (len(sample["loss_mask"]) - 2)
    overrides = (f"{runs.ARCH}mtp_num_layers=2", f"{runs.ARCH}mtp_loss_scaling_factor=0.5", *further)
    assert_layouts_agree(ranks, layouts.split(), overrides, samples)


@pytest.mark.parametrize(
    ("family", "before", "after", "tolerance"),
    [
        ("deepseek-v3", "ep2", "pp2", 1e-5),
        ("qwen3.5", "pp2", "pp2", 0.0),
        pytest.param("deepseek-v3", "tp2-pp2", "ep2", 1e-5, marks=pytest.mark.matrix),
    ],
)
def test_a_resumed_run_continues(family, before, after, tolerance, ranks, theirs, tmp_path):
    """Bit for bit on the same layout; the weights, the optimizer's state and the copy of the embedding are those of the
    checkpoint on others. Of Qwen3.5 the copy is the tied output layer's weight."""
    folder, _ = theirs(family)
    results = []
    for name, of_run in (("whole", before), ("resumed", after)):
        processes, overrides = on(of_run)
        settings = (*runs.arch_overrides(family), *overrides, *DISTRIBUTED)
        stop = 2 if name == "whole" else None
        results.append(ranks(processes).run(runs.train_saving, str(folder), settings, str(tmp_path), stop)[0])
    whole, resumed = results
    numpy.testing.assert_allclose(resumed, whole[2:], rtol=tolerance)
