"""Linear cross-entropy: every flow and layout has the loss and the gradients of the same run with stored logits."""

from __future__ import annotations

import random
from typing import Any

import _linear_cross_entropy_runs as runs
import _model_runs
import numpy
import pytest
import torch
from _covering import covering, family_and_axes
from layout_runs import CONFIG, token_samples
from test_model_layouts import CP2, OVERLAP, PP2, TP2_SP, Case, _layout

from megatron_wrap.testing import check_parity

TIED = "megatron_lm.model.arch.untie_embeddings_and_output_weights=false"
PACKED = ("megatron_wrap.flow.packing=true", "megatron_lm.train.common.micro_batch_size=2")
FLOW = "megatron_wrap.flow."
CASES = [
    Case("tied", "one-rank", 1, (TIED,)),
    Case("llama", "tp2-sp", 2, TP2_SP),
    Case("tied", "tp2", 2, (*_layout(tp=2, sp=False), TIED)),
    Case("tied", "pp2", 2, (*PP2, TIED)),
    Case("llama", "pp2-vpp2", 2, _layout(pp=2, layers_per_chunk=1)),
    Case("llama", "cp2", 2, CP2),
    Case("llama", "packed", 1, PACKED),
    Case("llama", "dp2-overlap", 2, OVERLAP),
    Case("tied", "pp2-overlap", 4, (*PP2, *OVERLAP, TIED)),
]


def assert_equal(results: dict[str, Any]) -> None:
    """The metrics, and the gradient of each weight, of the deferred run are those of the stored one."""
    (stored, gradients), (deferred, actual) = results["stored"], results["deferred"]
    for of_stored, of_deferred in zip(stored, deferred, strict=True):
        assert of_stored.keys() == of_deferred.keys()
        for name, value in of_stored.items():
            numpy.testing.assert_allclose(of_deferred[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert actual.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert numpy.linalg.norm(actual[name] - gradient) <= 1e-6 * numpy.linalg.norm(gradient), name


@pytest.mark.parametrize("case", covering(CASES))
def test_fine_tuning_equals_stored_logits(case: Case, ranks, tmp_path):
    results = ranks(case.processes).run(runs.both, str(_model_runs.CONFIG), case.overrides, str(tmp_path))
    assert_equal(results[0])
    numpy.testing.assert_allclose(results[0]["stored"][0][0]["loss"], results[0]["deferred"][0][0]["loss"], rtol=1e-6)
    assert all(of_rank["counts"] == (0, 0) for of_rank in results)  # no second product, and no whole logits


def ids(generator: random.Random, longest: int) -> list[int]:
    return [generator.randrange(_model_runs.VOCAB) for _ in range(generator.randint(4, longest))]


def pairs() -> list[dict[str, Any]]:
    generator = random.Random(5)
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    return [{name: ids(generator, 14) for name in names} for _ in range(4)]


def answers() -> list[dict[str, Any]]:
    generator = random.Random(6)
    return [
        {"prompt_ids": ids(generator, 12), "completion_ids": ids(generator, 14), "label": index % 2 == 0}
        for index in range(4)
    ]


def rollouts() -> list[dict[str, Any]]:
    generator = random.Random(7)
    return [
        {"prompt_ids": ids(generator, 12), "response_ids": ids(generator, 14), "advantage": index - 1.5}
        for index in range(4)
    ]


def windows() -> list[dict[str, Any]]:
    generator = random.Random(8)
    rows = [torch.tensor([generator.randrange(_model_runs.VOCAB) for _ in range(33)]) for _ in range(4)]
    return [
        {
            "tokens": row[:-1],
            "labels": row[1:],
            "loss_mask": (row[1:] % 3 > 0).float(),
            "position_ids": torch.arange(32),
        }
        for row in rows
    ]


REFERENCE, TEACHER = "megatron_wrap.models.reference=copy", "megatron_wrap.models.teacher=copy"
FLOWS: dict[str, tuple[list[Any], tuple[str, ...]]] = {
    "gpt_pretrain": (windows(), ()),
    "gpt_sft-smoothed": ([], (f"{FLOW}label_smoothing=0.1", f"{FLOW}z_loss_coefficient=0.01")),
    "gpt_dpo": (pairs(), (REFERENCE, f"{FLOW}use_weighting=true")),
    "gpt_kto": (answers(), (REFERENCE,)),
    "gpt_grpo": (rollouts(), (f"{FLOW}entropy_coefficient=0.1", f"{FLOW}beta=0.0")),
    "gpt_distill": ([], (TEACHER, f"{FLOW}beta=0.3", f"{FLOW}label_weight=0.5")),
    "gpt_distill-top-k": ([], (TEACHER, f"{FLOW}beta=0.3", f"{FLOW}top_k=7")),
}


LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "pp2-packed": (2, (*PP2, *PACKED)),
    "pp2-vpp2-tied": (2, (*_layout(pp=2, layers_per_chunk=1), TIED)),
    "cp2-packed-tied": (2, (*CP2, *PACKED, TIED)),
    "tp2-sp": (2, TP2_SP),
}
"""Each flow is compared on all of them: together they contain each parallel axis, packing and tied embeddings."""


@pytest.mark.parametrize(
    ("flow", "layout"), covering(((flow, layout) for flow in FLOWS for layout in LAYOUTS), family_and_axes)
)
def test_other_flows_equal_stored_logits(flow: str, layout: str, ranks, tmp_path):
    samples, overrides = FLOWS[flow]
    processes, of_layout = LAYOUTS[layout]
    overrides = (f"{FLOW}__select__={flow.partition('-')[0]}", *overrides, *of_layout)
    results = ranks(processes).run(runs.both, str(_model_runs.CONFIG), overrides, str(tmp_path), samples or None)
    assert_equal(results[0])
    recomputed, stored = zip(*(of_rank["counts"] for of_rank in results), strict=True)
    assert (sum(recomputed) > 0) is (flow != "gpt_pretrain")  # whose gradient is known before the forward pass
    assert sum(stored) == 0


@pytest.mark.matrix
def test_check_parity_with_linear_cross_entropy(ranks):
    layouts = ["tp2-sp-pp2", "cp2", "packed"]
    report = check_parity(
        CONFIG, [f"{runs.KEY}=true"], samples=token_samples(16, 48), layouts=layouts, steps=1, ranks=ranks
    )
    assert [row.agrees for row in report.rows] == [True] * len(layouts), report.table()
