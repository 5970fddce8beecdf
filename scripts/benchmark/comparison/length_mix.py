"""A log-normal mix of lengths, similar to conversations: median 350 tokens, sigma 1.0, cut at the longest."""

import numpy


def length_mix(count: int, longest: int, seed: int = 0, median: float = 350.0, sigma: float = 1.0) -> list[int]:
    """Lengths in tokens, at least 8."""
    drawn = numpy.exp(numpy.log(median) + sigma * numpy.random.default_rng(seed).standard_normal(count))
    return numpy.clip(drawn, 8, longest).astype(int).tolist()
