"""Import and export of Hugging Face folders: a random transformers model of each family has transformers' logits on
each layout, and the exported folder equals the original bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import _bridge_runs as runs
import _prediction_runs as prediction
import numpy
import pytest
from _covering import covering, family_and_axes, quick
from _layouts import layout


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """original(family) -> its folder and transformers' logits; each is created once."""
    return runs.made_once(tmp_path_factory, runs.expected_logits, max_shard_size="100KB")


def load(folder: Path) -> Any:
    model, info = runs.transformers_model(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize(("family", "name"), covering(runs.ON_CPUS, family_and_axes))
def test_logits_are_those_of_transformers_and_the_export_is_the_original(family, name, ranks, original, tmp_path):

    folder, expected = original(family)
    world_size, overrides = runs.LAYOUTS[name]
    logits = ranks(world_size).run(runs.logits_and_export, str(folder), overrides, str(tmp_path / "out"), "60KB")[0]
    assert expected.std() > 0.3
    assert numpy.abs(logits - expected).max() <= 1e-4
    # the files contain the original tensors; that transformers loads the same model is checked once for each family
    assert_same_tensors(runs.stored(tmp_path / "out"), runs.stored(folder))
    if name == "tp2-pp2":
        assert_same_model(load(tmp_path / "out"), load(folder))


def assert_same_tensors(actual: Any, expected: Any) -> None:
    import torch

    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


def assert_same_model(actual: Any, expected: Any) -> None:
    """Two models of transformers."""
    assert actual.config.to_dict() == {**expected.config.to_dict(), "_name_or_path": actual.config.name_or_path}
    assert_same_tensors(actual.state_dict(), expected.state_dict())


@pytest.mark.parametrize("name", runs.VISION)
def test_the_text_model_of_a_folder_with_a_vision_encoder_is_read_and_exported_alone(name, ranks, tmp_path):
    import torch
    import transformers

    folder = tmp_path / "with-vision"
    expected = runs.make_folder_with_vision(name, folder)
    out = str(tmp_path / "out")
    ahead = int(name == "qwen3.5-moe")  # of Qwen3.5 without experts the layer for multi-token prediction is left out
    overrides = (*runs.LAYOUTS["tp2"][1], *["megatron_lm.model.arch.mtp_num_layers=1"] * ahead)
    logits = ranks(2).run(runs.logits_and_export, str(folder), overrides, out, "200KB", True)[0]
    assert numpy.abs(logits - expected).max() <= 1e-4
    exported = load(tmp_path / "out")
    assert exported.config.model_type == getattr(transformers, runs.FAMILIES[name][0]).config_class.model_type
    with torch.no_grad():
        again = exported.eval()(torch.tensor(runs.token_ids())).logits.numpy()
    assert numpy.abs(again - expected).max() <= 1e-5
    before, after = load(folder), load(tmp_path / "out-vision")
    if hasattr(before.config.text_config, "mtp_num_hidden_layers"):
        before.config.text_config.mtp_num_hidden_layers = ahead
    assert_same_model(after, before)
    if ahead:
        check_kept_prediction_layer(folder, tmp_path / "out-vision")


def check_kept_prediction_layer(folder: Path, exported: Path) -> None:
    """The layer for multi-token prediction of a folder with stacked experts, which an export has in a tensor each."""
    before, after = (
        {n: t for n, t in prediction.stored(f).items() if n.startswith("mtp.")} for f in (folder, exported)
    )
    experts = "mtp.layers.0.mlp.experts."
    parts = zip(before.pop(f"{experts}gate_up_proj"), before.pop(f"{experts}down_proj"), strict=True)
    for expert, (gate_up, down) in enumerate(parts):
        tensors = dict(zip(("gate", "up", "down"), (*gate_up.chunk(2), down), strict=True))
        before |= {f"{experts}{expert}.{part}_proj.weight": tensor for part, tensor in tensors.items()}
    assert_same_tensors(after, before)


def test_a_trained_text_model_is_exported_beside_its_vision_encoder(ranks, tmp_path):
    import torch

    folder = tmp_path / "with-vision"
    initial = runs.make_folder_with_vision("gemma3", folder)
    logits = ranks(2).run(runs.train_beside_vision, str(folder), runs.LAYOUTS["tp2"][1], str(tmp_path))[0]
    assert numpy.abs(logits - initial).max() > 1e-3
    exported = load(tmp_path / "model").eval()
    assert type(exported).__name__ == "Gemma3ForConditionalGeneration"
    with torch.no_grad():
        theirs = exported(input_ids=torch.tensor(runs.token_ids())).logits.numpy()
    assert numpy.abs(theirs - logits).max() <= 1e-4

    before, after = runs.stored(folder), runs.stored(tmp_path / "model")
    assert after.keys() == before.keys()
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    assert changed == {name for name in before if name.startswith("language_model.")}


@pytest.mark.parametrize("name", quick(["tp2-pp2", "cp2", "pp2-vpp2", "dp2-dopt"], ["tp2-pp2", "cp2"]))
def test_verification_finds_a_changed_weight_on_any_layout(name, ranks, tmp_path, original):
    world_size, overrides = layout(name)
    folder, _ = original("llama-four-layers")
    good, bad, streamed = ranks(world_size).run(runs.verify, str(folder), overrides, str(tmp_path))[0]
    assert good["agrees"], good
    assert good["weights"] == 2 + 1 + 4 * 9
    assert [output["name"] for output in good["activations"]] == [
        *("embedding", "layer 0", "layer 1", "layer 2", "layer 3"),
        *("logits of sequence 0", "logits of sequence 1"),
    ]
    assert not bad["agrees"]
    assert bad["first_difference"].startswith("weight model.layers.2.mlp.down_proj.weight differs by 0.5 ")
    assert [output["agrees"] for output in bad["activations"]] == [True, True, True, False, False, False, False]
    expected = load(folder).state_dict()
    assert streamed.keys() == expected.keys()
    for weight, array in streamed.items():
        assert (array == expected[weight].numpy()).all(), weight


def test_a_resumed_run_does_not_load_the_folder_again(ranks, tmp_path, original):
    folder, _ = original("qwen2")
    first, second, exported = ranks(2).run(runs.train_twice, str(folder), runs.LAYOUTS["tp2"][1], str(tmp_path))[0]
    assert first == second
    weights = load(tmp_path / "out").state_dict()
    assert all((weights[name].numpy() == array).all() for name, array in exported.items())
    before = load(folder).state_dict()
    assert not any((before[name].numpy() == array).all() for name, array in exported.items())
