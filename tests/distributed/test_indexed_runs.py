"""Pretraining on indexed data: transformers on the same windows, a killed blend, a decay branch, layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import _bridge_runs as bridge
import _indexed_runs as runs
import numpy
import pytest
from _checkpoint_runs import CONFIG, TRAIN, VOCAB, in_new_processes
from _indexed_runs import DATA, FLOW, keys_of

from megatron_wrap.testing import check_parity
from megatron_wrap.testing.ranks import RankError

STEPS, BATCH, LENGTH = 10, 4, 64
RATE = "megatron_lm.train.learning-rate"
SEPARATE = (f"{DATA}.reset_attention_mask=true", f"{DATA}.reset_position_ids=true", f"{FLOW}.packing=true")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("prefixes")
    runs.write_prefix(made / "a", 120, 1)
    runs.write_prefix(made / "b", 60, 2)
    return made


def blend(folder: Path) -> str:
    return f"[{{path: {folder}/a, weight: 70}}, {{path: {folder}/b, weight: 30}}]"


def test_a_killed_blend_resumes_at_the_next_sample_on_another_dp_size(folder, tmp_path, ranks):
    overrides = keys_of(blend(folder), f"{DATA}.num_workers=1")
    straight = ranks(2).run(runs.train, tmp_path / "straight", overrides, 8)
    with pytest.raises(RankError):
        in_new_processes(2, runs.train, tmp_path / "killed", overrides, 8, 3, 5)
    (resumed,) = in_new_processes(1, runs.train, tmp_path / "killed", overrides, 8)
    assert [ids for ids, _, _ in resumed] == [ids for ids, _, _ in straight[0][3:]]
    assert [loss for _, loss, _ in resumed] == pytest.approx([loss for _, loss, _ in straight[0][3:]], rel=1e-5)
    taken = [sample for ids, _, _ in straight[0] for sample in ids]
    assert len(set(taken)) == len(taken)
    assert {sample[0] for sample in taken} == {"a", "b"}


def test_a_decay_branch_continues_a_constant_run(folder, tmp_path, ranks):
    index = f"{DATA}.index_samples=200"
    constant = keys_of(f"{folder}/a", index, f"{RATE}.lr_decay_style=constant", f"{RATE}.lr_warmup_iters=2")
    (straight,) = ranks(1).run(runs.train, tmp_path / "run", constant, 8, 4)
    branch = keys_of(
        f"{folder}/a",
        index,
        *(f"{TRAIN}.load={tmp_path}/run", f"{TRAIN}.train_iters=8", f"{RATE}.lr_wsd_decay_iters=4"),
        *(f"{RATE}.lr_decay_style=WSD", f"{RATE}.lr_wsd_decay_style=linear", f"{RATE}.min_lr=0"),
        *(f"{RATE}.lr_warmup_iters=2", "megatron_lm.train.optimizer.override_opt_param_scheduler=true"),
    )
    (decayed,) = ranks(1).run(runs.train, tmp_path / "branch", branch, 8)
    assert [ids for ids, _, _ in decayed] == [ids for ids, _, _ in straight[4:8]]
    peak = straight[-1][2]
    assert [rate for _, _, rate in decayed] == pytest.approx([peak, 0.75 * peak, 0.5 * peak, 0.25 * peak])


def their_sums(model: Any, tokens: Any, labels: Any, pieces: list[int]) -> Any:
    """transformers' summed cross-entropy of one window, each document alone."""
    import torch

    total = torch.zeros(())
    for ids, targets in zip(tokens.split(pieces), labels.split(pieces), strict=True):
        logits = model(input_ids=ids[None]).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    return total


