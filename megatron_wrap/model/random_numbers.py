"""Random numbers that are a function of a counter, so that every layout generates the same ones for its own part; and
noise on embeddings from them (NEFTune).

A counter-based generator like Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), with the
finalizer of splitmix64 (Steele, Lea, Flood, OOPSLA 2014).

NEFTune (Jain et al., 2023, arXiv:2310.05914) adds uniform noise to the embeddings of training samples. The noise of a
token is a function of the seed, the step, the token ids of its sequence and its position in it, so it is the same on
every layout, packed or not, and in a resumed run. Equal sequences of one step have equal noise.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


def key_of(seed: int, name: str) -> int:
    """An int64 to add to counters, from a hash of (seed, name)."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def hashed(counter: Tensor) -> Tensor:
    """64 random bits for each int64: the finalizer of splitmix64 with wraparound and logical shifts."""
    value = counter * -7046029254386353131  # 0x9E3779B97F4A7C15
    value = (value ^ _logical_shift_right(value, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    value = (value ^ _logical_shift_right(value, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return value ^ _logical_shift_right(value, 31)


def normal(counter: Tensor) -> Tensor:
    """Standard normal random numbers, fp32, from int64 counters: Box-Muller on the two 32-bit halves of a hash."""
    bits = hashed(counter)
    low = (bits & 0xFFFFFFFF).float().add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    high = ((bits >> 32) & 0xFFFFFFFF).float().mul_(2.0 * math.pi * 2.0**-32)
    return low.log_().mul_(-2.0).sqrt_().mul_(high.cos_())


def uniform(counter: Tensor) -> Tensor:
    """Random numbers between -1 and 1, fp32, from int64 counters."""
    return (hashed(counter) >> 40).float().add_(0.5).mul_(2.0**-23)


def _logical_shift_right(value: Tensor, bits: int) -> Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)


CHUNK_ELEMENTS = 2**22
"""Elements of noise generated at once."""


@dataclass(frozen=True)
class EmbeddingNoise:
    """The noise of a micro-batch's tokens, [B, S] each; after `select` of this context-parallel rank's tokens."""

    keys: Tensor
    """Hash of the token ids of the sequence and of the position in it, int64."""
    sizes: Tensor
    """Largest absolute value of the noise, alpha / sqrt(L * hidden_size) with L tokens of the sequence, fp32; 0 on
    padding."""
    step_key: int = 0
    """A hash of the seed and the step."""

    @classmethod
    def of(cls, input_ids: Tensor, rows: Tensor, columns: Tensor, lengths: Tensor, alpha: float, hidden: int) -> Any:
        """The noise of whole sequences.

        Args:
            input_ids: [B, S], padded.
            rows: [B, S], the index of each token's sequence.
            columns: [B, S], each token's position in its sequence.
            lengths: [N], number of tokens of each sequence without padding.
        """
        is_token = columns < lengths[rows]
        contributions = torch.where(is_token, hashed(hashed(columns) + input_ids), 0)
        sums = torch.zeros_like(lengths).index_add_(0, rows.reshape(-1), contributions.reshape(-1))
        sizes = alpha * (lengths.clamp(min=1) * hidden).float().rsqrt()
        return cls(hashed(hashed(sums)[rows] + columns), torch.where(is_token, sizes[rows], 0.0))

    def select(self, positions: Tensor) -> EmbeddingNoise:
        """The noise of the columns `positions`."""
        return replace(self, keys=self.keys[:, positions], sizes=self.sizes[:, positions])

    def moved(self, move: Callable[[Tensor], Tensor]) -> EmbeddingNoise:
        """A copy with `move` applied to each tensor."""
        return replace(self, keys=move(self.keys), sizes=move(self.sizes))

    def add_to(self, embeddings: Tensor) -> Tensor:
        """Embeddings [B, S, hidden_size] plus noise, in their dtype."""
        result = embeddings.clone()
        dims = torch.arange(embeddings.shape[-1], device=embeddings.device)
        keys = hashed(self.keys + self.step_key)
        step = max(1, CHUNK_ELEMENTS // (embeddings.shape[0] * embeddings.shape[-1]))
        for start in range(0, embeddings.shape[1], step):
            part = slice(start, start + step)
            noise = uniform(keys[:, part, None] + dims).mul_(self.sizes[:, part, None])
            result[:, part] += noise.to(result.dtype)
        return result


@contextmanager
def noise_added(word_embeddings: Any, noise: EmbeddingNoise) -> Iterator[None]:
    """Make Megatron-Core's `VocabParallelEmbedding` add noise to its output in the block: [B, S, H], or with
    `reduce_scatter_embeddings` this tensor-parallel rank's part [S/tp, B, H]."""

    def add(module: Any, _inputs: Any, output: Tensor) -> Tensor:
        if not module.reduce_scatter_embeddings:
            return noise.add_to(output)
        group = module.tp_group
        positions = torch.arange(noise.keys.shape[1], device=output.device).chunk(group.size())[group.rank()]
        return noise.select(positions).add_to(output.transpose(0, 1)).transpose(0, 1).contiguous()

    with word_embeddings.register_forward_hook(add):
        yield
