"""The losses on pairs as formulas in float64, the options that are refused, and KTO's samples. No process group."""

import math
from typing import Any

import pytest
import torch

from megatron_wrap.data.chat.encode import ChatTokens
from megatron_wrap.errors import DataError
from megatron_wrap.flow import FlowContext, MegatronWrapGPTModelDPOFlow, MegatronWrapGPTModelKTOFlow
from megatron_wrap.flow.shared import pairs as pairs_module
from megatron_wrap.flow.shared.preference_losses import (
    LOSS_TYPES,
    PAIR_LOSSES,
    PairTerms,
    divergence_scores,
    gradient_only,
    partners,
)

BETA, RATE, TAU = 0.3, 0.1, 0.05
CHOSEN, REJECTED, LENGTHS = (1.2, -0.4, 3.0), (0.3, 0.9, -2.0), ((4.0, 2.0, 5.0), (3.0, 7.0, 1.0))


def sig(value: float) -> float:
    return 1 / (1 + math.exp(-value))


FORMULAS: dict[str, Any] = {
    "sigmoid": lambda c, r, m, n: -(1 - RATE) * math.log(sig(m)) - RATE * math.log(sig(-m)),
    "sigmoid_norm": lambda c, r, m, n: -math.log(sig(BETA * n)),
    "hinge": lambda c, r, m, n: max(0.0, 1 - m),
    "ipo": lambda c, r, m, n: (n - 1 / (2 * BETA)) ** 2,
    "robust": lambda c, r, m, n: (-(1 - RATE) * math.log(sig(m)) + RATE * math.log(sig(-m))) / (1 - 2 * RATE),
    "exo_pair": lambda c, r, m, n: (
        sig(m) * math.log(sig(m) / (1 - RATE)) + (1 - sig(m)) * math.log((1 - sig(m)) / RATE)
    ),
    "nca_pair": lambda c, r, m, n: -math.log(sig(c)) - 0.5 * math.log(sig(-c)) - 0.5 * math.log(sig(-r)),
    "bco_pair": lambda c, r, m, n: -math.log(sig(c)) - math.log(sig(-r)),
    "sppo_hard": lambda c, r, m, n: (c / BETA - 0.5 / BETA) ** 2 + (r / BETA + 0.5 / BETA) ** 2,
    "apo_zero": lambda c, r, m, n: 1 - sig(c) + sig(r),
    "apo_down": lambda c, r, m, n: sig(c) + 1 - sig(m),
    "discopop": lambda c, r, m, n: (1 - sig(m / TAU)) * -math.log(sig(m)) + sig(m / TAU) * math.exp(-m),
}


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_each_loss_is_its_formula(name):
    chosen, rejected = (torch.tensor(values, dtype=torch.float64) for values in (CHOSEN, REJECTED))
    lengths = [torch.tensor(values, dtype=torch.float64) for values in LENGTHS]
    terms = PairTerms(chosen, rejected, chosen, rejected, *lengths, beta=BETA, label_smoothing=RATE, discopop_tau=TAU)
    expected = [
        FORMULAS[name](BETA * c, BETA * r, BETA * (c - r), c / long - r / short)
        for c, r, long, short in zip(CHOSEN, REJECTED, *LENGTHS, strict=True)
    ]
    assert PAIR_LOSSES[name](terms).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "derivative"),
    [
        ("reverse_kl", lambda t: math.log(t)),
        ("forward_kl", lambda t: 1 - 1 / t),
        ("js_divergence", lambda t: math.log(2 * t / (t + 1))),
        ("alpha_divergence", lambda t: (t ** (0.5 - 1) - 1) / (0.5 - 1)),
    ],
)
def test_scores_are_the_derivative_of_the_divergence(name, derivative):
    ratios = torch.tensor(CHOSEN, dtype=torch.float64)
    expected = [derivative(math.exp(ratio)) for ratio in CHOSEN]
    assert divergence_scores(ratios, name, 0.5).tolist() == pytest.approx(expected, rel=1e-12)
    assert torch.isfinite(divergence_scores(torch.tensor([500.0]), name, 3.0)).all() or name == "forward_kl"


def test_partners_have_the_same_rank_and_leave_out_weight_0():
    values, others = torch.tensor([3.0, 1.0, torch.nan, 2.0]), torch.tensor([10.0, 30.0, torch.nan, 20.0])
    weights = torch.tensor([1.0, 1.0, 0.0, 2.0])
    assert others[partners(values, others, weights)][[0, 1, 3]].tolist() == [30.0, 10.0, 20.0]
    value = torch.tensor([2.0], requires_grad=True)
    gradient_only(value**2).sum().backward()
    assert value.grad is not None
    assert value.grad.tolist() == [4.0]


def flow(kind: Any = MegatronWrapGPTModelDPOFlow, **options: Any) -> Any:
    context = FlowContext(2, 8, 20, 1, lambda part: part, lambda value: value, None)
    return kind(kind.Config(flow_key="test", **options), context)


def pair(chosen: int, rejected: int) -> dict[str, Any]:
    reference_outputs = {"reference_chosen_log_probs": -1.0, "reference_rejected_log_probs": -2.0}
    return {"prompt_ids": [1, 2], "chosen_ids": [3] * chosen, "rejected_ids": [4] * rejected, **reference_outputs}


