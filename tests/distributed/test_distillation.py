"""Distillation: a student and a larger teacher, compared with transformers' models, torch's AdamW and trl's loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import _dpo_runs as runs
import numpy
import pytest
import torch
import torch.nn.functional as F
from _agreement import assert_layouts_agree
from _checkpoint_runs import TP2
from _covering import covering, quick
from _layouts import PACKED, layout
from _trl_runs import model_of, word_tokenizer

from megatron_wrap.config import load_run_config

STEPS = 5
TEACHER = "megatron_wrap.models.teacher"
LARGER = ("megatron_lm.model.arch.hidden_size=96", "megatron_lm.train.common.seed=7")
VARIANTS: dict[str, dict[str, Any]] = {
    "forward": {"beta": 0.0},
    "reverse": {"beta": 1.0, "temperature": 2.0},
    "mixture": {"beta": 0.3, "label_weight": 0.5},
    "mixture-of-all-ids": {"beta": 0.3, "label_weight": 0.5, "top_k": runs.VOCAB},
}
CASES = [
    *(("mixture", name) for name in ("one", "tp2", "pp2", "cp2", "one-packed")),
    *(("forward", "one"), ("reverse", "tp2"), ("mixture-of-all-ids", "cp2"), ("forward", "one-packed")),
]


def sequences(count: int = STEPS * runs.BATCH) -> list[dict[str, list[int]]]:
    """Tokenized samples of unequal lengths; the second half of each has a loss, of the fourth nothing."""
    generator = numpy.random.default_rng(3)
    samples = []
    for index in range(count):
        ids = generator.integers(3, runs.VOCAB, int(generator.integers(4, 38))).tolist()
        trained = 0 if index == 3 else len(ids) // 2
        samples.append({"input_ids": ids, "loss_mask": [0] * (len(ids) - trained) + [1] * trained})
    return samples


@pytest.fixture(scope="module")
def teacher(ranks, tmp_path_factory):
    """A Hugging Face folder of a larger model."""
    folder = tmp_path_factory.mktemp("teacher") / "hf"
    ranks(1).run(runs.export, str(folder), LARGER)
    return folder


def overrides_of(variant: str, teacher: object) -> tuple[str, ...]:
    return (*runs.of_flow("gpt_distill", VARIANTS[variant]), f"{TEACHER}={teacher}")


@pytest.fixture(scope="module")
def of_torch(ranks, teacher):
    """(loss, gradient norm) of each step by trl's divergence on transformers' models, by variant."""
    actual: dict[str, list[tuple[float, float]]] = {}

    def steps_of(variant: str) -> list[tuple[float, float]]:
        if variant not in actual:
            overrides = overrides_of(variant, f"{{hf_path: {teacher}}}")
            weights = ranks(1).run(runs.initial_weights, overrides)[0]
            actual[variant] = steps_of_torch(weights, overrides, teacher, VARIANTS[variant], sequences(), runs.VOCAB)
        return actual[variant]

    return steps_of


def steps_of_torch(
    weights: dict[str, Any],
    overrides: tuple[str, ...],
    teacher: Path,
    options: dict[str, Any],
    samples: list[dict[str, list[int]]],
    common: int,
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step by trl's divergence over the first `common` ids, by transformers' models."""
    from transformers import AutoModelForCausalLM
    from trl.experimental.gkd import GKDTrainer

    config = load_run_config(runs.CONFIG, overrides)
    student = model_of(config, weights)
    theirs = AutoModelForCausalLM.from_pretrained(teacher).eval()
    optimizer = torch.optim.AdamW(student.parameters(), lr=config.learning_rate.lr, weight_decay=0.0)
    taken = []
    for start in range(0, len(samples), runs.BATCH):
        loss = torch.zeros(())
        batch = samples[start : start + runs.BATCH]
        tokens = sum(sum(sample["loss_mask"][1:]) for sample in batch)
        for sample in batch:
            ids = torch.tensor([sample["input_ids"]])
            labels = torch.where(torch.tensor([sample["loss_mask"]]) != 0, ids, -100)[:, 1:]
            student_logits = student(ids).logits[:, :-1]
            with torch.no_grad():
                teacher_logits = theirs(ids).logits[:, :-1, :common]
            if "top_k" in options and options["top_k"] < common:  # the other ids have no probability
                smallest = teacher_logits.topk(options["top_k"]).values[..., -1:]
                teacher_logits = teacher_logits.masked_fill(teacher_logits < smallest, -1e4)
            loss = loss + GKDTrainer.generalized_jsd_loss(
                student_logits[..., :common],
                teacher_logits,
                labels,
                options["beta"],
                options.get("temperature", 1.0),
                "sum",
            )
            weight = options.get("label_weight", 0.0)
            if weight and bool((labels != -100).any()):
                loss = loss + weight * F.cross_entropy(student_logits.flatten(0, 1), labels.flatten(), reduction="sum")
        (loss / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), config.optimizer.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        taken.append((float(loss.detach()) / tokens, float(norm)))
    return taken


