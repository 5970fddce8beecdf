"""Parameters that are trained whole in addition to adapters (modules_to_save), against peft: the head of a value
model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import _dpo_runs as pair_runs
import _saved_runs as runs
import numpy
import pytest
import torch
from _adapter_runs import SELECT, overrides_of
from _checkpoint_runs import PP2, TP2
from _dpo_runs import CONFIG, pairs
from _trl_runs import on_tokens, steps_of_trl

from megatron_wrap.config import load_run_config

ADAPTER: dict[str, Any] = {"r": 4, "lora_alpha": 8, "init_lora_weights": False}
REWARD = (
    *pair_runs.of_flow("gpt_reward", {}),
    "megatron_wrap.model_provider.provider_key=gpt_value_model",
    f"{pair_runs.TRAIN}.micro_batch_size=2",
)
STEPS, BATCH = 5, 4
SAMPLES = pairs(STEPS * BATCH)
SCORED = [pair["prompt_ids"] + pair["chosen_ids"] for pair in SAMPLES[:6]]
SINGLE = [{"input_ids": ids} for ids in SCORED]
HEAD = "base_model.model.score.weight"
METRICS = ("loss", "grad_norm")


def adapted(folder: Path, *overrides: str) -> tuple[str, ...]:
    """Overrides of a run with an adapter that starts from a folder."""
    start = f"megatron_wrap.model_provider.hf_path={folder}"
    return (*REWARD, start, SELECT, *overrides_of(ADAPTER), *overrides)


def scorer(folder: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, pad_token_id=0)


def scores_of(model: Any) -> list[float]:
    """Scores of `SCORED`."""
    with torch.no_grad():
        return [float(model(torch.tensor([ids])).logits[0, 0]) for ids in SCORED]


def in_files(peft: Any) -> dict[str, Any]:
    """Name in peft's files -> tensor."""
    from peft import get_peft_model_state_dict

    return {name: tensor.detach().numpy() for name, tensor in get_peft_model_state_dict(peft).items()}


@pytest.fixture(scope="module")
def value_model(ranks, tmp_path_factory) -> Path:
    """The folder of a value model with initial weights."""
    folder = tmp_path_factory.mktemp("value") / "hf"
    ranks(1).run(pair_runs.export, str(folder), REWARD)
    return folder


@pytest.fixture(scope="module")
def on_one_rank(ranks, value_model, tmp_path_factory) -> Any:
    """Results of `train_scores` and the folder of its outputs."""
    outputs = tmp_path_factory.mktemp("one-rank")
    return *ranks(1).run(runs.train_scores, adapted(value_model), SAMPLES, SINGLE, str(outputs))[0], outputs


def test_a_reward_model_trains_as_with_trl_and_peft(value_model, on_one_rank, tmp_path):
    from peft import LoraConfig, PeftModelForSequenceClassification, get_peft_model, set_peft_model_state_dict
    from trl import RewardConfig, RewardTrainer

    steps, initial, trained, scores, base, _ = on_one_rank
    model = scorer(value_model)
    assert base == pytest.approx(scores_of(model), abs=1e-5)
    options = {**ADAPTER, "init_lora_weights": True, "target_modules": "all-linear"}
    peft = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", **options))
    assert isinstance(peft, PeftModelForSequenceClassification)
    assert in_files(peft).keys() == initial.keys()
    assert HEAD in initial
    set_peft_model_state_dict(peft, {name: torch.from_numpy(value) for name, value in initial.items()})
    samples = [
        {f"{side}_ids": pair["prompt_ids"] + pair[f"{side}_ids"] for side in ("chosen", "rejected")} for pair in SAMPLES
    ]
    config = load_run_config(CONFIG, REWARD)
    theirs = steps_of_trl(on_tokens(RewardTrainer), RewardConfig, config, peft, samples, tmp_path)
    for ours, expected in zip(steps, theirs, strict=True):
        assert [ours[key] for key in METRICS] == pytest.approx([expected[key] for key in METRICS], rel=1e-4)
    peft = peft.cpu().eval()
    for name, expected in in_files(peft).items():
        assert numpy.linalg.norm(trained[name] - expected) <= 1e-4 * numpy.linalg.norm(expected), name
    assert numpy.abs(trained[HEAD] - initial[HEAD]).max() > 1e-3
    assert scores == pytest.approx(scores_of(peft), abs=1e-4)
    assert numpy.abs(numpy.subtract(scores, base)).max() > 1e-3


