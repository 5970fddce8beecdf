"""Preference optimization compared with trl on the same model and pairs, on several layouts and with a resume."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import _dpo_runs as runs
import pytest
import torch
from _checkpoint_runs import CP2, DISTRIBUTED, DROPOUT, PP2, PP2_VPP2, TP2, in_new_processes
from _covering import covering
from _dpo_runs import COPY

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "model"))
from transformers_models import build, load_all, to_llama_like

from megatron_wrap.config import load_run_config

ROUNDING = 3e-6
"""Rounding error of a margin: log-probabilities near -120 have an ulp of 7.6e-6 in fp32; four of them times beta."""
LAYOUTS = {
    "one-rank": (1, ()),
    "tp2-sp": (2, TP2),
    "pp2-vpp2": (2, PP2_VPP2),
    "cp2": (2, CP2),
    "dp2": (2, ()),
    "tp2-pp2": (4, (*TP2, *PP2)),
    "cp2-dp2": (4, CP2),
}


@pytest.fixture(scope="module")
def of_trl(ranks, tmp_path_factory) -> list[dict[str, Any]]:
    """trl's metrics of ten steps from the same weights on the same pairs in the same order."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer

    class InOrder(DPOTrainer):
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
            return dataset  # already tokenized

    config = load_run_config(runs.CONFIG, runs.DPO)
    weights = ranks(1).run(runs.initial_weights, runs.DPO)[0]
    ours = {name: torch.from_numpy(weight) for name, weight in weights.items()}
    model, reference = (build(LlamaForCausalLM, config.arch, to_llama_like) for _ in range(2))
    for one in (model, reference):
        load_all(one, to_llama_like(ours, config))
    from tokenizers import Tokenizer, models

    vocabulary = {str(number): number for number in range(runs.VOCAB)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="0")), pad_token="0", eos_token="1"
    )
    settings = DPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=10,
        learning_rate=config.learning_rate.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=config.optimizer.clip_grad,
        logging_steps=1,
        beta=0.1,
        max_length=None,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    trainer = InOrder(
        model, reference, args=settings, train_dataset=Dataset.from_list(runs.pairs()), processing_class=tokenizer
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 10
    return steps


@pytest.mark.parametrize("name", covering(LAYOUTS))
def test_ten_steps_agree_with_trl(ranks, of_trl, name):
    processes, overrides = LAYOUTS[name]
    batch = f"{runs.TRAIN}.micro_batch_size={1 if processes > 1 else 2}"
    found = ranks(processes).run(runs.train, (*COPY, *overrides, batch), runs.pairs())[0]
    assert found[-1]["rewards/margins"] > found[1]["rewards/margins"] > found[0]["rewards/margins"] == 0
    for step, (ours, theirs) in enumerate(zip(found, of_trl, strict=True)):
        for metric, value in ours.items():
            assert value == pytest.approx(theirs[metric], rel=1e-4, abs=ROUNDING), f"{metric} of step {step}"


RESUMED = {
    "one-rank": (1, ()),
    "tp2-sp": (2, TP2),
    "pp2-vpp2": (2, PP2_VPP2),
    "cp2": (2, CP2),
    "dp2-distributed": (2, DISTRIBUTED),
}


@pytest.mark.parametrize("name", covering(RESUMED))
def test_a_resume_after_five_of_ten_steps_is_bit_exact(tmp_path, name):
    processes, layout = RESUMED[name]
    overrides = (*COPY, *layout, *DROPOUT, f"{runs.TRAIN}.save={tmp_path}", f"{runs.TRAIN}.micro_batch_size=1")
    straight = in_new_processes(processes, runs.train, overrides, runs.pairs(), 10, 5)[0]
    saved_once = (tmp_path / "reference" / "iter_0000000" / ".metadata").stat().st_mtime_ns
    resumed = in_new_processes(processes, runs.train, overrides, runs.pairs(), 10, 10)[0]
    assert len(resumed) == 5
    assert straight[5:] == resumed
    assert (tmp_path / "reference" / "iter_0000000" / ".metadata").stat().st_mtime_ns == saved_once


def test_a_run_resumes_on_another_layout_with_its_reference(ranks, tmp_path):
    overrides = (*COPY, f"{runs.TRAIN}.save={tmp_path}", f"{runs.TRAIN}.micro_batch_size=1")
    straight = ranks(2).run(runs.train, (*overrides, *TP2), runs.pairs(), 10, 5)[0]
    resumed = ranks(2).run(runs.train, (*overrides, *PP2), runs.pairs(), 10)[0]
    for ours, theirs in zip(resumed, straight[5:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=ROUNDING)


def test_outputs_of_forward_replace_the_reference_model(ranks):
    """The samples contain precomputed log-probabilities instead of a second model."""
    given = ranks(2).run(runs.outputs, CP2, runs.pairs())[0]
    samples = [
        {**pair, **{f"reference_{name}": value for name, value in of_pair.items()}}
        for pair, of_pair in zip(runs.pairs(), given, strict=True)
    ]
    found = ranks(1).run(runs.train, (), samples, 4)[0]
    with_model = ranks(1).run(runs.train, COPY, runs.pairs(), 4)[0]
    for ours, theirs in zip(found, with_model, strict=True):
        if ours is found[0]:  # margins are 0 up to rounding of either sign
            assert ours.pop("rewards/accuracies") >= theirs.pop("rewards/accuracies") == 0
        assert ours == pytest.approx(theirs, rel=1e-5, abs=ROUNDING)
    both = ranks(1).run(runs.refusal, COPY, samples)[0]
    assert "reference_chosen_log_probs, reference_rejected_log_probs" in both


def test_an_evaluation_uses_the_reference(ranks):
    expected = ranks(1).run(runs.evaluation, COPY, runs.pairs(), 3)[0]
    assert abs(expected["eval/set/rewards/margins"]) > 1e-3
    for name in ("tp2-sp", "pp2-vpp2", "cp2", "dp2"):
        processes, overrides = LAYOUTS[name]
        overrides = (*COPY, *overrides, f"{runs.TRAIN}.micro_batch_size=1")
        found = ranks(processes).run(runs.evaluation, overrides, runs.pairs(), 3)[0]
        assert found == pytest.approx(expected, rel=1e-4, abs=ROUNDING), name


def test_a_missing_reference_is_refused(ranks, tmp_path):
    message = ranks(1).run(runs.refusal, (), runs.pairs())[0]
    assert "megatron_wrap.models.reference: copy" in message
    save = (f"{runs.TRAIN}.save={tmp_path}",)
    given = [
        {**pair, "reference_chosen_log_probs": -9.0, "reference_rejected_log_probs": -9.5} for pair in runs.pairs()
    ]
    ranks(1).run(runs.train, save, given, 2, 2)
    message = ranks(1).run(runs.refusal, (*save, *COPY), runs.pairs())[0]
    assert f"{tmp_path} contains no reference model" in message
    assert "finetune: true" in message
