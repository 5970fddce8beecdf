"""Adapters of experts: checkpoints between layouts, peft's folders, and gradients on layouts."""

from __future__ import annotations

import _adapter_runs as runs
import _bridge_runs as bridge
import numpy
import pytest

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTER = {"r": 4, "lora_alpha": 8, "target_modules": ["o_proj"], "target_parameters": EXPERTS}
P = bridge.PARALLEL
EP2 = (f"{P}expert_model_parallel_size=2",)
EXPERT_TP2 = (f"{P}tensor_model_parallel_size=2", f"{P}sequence_parallel=true", f"{P}expert_tensor_parallel_size=2")


TP2_SP = (f"{P}tensor_model_parallel_size=2", f"{P}sequence_parallel=true")
LAYOUTS = {
    "ep2": (2, EP2),
    "ep2-expert-tp2": (4, (*EXPERT_TP2, *EP2)),
    "tp2-sp-ep2": (2, (*TP2_SP, *EP2, f"{P}expert_tensor_parallel_size=1")),
    "expert-tp2-of-dp2": (2, (f"{P}expert_tensor_parallel_size=2",)),
    "pp2": (2, (f"{P}pipeline_model_parallel_size=2",)),
    "cp2": (2, (f"{P}context_parallel_size=2",)),
    "dp2-distributed": (2, ("megatron_lm.train.optimizer.use_distributed_optimizer=true",)),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    return bridge.made_once(tmp_path_factory, lambda folder: None)


@pytest.fixture(scope="module")
def folder(folder_of):
    return folder_of("mixtral")[0]


@pytest.fixture(scope="module")
def on_one_rank(folder_of, ranks, tmp_path_factory):
    settings = runs.overrides_of({**ADAPTER, "init_lora_weights": False, "rank_pattern": {"gate_up_proj": 3}})
    folder = str(folder_of("qwen3-moe")[0])
    return folder, settings, ranks(1).run(runs.gradients, folder, settings, str(tmp_path_factory.mktemp("one")))[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_of_each_factor_is_that_of_one_rank(layout, on_one_rank, ranks, tmp_path):
    folder, settings, expected = on_one_rank
    world_size, overrides = LAYOUTS[layout]
    actual = ranks(world_size).run(runs.gradients, folder, (*settings, *overrides), str(tmp_path))[0]
    assert actual.keys() == expected.keys()
    assert sum(".mlp.experts." in name for name in expected) == 2 * 2 * 2 * 6
    for name, values in expected.items():
        assert numpy.linalg.norm(values) > 0, name
        assert numpy.linalg.norm(actual[name] - values) <= 1e-5 * numpy.linalg.norm(values), name


def test_a_run_is_resumed_on_another_layout(folder, ranks, tmp_path):
    """Saved with tensor-parallel experts after two of three steps, continued with experts on two ranks."""
    settings = runs.overrides_of(ADAPTER)
    whole = ranks(1).run(runs.train_and_resume, str(folder), settings, str(tmp_path), 3, None)[0]
    save = str(tmp_path / "run")
    saved = ranks(2).run(runs.train_and_resume, str(folder), (*settings, *EXPERT_TP2), save, 2, None)[0]
    numpy.testing.assert_allclose(saved[0], whole[0][:2], rtol=1e-5)
    resumed = ranks(2).run(runs.train_and_resume, str(folder), (*settings, *EP2), save, 3, None)[0]
    numpy.testing.assert_allclose(resumed[0], whole[0][2:], rtol=1e-5)


def test_a_folder_of_peft_is_loaded_on_a_layout(folder, ranks, tmp_path):
    """The factors are peft's bit for bit, and the logits those of its model; other targets are refused."""
    adapter = {**ADAPTER, "init_lora_weights": False}
    peft = runs.peft_model(folder, adapter)
    peft.save_pretrained(tmp_path / "peft")
    factors, expected = runs.peft_factors(peft), runs.peft_logits(peft)
    settings = runs.overrides_of({**ADAPTER, "path": str(tmp_path / "peft")})
    for layout in (EP2, EXPERT_TP2):
        loaded, logits = ranks(2).run(runs.load, str(folder), (runs.SELECT, *settings, *layout), str(tmp_path / "out"))[
            0
        ]
        assert loaded.keys() == factors.keys()
        assert all(numpy.array_equal(loaded[name], factors[name]) for name in factors)
        assert numpy.abs(logits - expected).max() <= 1e-5
    other = runs.overrides_of({**ADAPTER, "target_parameters": EXPERTS[:1], "path": str(tmp_path / "peft")})
    with pytest.raises(Exception, match=r"write megatron_wrap\.adapter\.target_parameters=\[mlp.*, mlp"):
        ranks(1).run(runs.load, str(folder), (runs.SELECT, *other), str(tmp_path / "out"))
