"""KTO: which answers the KL estimate pairs with the prompts. No process group."""

from typing import Any

import pytest
import torch

from megatron_wrap.flow import FlowContext
from megatron_wrap.flow.kto import MegatronWrapGPTModelKTOFlow

Config = MegatronWrapGPTModelKTOFlow.Config


def flow(**options: Any) -> MegatronWrapGPTModelKTOFlow:
    context = FlowContext(2, 16, 40, 1, lambda part: part, lambda value: value, None)
    return MegatronWrapGPTModelKTOFlow(Config(flow_key="gpt_kto", **options), context)


def samples(*answers: list[int]) -> list[dict[str, Any]]:
    return [
        flow().prepare_sample({"prompt_ids": [1, 10 + index], "completion_ids": answer, "label": True})
        for index, answer in enumerate(answers)
    ]


def paired(*answers: list[int]) -> list[tuple[list[int], float]]:
    """The tokens after each prompt, and their weight in the estimate."""
    joined = flow().get_step_samples(samples(*answers))
    assert [sample["encoded"].input_ids[:2] for sample in joined] == [[1, 10 + index] for index in range(len(answers))]
    return [(sample["encoded"].input_ids[2:], sample["encoded"].weight) for sample in joined]


def test_each_prompt_has_the_last_answer_before_it_that_differs_from_its_own():
    a, b, c = [2, 3], [4], [5, 6, 7]
    assert paired(a, b, c) == [(c, 1.0), (a, 1.0), (b, 1.0)]  # trl rotates in the same way
    assert paired(a, b, b, a) == [(b, 1.0), (a, 1.0), (a, 1.0), (b, 1.0)]
    assert paired(a, a, b) == [(b, 1.0), (b, 1.0), (a, 1.0)]


@pytest.mark.parametrize("count", [1, 3])
def test_a_sample_without_another_answer_is_not_part_of_the_estimate(count: int):
    assert paired(*[[2, 3]] * count) == [([2, 3], 0.0)] * count
    values = {"ratios": torch.full((count,), 7.0), "weights": torch.zeros(count)}
    assert flow().reduce_step_values(values)["kl"] == 0.0


def test_a_stored_answer_that_is_the_sample_s_own_does_not_count_either():
    made = flow()
    alone = samples([2, 3])
    [(other, stored)] = made.get_samples_to_precompute(alone)
    assert other["encoded"].weight == 0.0
    step = {f"reference_step_{name}": tensor for name, tensor in stored.items()}
    [joined] = made.get_step_samples([{**alone[0], **step, "reference_step_answer_log_probs": -1.0}])
    assert joined["encoded"].weight == 0.0
