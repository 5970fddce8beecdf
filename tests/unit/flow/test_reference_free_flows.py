"""CPO, SimPO, AlphaPO and ORPO against their formulas in float64; refused options. No process group."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_wrap.errors import DataError
from megatron_wrap.flow import FlowContext
from megatron_wrap.flow.cpo import MegatronWrapGPTModelCPOFlow
from megatron_wrap.flow.orpo import MegatronWrapGPTModelORPOFlow, log_odds
from megatron_wrap.flow.reward import MegatronWrapGPTModelRewardFlow
from megatron_wrap.flow.shared import pairs as pairs_module


def flow(made: Any, micro_batch_size: int = 8, seq_length: int = 8, **options: Any) -> Any:
    context = FlowContext(micro_batch_size, seq_length, 20, 1, lambda part: part, lambda value: value, None)
    return made(made.Config(flow_key="flow", **options), context)


def pair(chosen: int, rejected: int, prompt: int = 2, **further: Any) -> dict[str, Any]:
    lengths = {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
    return {**{key: [1] * length for key, length in lengths.items()}, **further}


PAIRS = [pair(3, 4), pair(5, 1, weight=2.0), pair(1, 6)]
LOG_PROBS = -torch.rand(6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3


def result(made: Any, samples: list[Any], log_probs: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[float, Any]:
    """The objective, and the metrics' means."""
    monkeypatch.setattr(
        pairs_module,
        "log_probs_and_entropy",
        lambda logits, ids: (logits[:, : ids.shape[1]], -logits[:, : ids.shape[1]]),
    )
    _, loss_inputs = made.collate_data_micro_batch(iter([made.prepare_sample(sample) for sample in samples]))
    output = made.calculate_loss(loss_inputs, log_probs)
    weights, coefficients = made.get_loss_weight(loss_inputs), made.get_loss_coefficients()
    terms = {name: float(value.detach()) for name, value in output.loss_sum.items()}
    objective = sum(coefficients[name] * terms[name] / weights[name] for name in terms if weights[name])
    means = {name: float(value[0] / value[1]) for name, value in output.metrics.items() if isinstance(value, tuple)}
    return objective, means


def sums(sample: dict[str, Any], row: int, answer: str) -> tuple[float, int]:
    """The log-probability of an answer, and its number of tokens. Label 0 is the second token of the prompt."""
    first = len(sample["prompt_ids"]) - 1
    count = len(sample[f"{answer}_ids"])
    return sum(LOG_PROBS[row, first : first + count].tolist()), count


def log_sigmoid(value: float) -> float:
    return -math.log1p(math.exp(-value))


def of_pair(options: dict[str, Any], chosen: float, rejected: float) -> float:
    """The documented loss of a pair of log-probabilities."""
    alpha, beta, kind = options.get("alpha", 0.0), options["beta"], options["loss_type"]
    if alpha:
        chosen, rejected = ((1 - math.exp(value) ** -alpha) / alpha for value in (chosen, rejected))
    difference = chosen - rejected
    if kind == "hinge":
        return max(0.0, 1 - beta * difference)
    if kind == "ipo":
        return (difference - 1 / (2 * beta)) ** 2
    scaled = beta * difference - (options["simpo_gamma"] if kind == "simpo" else 0.0)
    smoothing = options.get("label_smoothing", 0.0)
    return -(1 - smoothing) * log_sigmoid(scaled) - smoothing * log_sigmoid(-scaled)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "sigmoid", "beta": 0.3, "label_smoothing": 0.1},
        {"loss_type": "sigmoid", "beta": 0.3, "alpha": -0.2, "cpo_alpha": 0.0},
        {"loss_type": "hinge", "beta": 0.5, "cpo_alpha": 0.4},
        {"loss_type": "ipo", "beta": 0.5},
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "label_smoothing": 0.2},
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "alpha": 0.3},
    ],
)
def test_cpo_is_its_formula(monkeypatch, options):
    objective, metrics = result(flow(MegatronWrapGPTModelCPOFlow, **options), PAIRS, LOG_PROBS, monkeypatch)
    average = options["loss_type"] in ("ipo", "simpo")
    total = total_weight = nll = tokens = 0.0
    for row, sample in enumerate(PAIRS):
        (chosen, length), (rejected, other) = sums(sample, row, "chosen"), sums(sample, row + 3, "rejected")
        weight = sample.get("weight", 1.0)
        total_weight, nll, tokens = total_weight + weight, nll - chosen * weight, tokens + length * weight
        if average:
            chosen, rejected = chosen / length, rejected / other
        total += weight * of_pair(options, chosen, rejected)
    assert objective == pytest.approx(total / total_weight + options.get("cpo_alpha", 1.0) * nll / tokens, rel=1e-6)
    assert metrics["nll_loss"] == pytest.approx(nll / tokens, rel=1e-6)
    assert metrics["rewards/margins"] == pytest.approx(metrics["rewards/chosen"] - metrics["rewards/rejected"])


