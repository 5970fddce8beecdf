"""Fifty completions of ten prompts, and the share of them that is Python of more than one statement."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

PROMPTS = (
    "def hello_world():",
    "def add(a, b):",
    "def read_lines(path):",
    "class Point:\n\n    def __init__(self, x, y):",
    "class Stack:\n\n    def push(self, item):",
    "for name in names:",
    "if value is None:",
    "while True:",
    "with open(path) as file:",
    "try:\n    import json\nexcept ImportError:",
)
"""Beginnings of a block, which a completion continues."""
EACH = 5
"""Completions of a prompt."""
MAX_NEW_TOKENS = 64


def block_of(completion: str) -> str:
    """The whole lines of a completion that belong to the block that its prompt begins.

    The block ends where a line begins at the margin, as in CodeParrot's evaluation on HumanEval. A completion that is
    longer than the tokens it may have ends within a line, which is left out.
    """
    whole = completion[: completion.rfind("\n") + 1]
    end = re.search(r"\n(?=\S)", whole)
    return whole[: end.end()] if end else whole


def is_python(prompt: str, completion: str) -> bool:
    """Whether prompt and block parse, and the block has more than one statement."""
    block = block_of(completion)
    try:
        statements = sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(prompt + block)))
        of_prompt = sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(prompt + " pass\n"))) - 1
    except (SyntaxError, ValueError):  # ValueError: a null character
        return False
    return statements - of_prompt > 1


def parse_rate(completions: Sequence[str]) -> float:
    """The share of the completions, `EACH` of each prompt in order, that are Python of more than one statement."""
    good = [is_python(PROMPTS[index // EACH], text) for index, text in enumerate(completions)]
    return sum(good) / len(good)
