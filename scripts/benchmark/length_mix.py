"""Samples of a log-normal mix of lengths, as in conversations: median 350 tokens, sigma 1.0, cut at the longest."""

from typing import Any

import numpy


def length_mix(count: int, longest: int, seed: int = 0, median: float = 350.0, sigma: float = 1.0) -> list[int]:
    """Lengths in tokens, at least 8."""
    drawn = numpy.exp(numpy.log(median) + sigma * numpy.random.default_rng(seed).standard_normal(count))
    return numpy.clip(drawn, 8, longest).astype(int).tolist()


def mixed_samples(count: int, longest: int, vocab_size: int, seed: int = 0) -> list[dict[str, Any]]:
    """Tokenized samples of these lengths with random tokens; each has one token more, because the last one is only a
    label. All tokens have a loss."""
    generator = numpy.random.default_rng(seed + 1)
    lengths = length_mix(count, longest, seed)
    return [
        {"input_ids": generator.integers(0, vocab_size, length + 1).tolist(), "loss_mask": [1] * (length + 1)}
        for length in lengths
    ]
