"""Distillation: a student and a larger teacher, compared with transformers' models, torch's AdamW and trl's loss."""

from __future__ import annotations

from typing import Any

import _dpo_runs as dpo
import _pair_runs as runs
import _reference_runs as seconds
import numpy
import pytest
import torch
import torch.nn.functional as F
from _checkpoint_runs import CP2, PP2, TP2
from _covering import covering
from _trl_runs import model_of

from megatron_wrap.config import load_run_config
from megatron_wrap.testing import check_parity

STEPS = 5
TEACHER = "megatron_wrap.models.teacher"
LARGER = ("megatron_lm.model.arch.hidden_size=96", "megatron_lm.train.common.seed=7")
PACKED = ("megatron_wrap.flow.packing=true",)
LAYOUTS = {"one-rank": (1, ()), "tp2-sp": (2, TP2), "pp2": (2, PP2), "cp2": (2, CP2), "packed": (1, PACKED)}
VARIANTS: dict[str, dict[str, Any]] = {
    "forward": {"beta": 0.0},
    "reverse": {"beta": 1.0, "temperature": 2.0},
    "mixture": {"beta": 0.3, "label_weight": 0.5},
    "mixture-of-all-ids": {"beta": 0.3, "label_weight": 0.5, "top_k": dpo.VOCAB},
}
CASES = [
    *(("mixture", layout) for layout in LAYOUTS),
    *(("forward", "one-rank"), ("reverse", "tp2-sp"), ("mixture-of-all-ids", "cp2"), ("forward", "packed")),
]


def sequences(count: int = STEPS * dpo.BATCH) -> list[dict[str, list[int]]]:
    """Tokenized samples of unequal lengths; the second half of each has a loss, of the fourth nothing."""
    generator = numpy.random.default_rng(3)
    samples = []
    for index in range(count):
        ids = generator.integers(3, dpo.VOCAB, int(generator.integers(4, 38))).tolist()
        trained = 0 if index == 3 else len(ids) // 2
        samples.append({"input_ids": ids, "loss_mask": [0] * (len(ids) - trained) + [1] * trained})
    return samples


@pytest.fixture(scope="module")
def teacher(ranks, tmp_path_factory):
    """A Hugging Face folder of a larger model."""
    folder = tmp_path_factory.mktemp("teacher") / "hf"
    ranks(1).run(seconds.export, str(folder), LARGER)
    return folder


def overrides_of(variant: str, teacher: object) -> tuple[str, ...]:
    return (*runs.of_flow("gpt_distill", VARIANTS[variant]), f"{TEACHER}={teacher}")


@pytest.fixture(scope="module")
def of_torch(ranks, teacher):
    """(loss, gradient norm) of each step by trl's divergence on transformers' models, by variant."""
    from transformers import AutoModelForCausalLM
    from trl.experimental.gkd import GKDTrainer

    actual: dict[str, list[tuple[float, float]]] = {}

    def steps_of(variant: str) -> list[tuple[float, float]]:
        if variant in actual:
            return actual[variant]
        options = VARIANTS[variant]
        overrides = overrides_of(variant, f"{{hf_path: {teacher}}}")
        config = load_run_config(dpo.CONFIG, overrides)
        student = model_of(config, ranks(1).run(runs.initial_weights, overrides)[0])
        theirs = AutoModelForCausalLM.from_pretrained(teacher).eval()
        optimizer = torch.optim.AdamW(student.parameters(), lr=config.learning_rate.lr, weight_decay=0.0)
        taken = []
        for step in range(STEPS):
            loss = torch.zeros(())
            batch = sequences()[step * dpo.BATCH : (step + 1) * dpo.BATCH]
            tokens = sum(sum(sample["loss_mask"][1:]) for sample in batch)
            for sample in batch:
                ids = torch.tensor([sample["input_ids"]])
                labels = torch.where(torch.tensor([sample["loss_mask"]]) != 0, ids, -100)[:, 1:]
                student_logits = student(ids).logits[:, :-1]
                with torch.no_grad():
                    teacher_logits = theirs(ids).logits[:, :-1]
                loss = loss + GKDTrainer.generalized_jsd_loss(
                    student_logits, teacher_logits, labels, options["beta"], options.get("temperature", 1.0), "sum"
                )
                weight = options.get("label_weight", 0.0)
                if weight and bool((labels != -100).any()):
                    loss = loss + weight * F.cross_entropy(
                        student_logits.flatten(0, 1), labels.flatten(), reduction="sum"
                    )
            (loss / tokens).backward()
            norm = torch.nn.utils.clip_grad_norm_(student.parameters(), config.optimizer.clip_grad)
            optimizer.step()
            optimizer.zero_grad()
            taken.append((float(loss.detach()) / tokens, float(norm)))
        actual[variant] = taken
        return taken

    return steps_of


@pytest.mark.parametrize(("variant", "layout"), covering(CASES, set))
def test_five_steps_agree_with_trl_and_torch(ranks, teacher, of_torch, variant, layout):
    processes, of_layout = LAYOUTS[layout]
    overrides = (*overrides_of(variant, f"{{hf_path: {teacher}}}"), *of_layout)
    actual = ranks(processes).run(runs.train, overrides, sequences(), STEPS)[0]
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
    assert ranks(1).run(seconds.precompute, stored, sequences(), tmp_path / "outputs")[0] == len(sequences())
    expected = ranks(1).run(runs.train, live, sequences(), 2)[0]
    for further in ((), PACKED, TP2):
        processes = 2 if further is TP2 else 1
        actual = ranks(processes).run(runs.train, (*stored, *further), sequences(), 2)[0]
        for ours, theirs in zip(actual, expected, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


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
    report = check_parity(dpo.CONFIG, overrides, samples=sequences(16), layouts=GROUPS[group], steps=2, ranks=ranks)
    assert [row.layout for row in report.rows if row.agrees is not True] == [], report.table()


def test_what_cannot_be_is_refused(ranks, teacher):
    """A missing teacher, a teacher and a reference, and logits of another length."""
    flow = runs.of_flow("gpt_distill", {})
    rows = [[0.0, 1.0]] * 3
    tokens = {"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [1] * 6}
    samples = [{**tokens, "teacher_top_k_logits": rows, "teacher_top_k_ids": [[3, 4]] * 3}] * 4
    refusal = ranks(1).run(dpo.refusal, flow, sequences()[:4])[0]
    assert "set megatron_wrap.models.teacher" in refusal
    both = ranks(1).run(dpo.refusal, (*flow, f"{TEACHER}=copy", "megatron_wrap.models.reference=copy"), [])[0]
    assert "models.reference" in both
    assert "models.teacher" in both
    length = ranks(1).run(dpo.refusal, flow, samples)[0]
    assert "teacher_top_k_logits of sample 1" in length
    assert "[5, K]" in length