@pytest.mark.parametrize(("variant", "name"), covering(CASES, set))
def test_five_steps_agree_with_trl_and_torch(ranks, teacher, of_torch, variant, name):
    processes, of_layout = layout(name)
    overrides = (*overrides_of(variant, f"{{hf_path: {teacher}}}"), *of_layout)
    actual = ranks(processes).run(runs.steps, overrides, sequences(), STEPS)[0]
    for step, (ours, (loss, norm)) in enumerate(zip(actual, of_torch(variant), strict=True)):
        assert ours["loss"] == pytest.approx(loss, rel=1e-4), step
        assert ours["grad_norm"] == pytest.approx(norm, rel=1e-4), step
    assert actual[-1]["divergence"] > 1e-3


def test_stored_logits_replace_the_teacher(ranks, teacher, tmp_path):
    """Of the largest 8, whole and in packed rows."""
    options = {"beta": 0.5, "top_k": 8}
    flow = runs.of_flow("gpt_distill", options)
    live = (*flow, f"{TEACHER}={{hf_path: {teacher}, offload: true}}")
    stored = (*flow, f"{TEACHER}={{hf_path: {teacher}, precomputed: {tmp_path}/outputs}}")
    assert ranks(1).run(runs.precompute, stored, sequences(), tmp_path / "outputs")[0] == len(sequences())
    expected = ranks(1).run(runs.steps, live, sequences(), 2)[0]
    for further in ((), PACKED, TP2):
        processes = 2 if further is TP2 else 1
        actual = ranks(processes).run(runs.steps, (*stored, *further), sequences(), 2)[0]
        for ours, theirs in zip(actual, expected, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


TOKENS, MORE_ROWS, FEWER_ROWS = 230, 520, 240
"""Entries of the tokenizer that student and teacher share, and rows of teachers; the student has 500. Of two processes
the second has no row that a teacher of 240 rows has."""
ROWS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "more-forward": (MORE_ROWS, {"beta": 0.0}, ()),
    "more-reverse-deferred": (
        MORE_ROWS,
        {"beta": 1.0, "temperature": 2.0},
        ("megatron_wrap.model_provider.linear_cross_entropy=true",),
    ),
    "more-mixture-8-ids": (MORE_ROWS, {"beta": 0.3, "top_k": 8}, ()),
    "fewer-mixture": (FEWER_ROWS, {"beta": 0.3, "label_weight": 0.5}, ()),
    "fewer-forward-8-ids-deferred": (
        FEWER_ROWS,
        {"beta": 0.0, "top_k": 8},
        ("megatron_wrap.model_provider.linear_cross_entropy=true",),
    ),
    "fewer-reverse": (FEWER_ROWS, {"beta": 1.0}, ()),
}


@pytest.fixture(scope="module")
def teachers(ranks, tmp_path_factory):
    """Number of rows -> a teacher's Hugging Face folder with the tokenizer, and its checkpoint."""
    folders = {}
    words = {"</s>": 0, **{f"w{number}": number for number in range(1, TOKENS)}}
    tokenizer = word_tokenizer(words, eos_token="</s>")
    for rows in (MORE_ROWS, FEWER_ROWS):
        folders[rows] = tmp_path_factory.mktemp("teacher")
        tokenizer.save_pretrained(folders[rows] / "tokenizer")
        overrides = (
            *LARGER,
            f"megatron_lm.model.arch.vocab_size={rows}",
            f"megatron_wrap.data.tokenizer={folders[rows]}/tokenizer",
            f"{runs.TRAIN}.save={folders[rows]}/checkpoint",
        )
        ranks(1).run(runs.export, str(folders[rows] / "hf"), overrides, with_checkpoint=True)
    return folders


def short_sequences(count: int = 2 * runs.BATCH) -> list[dict[str, list[int]]]:
    """Samples of the tokenizer's ids."""
    return [{**sample, "input_ids": [token % TOKENS for token in sample["input_ids"]]} for sample in sequences(count)]