def test_orpo_is_its_formula(monkeypatch):
    """The likelihood term also counts the prompt, without its first token."""
    objective, metrics = result(flow(MegatronWrapGPTModelORPOFlow, beta=0.4), PAIRS, LOG_PROBS, monkeypatch)
    total = total_weight = nll = tokens = 0.0
    for row, sample in enumerate(PAIRS):
        (chosen, length), (rejected, other) = sums(sample, row, "chosen"), sums(sample, row + 3, "rejected")
        weight = sample.get("weight", 1.0)
        p, q = math.exp(chosen / length), math.exp(rejected / other)
        total -= weight * log_sigmoid(math.log(p / (1 - p)) - math.log(q / (1 - q)))
        labels = len(sample["prompt_ids"]) - 1 + length
        nll, tokens = nll - weight * float(LOG_PROBS[row, :labels].sum()), tokens + weight * labels
        total_weight += weight
    assert metrics["log_odds_ratio"] == pytest.approx(-total / total_weight, rel=1e-6)
    assert objective == pytest.approx(0.4 * total / total_weight + nll / tokens, rel=1e-6)


@pytest.mark.parametrize("made", [MegatronWrapGPTModelCPOFlow, MegatronWrapGPTModelORPOFlow])
def test_a_pair_without_an_answer_has_a_likelihood_and_no_preference(monkeypatch, made):
    """Truncation may leave no token of an answer; the gradient stays finite."""
    options = {"loss_type": "simpo"} if made is MegatronWrapGPTModelCPOFlow else {}
    emptied = [pair(2, 2, prompt=9), *PAIRS]
    rows = [0, 0, 1, 2, 0, 3, 4, 5]
    log_probs = LOG_PROBS[rows].clone().requires_grad_()
    objective, metrics = result(flow(made, **options), emptied, log_probs, monkeypatch)
    expected, without = result(flow(made, **options), PAIRS, LOG_PROBS, monkeypatch)
    for name in ("rewards/margins", "rewards/chosen", "logps/rejected"):
        assert metrics[name] == pytest.approx(without[name])
    if made is MegatronWrapGPTModelCPOFlow:  # ORPO's likelihood term has the prompt's tokens
        assert objective == pytest.approx(expected)
    made_flow = flow(made, **options)
    _, loss_inputs = made_flow.collate_data_micro_batch(iter(emptied))
    sum(made_flow.calculate_loss(loss_inputs, log_probs).loss_sum.values()).backward()
    assert log_probs.grad.isfinite().all()


@pytest.mark.parametrize("answer", ["chosen", "rejected"])
@pytest.mark.parametrize(
    "made", [MegatronWrapGPTModelCPOFlow, MegatronWrapGPTModelORPOFlow, MegatronWrapGPTModelRewardFlow]
)
def test_an_empty_or_a_missing_answer_is_refused(made, answer):
    sample = pair(3, 4)
    with pytest.raises(DataError, match=f'"{answer}" of a pair has no tokens'):
        flow(made).prepare_sample({**sample, f"{answer}_ids": []})
    del sample[f"{answer}_ids"]
    with pytest.raises(DataError, match="rejected_ids"):
        flow(made).prepare_sample(sample)


def test_the_last_token_of_a_sequence_is_scored():
    """All tokens are inputs; truncation moves the scored token."""
    made = flow(MegatronWrapGPTModelRewardFlow, seq_length=6)
    pairs = [pair(3, 1, margin=0.5), pair(9, 2)]
    model_inputs, loss_inputs = made.collate_data_micro_batch(iter([made.prepare_sample(sample) for sample in pairs]))
    assert model_inputs["attention_mask"].sum(dim=1).tolist() == [5, 6, 3, 4]
    assert loss_inputs["last_token"].argmax(dim=1).tolist() == [4, 5, 2, 3]
    assert loss_inputs["last_token"].sum(dim=1).tolist() == [1, 1, 1, 1]
    assert loss_inputs["truncated"].tolist() == [0, 1]
    assert loss_inputs["margin"].tolist() == [0.5, 0]
    assert made.get_sample_lengths(pairs[1]) == [6, 4]
    values = torch.arange(24.0).view(4, 6, 1)
    scores = made.calculate_outputs(loss_inputs, values)
    assert scores["chosen_score"].tolist() == [4, 11]
    assert scores["rejected_score"].tolist() == [14, 21]


@pytest.mark.parametrize("margin", [math.inf, math.nan, "1", True])
def test_a_wrong_margin_is_refused(margin):
    with pytest.raises(DataError, match='"margin" is'):
        flow(MegatronWrapGPTModelRewardFlow).prepare_sample(pair(3, 4, margin=margin))


def test_pairs_and_single_sequences_are_not_mixed():
    made = flow(MegatronWrapGPTModelRewardFlow)
    with pytest.raises(DataError, match="single sequences"):
        made.collate_data_micro_batch(iter([pair(3, 4), {"input_ids": [1, 2]}]))
    with pytest.raises(DataError, match="refuse"):
        flow(MegatronWrapGPTModelRewardFlow, seq_length=4, truncation="refuse").prepare_sample(pair(3, 1))


def test_log_odds_are_exact_near_0_and_near_1():
    log_prob = torch.tensor([-1e-5, -0.1, -0.6931, -0.7, -5.0, -200.0], dtype=torch.float64)
    exact = log_prob - torch.log1p(-log_prob.exp())
    assert torch.allclose(log_odds(log_prob.float()).double(), exact, rtol=2e-5, atol=1e-6)
    certain = torch.zeros(1, requires_grad=True)
    log_odds(certain).sum().backward()
    assert log_odds(certain).isfinite().all()
    assert certain.grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"label_smoothing": 0.1, "loss_type": "ipo"}, "loss_type ipo"),
        ({"loss_on": "all"}, "loss_on"),
    ],
)
def test_a_wrong_option_is_refused(options, named):
    with pytest.raises(ValueError, match=named):
        MegatronWrapGPTModelCPOFlow.Config(flow_key="gpt_cpo", **options)