def their_training(model_folder: Path, windows: Any, validation: Any, separate: bool) -> Any:
    """(loss, gradient norm) of each step by torch's AdamW without decay of biases and norms; the validation loss."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager")
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.5)

    def mean(samples: list[Any]) -> Any:
        total = torch.zeros(())
        for sample in samples:
            ends = (sample["tokens"] == runs.EOD).nonzero().flatten() + 1
            bounds = [0, *ends.tolist(), LENGTH] if separate else [0, LENGTH]
            pieces = [size for size in numpy.diff(bounds).tolist() if size]
            total = total + their_sums(model, sample["tokens"], sample["labels"], pieces)
        return total / (len(samples) * LENGTH)

    actual = []
    for step in range(STEPS):
        loss = mean([windows[position] for position in range(step * BATCH, (step + 1) * BATCH)])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        actual.append((loss.item(), norm.item()))
    with torch.no_grad():
        return actual, mean([validation[position] for position in range(len(validation))]).item()


@pytest.mark.parametrize(
    ("family", "separate"), [("gpt2", False), ("gpt2", True), pytest.param("llama", True, marks=pytest.mark.matrix)]
)
def test_ten_steps_equal_transformers_on_the_windows_of_megatron_core(family, separate, ranks, tmp_path):
    vocab = bridge.FAMILIES[family][1].get("vocab_size", bridge.VOCAB)
    prefix = runs.write_prefix(tmp_path / "text", 200, 3, vocab)
    windows, validation = runs.megatron_windows(prefix, LENGTH, vocab, STEPS * BATCH)
    folder = bridge.make_folder(family, tmp_path / "model")
    expected, expected_validation = their_training(folder, windows, validation, separate)
    overrides = keys_of(
        prefix,
        f"{DATA}.split=90,10,0",
        *(f"{TRAIN}.train_iters={STEPS}", f"{TRAIN}.seq_length={LENGTH}", f"{RATE}.lr_decay_style=constant"),
        *("megatron_lm.train.optimizer.weight_decay=0.5", "megatron_lm.train.optimizer.adam_beta2=0.95"),
        *("megatron_lm.model.arch.hidden_dropout=0.0", "megatron_lm.model.arch.attention_dropout=0.0"),
        f"megatron_wrap.logger.output_dir={tmp_path}/records",
        *(SEPARATE if separate else ()),
    )
    actual, actual_validation = ranks(1).run(runs.train_from, str(folder), bridge.CONFIG, overrides)[0]
    numpy.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert actual_validation == pytest.approx(expected_validation, rel=1e-5)


@pytest.mark.parametrize(
    "layouts",
    [
        ["tp2-sp", "cp2"],
        pytest.param(["dp2", "pp2", "pp2-vpp2", "tp2-pp2", "dp2-dopt"], marks=pytest.mark.matrix),
        pytest.param(["cp2-tp2", "packed", "packed-cp2"], marks=pytest.mark.matrix),
    ],
    ids="+".join,
)
def test_layouts_agree(folder, layouts, ranks):
    overrides = keys_of(blend(folder), f"megatron_lm.model.arch.vocab_size={VOCAB}", f"{DATA}.eod_mask_loss=true")
    report = check_parity(CONFIG, overrides, layouts=layouts, ranks=ranks)
    assert report.agrees, "\n" + report.table()


@pytest.mark.parametrize(
    "axis",
    [
        "context",
        pytest.param("tensor_model", marks=pytest.mark.matrix),
        pytest.param("pipeline_model", marks=pytest.mark.matrix),
        pytest.param("data", marks=pytest.mark.matrix),
    ],
)
def test_separate_documents_agree_on_each_axis(folder, ranks, tmp_path, axis):
    overrides = keys_of(f"{folder}/a", *SEPARATE, f"{TRAIN}.eval_interval=null")
    size = () if axis == "data" else (f"megatron_lm.model.parallel.{axis}_parallel_size=2",)
    one_rank = ranks(1).run(runs.train, tmp_path / "one", overrides, 3)[0]
    two = ranks(2).run(runs.train, tmp_path / "two", (*overrides, *size), 3)[0]
    assert [ids for ids, _, _ in two] == [ids for ids, _, _ in one_rank]
    assert [loss for _, loss, _ in two] == pytest.approx([loss for _, loss, _ in one_rank], rel=1e-5)