@pytest.mark.parametrize("case", quick(ROWS, ("more-forward", "more-mixture-8-ids", "fewer-mixture")))
def test_models_of_different_numbers_of_rows_are_compared_over_the_common_rows(ranks, teachers, case):
    """As by trl's divergence on slices of the logits; on one process and two, from a folder and a checkpoint, and from
    stored logits."""
    rows, options, further = ROWS[case]
    flow = (*runs.of_flow("gpt_distill", options), f"megatron_wrap.data.tokenizer={teachers[rows]}/hf", *further)
    flow = (*flow, "megatron_lm.model.arch.make_vocab_size_divisible_by=2")
    folder, checkpoint = f"{{hf_path: {teachers[rows]}/hf}}", f"{{checkpoint: {teachers[rows]}/checkpoint}}"
    live = (*flow, f"{TEACHER}={folder}")
    weights = ranks(1).run(runs.initial_weights, live)[0]
    expected = steps_of_torch(weights, live, teachers[rows] / "hf", options, short_sequences(), min(rows, runs.VOCAB))
    layouts = [(1, live), (2, (*live, *TP2))]
    layouts += [(2, (*flow, *TP2, f"{TEACHER}={checkpoint}"))] if "mixture" in case else []
    if "top_k" in options:
        stored = f"{{hf_path: {teachers[rows]}/hf, precomputed: {teachers[rows]}/{case}}}"
        stored_flow = (*flow, f"{TEACHER}={stored}", *TP2)
        assert ranks(2).run(runs.precompute, stored_flow, short_sequences(), teachers[rows] / case)[0] == 8
        layouts += [(1, (*flow, f"{TEACHER}={stored}"))]
    for processes, overrides in layouts:
        actual = ranks(processes).run(runs.steps, overrides, short_sequences(), 2)[0]
        for ours, (loss, norm) in zip(actual, expected, strict=True):
            assert ours["loss"] == pytest.approx(loss, rel=1e-4)
            assert ours["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_an_id_that_the_teacher_does_not_have_is_refused(ranks, teachers):
    flow = (*runs.of_flow("gpt_distill", {}), f"megatron_wrap.data.tokenizer={teachers[FEWER_ROWS]}/hf")
    teacher = f"{TEACHER}={{hf_path: {teachers[FEWER_ROWS]}/hf}}"
    samples = [*short_sequences(3), {"input_ids": [1, 2, FEWER_ROWS], "loss_mask": [0, 1, 1]}]
    message = ranks(1).run(runs.refusal, (*flow, teacher), samples)[0]
    assert f"sample 3 of a batch of 4: the sample has the token id {FEWER_ROWS}" in message
    assert f"the ids 0 to {FEWER_ROWS - 1}" in message


def test_logits_of_a_reference_model_with_another_number_of_rows_are_refused(ranks, teachers):
    """A teacher's have the columns of the student's; a reference keeps its own vocabulary."""
    for rows in (MORE_ROWS, FEWER_ROWS):
        flow = (*runs.of_flow("gpt_distill", {}), f"megatron_wrap.data.tokenizer={teachers[rows]}/hf")
        reference = f"megatron_wrap.models.reference={{hf_path: {teachers[rows]}/hf}}"
        message = ranks(1).run(runs.refusal, (*flow, reference), short_sequences(4))[0]
        assert "'logits'" in message
        assert "megatron_wrap.models.teacher" in message


GROUPS = {
    "with-pipeline": ["mbs1", "tp2-sp", "pp2-vpp2", "token-budget-dp2"],
    "four": ["packed-cp2", "tp2-sp-dp2", "cp2-dp2", "pp2-dp2"],
}
GROUPS["others"] = [
    *("padded", "dp2-dopt", "cp2", "packed", "tp2-sp-pp2", "pp2-cp2", "packed-tp2-sp-cp2", "packed-pp2-vpp2", "pp4")
]


@pytest.mark.matrix
@pytest.mark.parametrize("group", GROUPS)
def test_layouts_agree(ranks, teacher, group):
    sizes = ("megatron_lm.train.common.micro_batch_size=2", "megatron_lm.train.common.global_batch_size=8")
    overrides = [*overrides_of("mixture", f"{{hf_path: {teacher}}}"), *sizes]
    assert_layouts_agree(ranks, GROUPS[group], overrides, sequences(16), steps=2)


def test_what_cannot_be_is_refused(ranks, teacher):
    """A missing teacher, a teacher and a reference, and logits of another length."""
    flow = runs.of_flow("gpt_distill", {})
    rows = [[0.0, 1.0]] * 3
    tokens = {"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [1] * 6}
    samples = [{**tokens, "teacher_top_k_logits": rows, "teacher_top_k_ids": [[3, 4]] * 3}] * 4
    refusal = ranks(1).run(runs.refusal, flow, sequences()[:4])[0]
    assert "set megatron_wrap.models.teacher" in refusal
    both = ranks(1).run(runs.refusal, (*flow, f"{TEACHER}=copy", "megatron_wrap.models.reference=copy"), [])[0]
    assert "models.reference" in both
    assert "models.teacher" in both
    length = ranks(1).run(runs.refusal, flow, samples)[0]
    assert "sample 0 of a batch of 4: teacher_top_k_logits has shape" in length
    assert "[5, K]" in length
