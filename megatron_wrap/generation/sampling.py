"""Choice of the next token from logits: greedy or by sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from megatron_wrap.errors import DataError


@dataclass(frozen=True)
class SamplingRule:
    """The rule by which a token is chosen; the names and the order (temperature, top_k, top_p) are those of
    transformers.

    Raises:
        DataError: a value outside its range.
    """

    temperature: float = 0.0
    """Divisor of the logits; 0: the most probable token is chosen (greedy), without top_k and top_p."""
    top_k: int | None = None
    """Number of most probable tokens to keep, with all tokens as probable as the last of them; None: all."""
    top_p: float | None = None
    """Smallest sum of probabilities of the most probable tokens that are kept; None: all tokens are kept."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0 or self.temperature == float("inf"):
            raise DataError(f"wrap.generate: temperature {self.temperature} must be 0 (greedy) or positive")
        if self.top_k is not None and self.top_k < 1:
            raise DataError(f"wrap.generate: top_k {self.top_k} must be at least 1; None keeps all tokens")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise DataError(f"wrap.generate: top_p {self.top_p} must be above 0 and at most 1")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is chosen, without random numbers."""
        return self.temperature == 0.0

    def probabilities(self, logits: Tensor) -> Tensor:
        """Distribution of the next token from logits, both [B, V], fp64; not defined for a greedy rule."""
        scores = logits.double() / self.temperature
        if self.top_k is not None:
            smallest_kept = scores.topk(min(self.top_k, scores.shape[-1]), dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < smallest_kept, -torch.inf)
        if self.top_p is not None and self.top_p < 1.0:
            ascending, order = scores.sort(dim=-1)
            improbable = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - self.top_p
            improbable[..., -1] = False  # keep at least one token
            scores = scores.masked_fill(improbable.scatter(-1, order, improbable), -torch.inf)
        return scores.softmax(dim=-1)

    def choose(self, logits: Tensor, uniforms: Sequence[float]) -> Tensor:
        """One token id for each row of logits [B, V]; [B].

        Args:
            uniforms: for each row a number in [0, 1), at which the inverse of the cumulative distribution is evaluated;
                ignored by a greedy rule.
        """
        if self.greedy:
            return logits.argmax(dim=-1)
        cumulative = self.probabilities(logits).cumsum(dim=-1)
        total = cumulative[:, -1:]
        targets = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * total
        # strictly below the total, so that a last token of probability 0 is never chosen
        targets = targets.minimum(torch.nextafter(total, torch.zeros_like(total)))
        return torch.searchsorted(cumulative, targets, right=True).squeeze(-1)


class UniformNumbers:
    """The random numbers of one completion: a function of the seed and the prompt's index in the list only, so they do
    not depend on the layout, the other prompts or the batching."""

    def __init__(self, seed: int, index: int) -> None:
        self._generator = numpy.random.default_rng([seed, index])

    def draw(self) -> float:
        """The next number, 0 <= number < 1."""
        return float(self._generator.random())
