"""The task of the example: add 1 to three digits. Prompts, reward, and the best reward of a constant completion."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

NUM_DIGITS, NUM_HELD_OUT = 3, 200
MAX_NEW_TOKENS = NUM_DIGITS + 1
"""The digits and the end token."""


def split_prompts() -> tuple[list[str], list[str]]:
    """All strings of three digits as ("123=", ...): 800 to train on, and 200 that are held out."""
    every = [f"{number:0{NUM_DIGITS}}=" for number in range(10**NUM_DIGITS)]
    random.Random(0).shuffle(every)
    return every[NUM_HELD_OUT:], every[:NUM_HELD_OUT]


def answer_of(prompt: str) -> str:
    """The only completion of reward 1: the digit after each digit of the prompt, 0 after 9."""
    return "".join(str((int(digit) + 1) % 10) for digit in prompt.removesuffix("="))


def reward_of(prompt: str, completion: str) -> float:
    """Share of positions, from 0 to 1, with the right character, of the longer of completion and answer."""
    answer = answer_of(prompt)
    right = sum(ours == theirs for ours, theirs in zip(completion, answer, strict=False))
    return right / max(len(completion), len(answer))


def best_constant(prompts: Sequence[str]) -> tuple[float, str]:
    """The largest mean reward of one completion for all prompts, and that completion.

    All answers have the same length, so a completion of this length is best, and positions are independent: the best
    character of a position is the most frequent one.
    """
    answers = [answer_of(prompt) for prompt in prompts]
    completion = "".join(Counter(characters).most_common(1)[0][0] for characters in zip(*answers, strict=True))
    return sum(reward_of(prompt, completion) for prompt in prompts) / len(prompts), completion
