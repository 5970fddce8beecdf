"""Sampling compared with the logits warpers of transformers and with torch.multinomial."""

import numpy
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from megatron_wrap.errors import DataError
from megatron_wrap.generation.sampling import SamplingRule, UniformNumbers

pytestmark = pytest.mark.transformers

LOGITS = torch.randn(4, 50, generator=torch.Generator().manual_seed(3)) * 3
LOGITS[1, 7] = LOGITS[1, 8] = LOGITS[1].max()  # a tie, which top_k keeps whole


def by_transformers(rule: SamplingRule) -> torch.Tensor:
    """Order of transformers' generate: temperature, top_k, top_p (generation/utils.py, _get_logits_processor)."""
    scores = TemperatureLogitsWarper(float(rule.temperature))(None, LOGITS.double())
    if rule.top_k is not None:
        scores = TopKLogitsWarper(rule.top_k)(None, scores)
    if rule.top_p is not None:
        scores = TopPLogitsWarper(rule.top_p)(None, scores)
    return scores.softmax(dim=-1)


RULES = [
    SamplingRule(1.0),
    SamplingRule(0.7, top_k=5),
    SamplingRule(1.5, top_p=0.8),
    SamplingRule(1.3, top_k=9, top_p=0.6),
    SamplingRule(1.0, top_k=500, top_p=1.0),
    SamplingRule(0.9, top_k=1),
    SamplingRule(2.0, top_p=1e-9),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_probabilities_are_those_of_transformers_warpers(rule):
    torch.testing.assert_close(rule.probabilities(LOGITS), by_transformers(rule), rtol=1e-12, atol=0)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_evenly_spaced_numbers_choose_each_token_with_its_probability(rule):
    count = 20_000
    expected = by_transformers(rule)[2]
    chosen = rule.choose(LOGITS[2].expand(count, -1), [(index + 0.5) / count for index in range(count)])
    actual = torch.bincount(chosen, minlength=LOGITS.shape[1]) / count
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2 / count)


def test_draws_have_the_distribution_of_torch_multinomial():
    rule, count = SamplingRule(1.3, top_k=9), 20_000
    chosen = rule.choose(LOGITS[2].expand(count, -1), [UniformNumbers(11, index).draw() for index in range(count)])
    torchs = torch.multinomial(by_transformers(rule)[2], count, replacement=True)
    ours, theirs = (numpy.bincount(ids.numpy(), minlength=LOGITS.shape[1]) for ids in (chosen, torchs))
    # the difference of two binomial counts of the same probability, within five standard deviations
    probabilities = by_transformers(rule)[2].numpy()
    deviation = numpy.sqrt(2 * count * probabilities * (1 - probabilities))
    assert (abs(ours - theirs) <= 5 * deviation).all()


def test_the_ends_of_the_unit_interval_choose_tokens_of_positive_probability():
    rule = SamplingRule(1.0, top_k=3)
    allowed = by_transformers(rule) > 0
    for number in (0.0, 1.0 - 2.0**-53):
        chosen = rule.choose(LOGITS, [number] * 4)
        assert allowed[torch.arange(4), chosen].all()


def test_greedy_takes_the_most_probable_token_and_ignores_top_k_and_top_p():
    rule = SamplingRule(0.0, top_k=3, top_p=0.2)
    assert torch.equal(rule.choose(LOGITS, []), LOGITS.argmax(dim=-1))


def test_random_numbers_depend_only_on_the_seed_and_the_prompt_s_index():
    first, again = UniformNumbers(1, 2), UniformNumbers(1, 2)
    numbers = [first.draw() for _ in range(4)]
    assert numbers == [again.draw() for _ in range(4)]
    assert numbers[0] not in (UniformNumbers(1, 3).draw(), UniformNumbers(2, 2).draw(), UniformNumbers(2, 1).draw())


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"temperature": float("inf")}, "temperature inf"),
        ({"top_k": 0}, "top_k 0"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.5}, "top_p 1.5"),
    ],
)
def test_values_out_of_range_are_refused_with_their_name(values, name):
    with pytest.raises(DataError, match=name):
        SamplingRule(**values)
