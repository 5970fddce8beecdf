"""Layers for multi-token prediction: training is that of transformers' `MtpModel` and of plain torch, on every layout;
exports are bitwise; without a loss the layers stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import _bridge_runs as bridge
import _prediction_runs as runs
import numpy
import pytest
from layout_runs import token_samples

from megatron_wrap.testing import check_parity

CONFIG = Path(__file__).parent / "layouts.yaml"
PARALLEL = bridge.PARALLEL
TIED = (
    "megatron_lm.model.arch.untie_embeddings_and_output_weights=false",
    "megatron_wrap.model_provider.linear_cross_entropy=true",
)
PACKED = "megatron_wrap.flow.packing=true"
DISTRIBUTED = "megatron_lm.train.optimizer.use_distributed_optimizer=true"
VIRTUAL = (
    f"{PARALLEL}pipeline_model_parallel_size=2",
    f"{PARALLEL}virtual_pipeline_model_parallel_size=2",
)
LAYOUTS = {
    **bridge.LAYOUTS,
    "one-packed": (1, (PACKED,)),
    "tp2-sp": (2, (f"{PARALLEL}tensor_model_parallel_size=2", f"{PARALLEL}sequence_parallel=true")),
    "cp2-packed": (2, (f"{PARALLEL}context_parallel_size=2", PACKED)),
    "ep2-packed": (2, (f"{PARALLEL}expert_model_parallel_size=2", PACKED)),
    "pp2-vpp2": (2, VIRTUAL),
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """theirs(family) -> the folder, and transformers' steps and losses of its layers for multi-token prediction."""
    made: dict[str, Any] = {}

    def of(name: str) -> tuple[Path, Any]:
        if name not in made:
            folder = runs.make_folder(name, tmp_path_factory.mktemp(name))
            made[name] = folder, runs.train_transformers(folder)
        return made[name]

    return of


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("deepseek-v3", "cp2-packed"),
        ("qwen3.5", "pp2-vpp2"),
        ("qwen3-next", "tp2-sp"),
        ("qwen3.5", "tp2-pp2"),
        ("qwen3.5-moe", "ep2-packed"),
        pytest.param("deepseek-v3", "one", marks=pytest.mark.matrix),
        pytest.param("deepseek-v3", "tp2-pp2", marks=pytest.mark.matrix),
        pytest.param("glm4-moe", "ep2-packed", marks=pytest.mark.matrix),
        pytest.param("qwen3-next", "cp2-packed", marks=pytest.mark.matrix),
        pytest.param("qwen3-next", "one", marks=pytest.mark.matrix),
        pytest.param("qwen3-next", "pp2", marks=pytest.mark.matrix),
        pytest.param("qwen3-next", "ep2-tp2", marks=pytest.mark.matrix),
        pytest.param("qwen3.5", "cp2", marks=pytest.mark.matrix),
        pytest.param("qwen3.5", "one-packed", marks=pytest.mark.matrix),
        pytest.param("glm4-moe", "pp2-vpp2", marks=pytest.mark.matrix),
        pytest.param("qwen3.5-moe", "pp2", marks=pytest.mark.matrix),
        pytest.param("glm4-moe-plain", "pp2", marks=pytest.mark.matrix),
        pytest.param("glm4-moe", "one", marks=pytest.mark.matrix),
        pytest.param("glm4-moe", "tp2-pp2", marks=pytest.mark.matrix),
        pytest.param("glm4-moe", "cp2-packed", marks=pytest.mark.matrix),
        pytest.param("deepseek-v3", "ep2-tp2", marks=pytest.mark.matrix),
    ],
)
def test_five_steps_are_those_of_transformers_and_exports_are_bitwise(family, layout, ranks, theirs, tmp_path):
    folder, (steps, of_layers) = theirs(family)
    processes, overrides = LAYOUTS[layout]
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
        runs.train_ours, str(folder), (*kept, *LAYOUTS["pp2"][1]), str(tmp_path), ("after",)
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


@pytest.mark.parametrize(
    ("layouts", "further"),
    [
        pytest.param(["packed-pp2-vpp2", "tp2-sp", "cp2", "dp2-dopt"], (), id="each axis"),
        pytest.param(
            ["pp2-dp2", "tp2-sp-pp2"],
            ("megatron_lm.train.common.neftune_noise_alpha=20",),
            id="noise",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            ["tp2-sp", "packed-pp2-vpp2"],
            ("megatron_wrap.model_provider.linear_cross_entropy=true",),
            id="linear",
            marks=pytest.mark.matrix,
        ),
        pytest.param(["packed-pp2-vpp2", "tp2-sp-pp2", "dp2-dopt"], TIED, id="tied", marks=pytest.mark.matrix),
        pytest.param(
            ["mbs1", "padded", "tp2", "pp2-cp2", "tp2-sp-cp2", "packed-tp2-sp-cp2", "token-budget-dp2"],
            (),
            id="others",
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_losses_and_gradients_are_the_same_on_every_layout(layouts, further, ranks):
    samples = token_samples(16, 48)
    for sample in samples[:2]:  # without a loss token for the layers
        sample["loss_mask"] = [1, 1] + [0] * (len(sample["loss_mask"]) - 2)
    overrides = (f"{runs.ARCH}mtp_num_layers=2", f"{runs.ARCH}mtp_loss_scaling_factor=0.5", *further)
    report = check_parity(CONFIG, overrides, samples=samples, layouts=layouts, steps=2, ranks=ranks)
    assert [row.agrees for row in report.rows] == [True] * len(layouts), report.table()


@pytest.mark.parametrize(
    ("family", "before", "after", "tolerance"),
    [
        pytest.param("deepseek-v3", "pp2", "pp2", 0.0, marks=pytest.mark.matrix),
        pytest.param("deepseek-v3", "tp2-pp2", "ep2", 1e-5, marks=pytest.mark.matrix),
        ("deepseek-v3", "ep2", "pp2", 1e-5),
        ("qwen3.5", "pp2", "pp2", 0.0),
        pytest.param("qwen3.5", "one", "pp2", 1e-5, marks=pytest.mark.matrix),
    ],
)
def test_a_resumed_run_continues(family, before, after, tolerance, ranks, theirs, tmp_path):
    """Bit for bit on the same layout; the weights, the optimizer's state and the copy of the embedding are those of the
    checkpoint on others. Of Qwen3.5 the copy is the tied output layer's weight."""
    folder, _ = theirs(family)
    results = []
    for name, layout in (("whole", before), ("resumed", after)):
        processes, overrides = LAYOUTS[layout]
        settings = (*runs.arch_overrides(family), *overrides, DISTRIBUTED)
        stop = 2 if name == "whole" else None
        results.append(ranks(processes).run(runs.train_saving, str(folder), settings, str(tmp_path), stop)[0])
    whole, resumed = results
    numpy.testing.assert_allclose(resumed, whole[2:], rtol=tolerance)
