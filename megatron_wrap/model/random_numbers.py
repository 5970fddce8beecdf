"""Random numbers that are a function of a counter, so that every layout generates the same ones for its own part.

A counter-based generator like Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), with the
finalizer of splitmix64 (Steele, Lea, Flood, OOPSLA 2014).
"""

from __future__ import annotations

import hashlib
import math

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