def test_rpo_alpha_adds_a_mean_over_the_chosen_tokens(monkeypatch):
    monkeypatch.setattr(pairs_module, "log_probs_and_entropy", lambda logits, ids: (logits, -logits))
    log_probs = -torch.rand(4, 5, generator=torch.Generator().manual_seed(0))
    added = flow(rpo_alpha=0.5)
    _, loss_inputs = added.collate_data_micro_batch(iter([pair(2, 3), pair(4, 1)]))
    assert added.get_loss_weight(loss_inputs) == {"pairs": 2.0, "sft": 6.0}
    assert added.get_loss_coefficients() == {"sft": 0.5}
    sums = added.calculate_loss(loss_inputs, log_probs).loss_sum
    assert float(sums["sft"]) == pytest.approx(-float(log_probs[0, 1:3].sum() + log_probs[1, 1:5].sum()))
    assert float(sums["pairs"]) == float(flow().calculate_loss(loss_inputs, log_probs).loss_sum)


def test_ld_alpha_scales_the_longer_answers_later_tokens(monkeypatch):
    monkeypatch.setattr(pairs_module, "token_log_probs", lambda logits, ids: logits)
    made = flow(ld_alpha=0.25)
    _, loss_inputs = made.collate_data_micro_batch(iter([pair(2, 4)]))
    outputs = made.calculate_outputs(loss_inputs, torch.full((2, 5), -1.0))
    assert (float(outputs["chosen_log_probs"]), float(outputs["rejected_log_probs"])) == (-2.0, -2.5)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"loss_type": "sigmiod"}, "sigmoid"),
        ({"loss_type": ["hinge", "unheard_of_thing"]}, "sppo_hard"),
        ({"loss_type": ["hinge", "hinge"]}, "hinge"),
        ({"loss_type": []}, "loss_type"),
        ({"loss_type": ["hinge", "ipo"], "loss_weights": [1.0]}, "loss_weights"),
        ({"loss_type": "apo_zero", "f_divergence_type": "forward_kl"}, "apo_zero"),
        ({"loss_type": "aot", "use_weighting": True}, "use_weighting"),
        ({"loss_type": "exo_pair"}, "label_smoothing"),
        ({"loss_on": "all"}, "loss_on is all"),
    ],
)
def test_losses_that_do_not_exist_or_fit_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        flow(**options)


def test_only_sorted_losses_need_a_pass_before_the_step():
    assert [name for name in LOSS_TYPES if flow(loss_type=name, label_smoothing=0.1).step_values_from] == [
        "aot",
        "aot_unpaired",
    ]


def answer(prompt: list[int], completion: list[int], **further: Any) -> dict[str, Any]:
    return {"prompt_ids": prompt, "completion_ids": completion, "label": True, **further}


def test_kto_estimates_kl_on_each_prompt_with_the_answer_before():
    made = flow(MegatronWrapGPTModelKTOFlow, truncation="refuse")
    answers = [answer([1, 2], [5]), answer([3], [6]), answer([4], [7] * 8, weight=2.0)]
    prepared = [made.prepare_sample(sample) for sample in answers]
    prepared[1]["encoded"] = ChatTokens([3], [0])  # as after a truncation
    actual = [sample["encoded"] for sample in made.get_step_samples(prepared)]
    assert actual == [
        ChatTokens([1, 2] + [7] * 7, [0, 0] + [1] * 7),
        ChatTokens([3, 5], [0, 1]),
        ChatTokens([4], [0], 2.0),
    ]
    kl = made.reduce_step_values({"ratios": torch.tensor([1.0, 4.0, 0.25]), "weights": torch.tensor([1.0, 1.0, 2.0])})
    assert float(kl["kl"]) == 5.5 / 4
    assert float(made.reduce_step_values({"ratios": -torch.ones(2), "weights": torch.ones(2)})["kl"]) == 0


def test_kto_keeps_the_answer_that_is_stored_with_precomputed_outputs():
    made = flow(MegatronWrapGPTModelKTOFlow)
    prepared = [made.prepare_sample(sample) for sample in (answer([1, 2], [5]), answer([3], [6, 7]), answer([4], [8]))]
    stored = made.get_samples_to_precompute(prepared)
    assert [sample["encoded"] for sample, _ in stored] == [
        sample["encoded"] for sample in made.get_step_samples(prepared)
    ]
    with_outputs = [
        {
            **sample,
            "reference_step_answer_log_probs": -1.0 - index,
            **{f"reference_step_{key}": kept[key] for key in kept},
        }
        for index, (sample, (_, kept)) in enumerate(zip(prepared, stored, strict=True))
    ]
    actual = made.get_step_samples([with_outputs[index] for index in (2, 0, 1)])
    assert [sample["encoded"].input_ids for sample in actual] == [[4, 6, 7], [1, 2, 8], [3, 5]]
    assert [sample["reference_answer_log_probs"] for sample in actual] == [-3.0, -1.0, -2.0]
    with pytest.raises(DataError, match="only some samples contain reference_step_answer_ids"):
        made.get_step_samples([with_outputs[0], prepared[1]])
    assert flow(MegatronWrapGPTModelKTOFlow, loss_type="apo_zero_unpaired").get_samples_to_precompute(prepared) is None


def test_an_empty_answer_is_refused():
    for kind, sample in ((MegatronWrapGPTModelDPOFlow, pair(2, 0)), (MegatronWrapGPTModelKTOFlow, answer([1], []))):
        with pytest.raises(DataError, match="has no tokens"):
            flow(kind).prepare_sample(sample)


def test_kto_needs_a_label_and_a_reference():
    made = flow(MegatronWrapGPTModelKTOFlow)
    with pytest.raises(DataError, match='"label" is 1'):
        made.prepare_sample(answer([1], [2], label=1))
    with pytest.raises(DataError, match="only some"):
        made.collate_data_micro_batch(iter([answer([1], [2]), answer([1], [2], reference_answer_log_probs=-1.0)]))
    _, loss_inputs = made.collate_data_micro_batch(iter([answer([1], [2])]))
    with pytest.raises(DataError, match="reference: copy"):
        made._log_ratios(loss_inputs, torch.zeros(1))
