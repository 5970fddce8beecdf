"""One next token for each row of logits: the most probable, or drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from megatron_wrap.errors import DataError


@dataclass(frozen=True)
class SamplingRule:
    """How a token is chosen; the names and the order (temperature, top_k, top_p) are those of transformers.

    Raises:
        DataError: a value outside its range.
    """

    temperature: float = 0.0
    """0: the most probable token (greedy), top_k and top_p have no effect. Else logits are divided by it."""
    top_k: int | None = None
    """Only the k most probable tokens, and those as probable as the last of them; None: all."""
    top_p: float | None = None
    """Only the fewest tokens, most probable first, whose probabilities sum to at least top_p; None: all."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0 or self.temperature == float("inf"):
            raise DataError(f"wrap.generate: temperature {self.temperature} must be 0 (greedy) or positive")
        if self.top_k is not None and self.top_k < 1:
            raise DataError(f"wrap.generate: top_k {self.top_k} must be at least 1; None takes all tokens")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise DataError(f"wrap.generate: top_p {self.top_p} must be above 0 and at most 1")

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0.0

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution [B, V] of the next token, fp64, that logits [B, V] give; not for a greedy rule."""
        scores = logits.double() / self.temperature
        if self.top_k is not None:
            smallest_kept = scores.topk(min(self.top_k, scores.shape[-1]), dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < smallest_kept, -torch.inf)
        if self.top_p is not None and self.top_p < 1.0:
            ascending, order = scores.sort(dim=-1)
            improbable = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - self.top_p
            improbable[..., -1] = False  # one token at least
            scores = scores.masked_fill(improbable.scatter(-1, order, improbable), -torch.inf)
        return scores.softmax(dim=-1)

    def choose(self, logits: Tensor, uniforms: Sequence[float]) -> Tensor:
        """One token id for each row of logits [B, V]; [B].

        Args:
            uniforms: for each row a number of [0, 1), at which the inverse of the cumulated distribution is taken.
        """
        if self.greedy:
            return logits.argmax(dim=-1)
        cumulated = self.probabilities(logits).cumsum(dim=-1)
        total = cumulated[:, -1:]
        places = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * total
        # below the total, so that a token of no probability at the end is never taken
        places = places.minimum(torch.nextafter(total, torch.zeros_like(total)))
        return torch.searchsorted(cumulated, places, right=True).squeeze(-1)


class UniformNumbers:
    """The random numbers of one completion: a function of the seed and of the prompt's place in the list only, so they
    do not depend on the layout, on the other prompts or on how those are batched."""

    def __init__(self, seed: int, place: int) -> None:
        self._generator = numpy.random.default_rng([seed, place])

    def draw(self) -> float:
        """The next number, 0 <= number < 1."""
        return float(self._generator.random())
