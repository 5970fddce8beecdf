"""Tokens of a run's tokenizer that the initial weights were never trained with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NewTokens:
    """Tokens whose rows of embedding and output layer are initialized with the mean of the other rows."""

    ids: tuple[int, ...]
    """Ids of the new tokens, ascending."""
    trained: tuple[int, ...]
    """Ids of the tokens whose rows are averaged, ascending."""

    @property
    def listed(self) -> str:
        """The new ids as text."""
        first, last, count = self.ids[0], self.ids[-1], len(self.ids)
        if count == 1:
            return f"id {first}"
        return f"ids {first} to {last}" if last - first == count - 1 else f"{count:,} ids from {first} to {last}"


def new_tokens(tokenizer: Any, original: Any, num_rows: int, vocab_size: int) -> NewTokens | None:
    """The tokens that are new to weights; None if there are none. A row that belongs to no token is unchanged.

    Args:
        tokenizer: of the run.
        original: tokenizer of the weights; None: it is not known, and all rows of the weights count as trained.
        num_rows: rows of the weights, without padding; a published model often has more rows than its tokenizer has
            tokens.
        vocab_size: of the model, without padding; for a teacher the number of rows that the student has as well.
    """
    unknown: set[int] = set()
    trained = set(range(min(num_rows, vocab_size)))
    if original is not None and (original is not tokenizer or vocab_size > num_rows):
        known = set(original.get_vocab().values())
        unknown, trained = set(tokenizer.get_vocab().values()) - known, trained & known
    ids = (unknown | set(range(num_rows, vocab_size))) & set(range(vocab_size))
    return NewTokens(tuple(sorted(ids)), tuple(sorted(trained))) if ids else None