def test_peft_loads_its_folder(value_model, on_one_rank):
    """Bit for bit, and merges to what we merge."""
    from peft import PeftModel, PeftModelForSequenceClassification

    _, _, trained, scores, _, outputs = on_one_rank
    peft = PeftModel.from_pretrained(scorer(value_model), outputs / "adapter")
    assert isinstance(peft, PeftModelForSequenceClassification)
    loaded = in_files(peft)
    assert loaded.keys() == trained.keys()
    assert all(numpy.array_equal(loaded[name], trained[name]) for name in trained)
    assert scores == pytest.approx(scores_of(peft), abs=1e-5)
    merged, ours = peft.merge_and_unload().state_dict(), scorer(outputs / "merged").state_dict()
    for name, expected in merged.items():
        assert torch.allclose(ours[name], expected, rtol=0, atol=1e-6), name


@pytest.mark.parametrize(
    ("count", "layout"),
    [
        pytest.param(2, PP2, id="pp2"),
        pytest.param(4, (*TP2, *PP2), id="tp2-sp-pp2", marks=pytest.mark.matrix),
    ],
)
def test_a_layout_trains_like_one_rank(value_model, on_one_rank, ranks, count, layout, tmp_path):
    arguments = adapted(value_model, *layout), SAMPLES, SINGLE, str(tmp_path)
    steps, initial, trained, scores, base = ranks(count).run(runs.train_scores, *arguments)[0]
    expected = on_one_rank
    for ours, theirs in zip(steps, expected[0], strict=True):
        assert [ours[key] for key in METRICS] == pytest.approx([theirs[key] for key in METRICS], rel=1e-5)
    assert all(numpy.array_equal(initial[name], expected[1][name]) for name in initial)
    for name, theirs in expected[2].items():
        assert numpy.linalg.norm(trained[name] - theirs) <= 1e-4 * numpy.linalg.norm(theirs), name
    assert scores == pytest.approx(expected[3], abs=1e-5)
    assert base == pytest.approx(expected[4], abs=1e-5)


def test_peft_s_folder_is_loaded_on_a_layout(value_model, on_one_rank, ranks, tmp_path):
    """With the head in it, bit for bit."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    options = {**ADAPTER, "target_modules": "all-linear"}
    peft = get_peft_model(scorer(value_model), LoraConfig(task_type="SEQ_CLS", **options))
    with torch.no_grad():
        peft.base_model.model.score.modules_to_save["default"].weight.normal_()
    peft.save_pretrained(tmp_path / "peft")
    from_folder = f"megatron_wrap.adapter.path={tmp_path / 'peft'}"
    loaded = ranks(4).run(runs.loaded_factors, adapted(value_model, *TP2, *PP2, from_folder))[0]
    expected = in_files(peft)
    assert loaded.keys() == expected.keys()
    assert all(numpy.array_equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize("keep_base", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_a_resumed_run_continues_on_another_layout(keep_base, value_model, ranks, tmp_path):
    """Its checkpoint contains the head and the factors alone; `keep_base` adds the base with the original head."""
    straight = ranks(1).run(
        runs.train_until, adapted(value_model, f"{pair_runs.TRAIN}.save={tmp_path / 'straight'}"), SAMPLES, 4
    )[0]
    folder = tmp_path / "resumed"
    kept = f"megatron_wrap.adapter.keep_base={'true' if keep_base else 'false'}"
    keys = (f"{pair_runs.TRAIN}.save={folder}", kept)
    saved = ranks(2).run(runs.train_until, adapted(value_model, *TP2, *keys), SAMPLES, 2)[0]
    weights = [name for name in saved[2] if not name.startswith("optimizer.")]
    assert "modules_to_save.output_layer.weight" in weights
    assert ("output_layer.weight" in weights) is keep_base
    assert ("embedding.word_embeddings.weight" in weights) is keep_base
    resumed = ranks(2).run(runs.train_until, adapted(value_model, *PP2, *keys), SAMPLES, 4)[0]
    for ours, theirs in zip(resumed[0], straight[0][2:], strict=True):
        assert [ours[key] for key in METRICS] == pytest.approx([theirs[key] for key in METRICS], rel=1e-5)
    for name, theirs in straight[1].items():
        assert numpy.linalg.norm(resumed[1][name] - theirs) <= 1e-4 * numpy.linalg.norm(theirs), name
