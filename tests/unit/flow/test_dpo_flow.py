"""Preference optimization: weights of pairs, and options that are refused. No process group."""

from typing import Any

import pytest
import torch

from megatron_wrap.data.chat.encode import ChatTokens
from megatron_wrap.errors import DataError
from megatron_wrap.flow import FlowContext, MegatronWrapGPTModelDPOFlow
from megatron_wrap.flow.shared import pairs as pairs_module

Config = MegatronWrapGPTModelDPOFlow.Config


def flow(micro_batch_size: int = 2, seq_length: int = 8, **options: Any) -> MegatronWrapGPTModelDPOFlow:
    context = FlowContext(micro_batch_size, seq_length, 20, 1, lambda part: part, lambda value: value, None)
    return MegatronWrapGPTModelDPOFlow(Config(flow_key="gpt_dpo", **options), context)


def pair(chosen: int, rejected: int, **further: Any) -> dict[str, Any]:
    reference_outputs = {"reference_chosen_log_probs": -1.0, "reference_rejected_log_probs": -2.0}
    ids = {"prompt_ids": [1, 2], "chosen_ids": list(range(chosen)), "rejected_ids": list(range(rejected))}
    return {**ids, **reference_outputs, **further}


def test_a_weight_of_2_is_the_pair_twice(monkeypatch):
    """Of loss, loss weight and metrics; weight 0 removes a pair, even one whose loss is not finite."""
    monkeypatch.setattr(pairs_module, "log_probs_and_entropy", lambda logits, ids: (logits, -logits))
    made = flow(4)
    pairs = [pair(3, 4), pair(5, 2), pair(2, 2)]
    log_probs = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))

    def result(samples: list[Any], rows: list[int]) -> dict[str, float]:
        prepared = [made.prepare_sample(sample) for sample in samples]
        _, loss_inputs = made.collate_data_micro_batch(iter(prepared))
        logits = log_probs[:, rows].flatten(0, 1)[:, : loss_inputs["labels"].shape[1]]
        output = made.calculate_loss(loss_inputs, logits)
        metrics = {name: value for name, value in output.metrics.items() if isinstance(value, tuple)}
        means = {name: float(total) / float(weight) for name, (total, weight) in metrics.items()}
        return {"loss": float(output.loss_sum), "weight": made.get_loss_weight(loss_inputs), **means}

    first, second, third = pairs
    twice = result([first, second, second], [0, 1, 1])
    assert result([first, {**second, "weight": 2.0}], [0, 1]) == pytest.approx(twice, abs=1e-6)
    log_probs[0, 2] = torch.nan
    without = result([first, {**third, "weight": 0}, second, second], [0, 2, 1, 1])
    assert without == pytest.approx(twice, abs=1e-6)


def test_the_weight_of_a_pair_is_part_of_both_sequences():
    chosen, rejected = flow().prepare_sample(pair(3, 4, weight=0.5))["encoded"]
    assert chosen == ChatTokens([1, 2, 0, 1, 2], [0, 0, 1, 1, 1], 0.5)
    assert rejected.weight == 0.5
    with pytest.raises(DataError, match='"weight" is -1'):
        flow().prepare_sample(pair(3, 4, weight=-1))


def test_a_long_pair_is_refused_when_it_is_prepared():
    made = flow(truncation="refuse")
    made.prepare_sample(pair(7, 7))
    with pytest.raises(DataError, match=r"10 tokens.* 9 "):
        made.prepare_sample(pair(7, 8))
