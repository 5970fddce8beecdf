"""The task of examples/grpo: its reward, and the best reward of a completion that does not depend on the prompt."""

import importlib.util
import itertools
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[3] / "examples" / "grpo" / "task.py"


@pytest.fixture(scope="module")
def task():
    spec = importlib.util.spec_from_file_location("grpo_task", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["grpo_task"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["grpo_task"]


def test_prompts_are_held_out_and_have_different_answers(task):
    trained, held_out = task.split_prompts()
    assert len(trained) == 800
    assert len(held_out) == 200
    assert len({*trained, *held_out}) == 1000
    assert len({task.answer_of(prompt) for prompt in held_out}) == 200


@pytest.mark.parametrize(
    ("completion", "reward"), [("230", 1.0), ("", 0.0), ("2", 1 / 3), ("129", 0.0), ("220", 2 / 3), ("2300", 3 / 4)]
)
def test_the_reward_is_the_share_of_right_places(task, completion, reward):
    assert task.reward_of("129=", completion) == pytest.approx(reward)


def test_no_constant_completion_is_better_than_the_reported_one(task):
    _, held_out = task.split_prompts()
    bound, best = task.best_constant(held_out)

    def mean(completion):
        return sum(task.reward_of(prompt, completion) for prompt in held_out) / len(held_out)

    lengths = range(4)  # the reward of a longer one has a larger denominator
    every = ("".join(digits) for length in lengths for digits in itertools.product("0123456789", repeat=length))
    assert max(map(mean, every)) == pytest.approx(bound)
    assert mean(best) == pytest.approx(bound)
    assert bound < 0.2
