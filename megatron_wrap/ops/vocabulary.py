"""What the operations on vocabulary-parallel logits share: token blocks, ownership of ids, the softmax's normalizer.

Logits are [..., V/tp], [B, S, V/tp] in a flow: tensor-parallel rank r holds the columns `r * V/tp` onwards. A loss is
replicated over TP, so the sums over TP have an identity backward here: each rank's gradient is that of its own
columns. Arithmetic is fp32 for half-precision logits. Columns of a padded vocabulary hold `finfo.min / 2`
(`model/gpt.py`): they get probability 0 and add nothing, neither to a value nor to a gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_wrap.errors import FlowError
from megatron_wrap.parallel.collectives import ProcessGroup, reduce_in_place

CHUNK_BYTES = 256 * 2**20
"""Bound of the working memory of one block of tokens, bytes (one token at least is worked on at a time)."""
TOKEN_BYTES = 64
"""Bound of what an operation keeps for each token beside its blocks, bytes: normalizers and other single numbers."""

Block = tuple[slice, ...]
"""Indexes one block of the tokens: a slice for each dimension of a tensor but its last."""


def token_blocks(shape: Sequence[int], token_bytes: int, limit: int | None = None) -> Iterator[Block]:
    """Cut tokens of leading dimensions `shape` into blocks of at most `limit` bytes (default `CHUNK_BYTES`).

    The blocks index the tensors as they are, so logits of any strides are read without being copied whole. They are
    the same on every rank of a group whose tensors have the same shape.

    Args:
        token_bytes: working memory that one token needs, bytes.
    """
    tokens = max(1, (CHUNK_BYTES if limit is None else limit) // max(1, token_bytes))
    steps, inner = [1] * len(shape), 1
    for dim in reversed(range(len(shape))):
        steps[dim] = max(1, min(shape[dim], tokens // inner))
        inner = max(1, inner * shape[dim])
        if steps[dim] < shape[dim]:
            break
    yield from itertools.product(
        *(
            [slice(start, start + step) for start in range(0, size, step)]
            for size, step in zip(shape, steps, strict=True)
        )
    )


def compute_dtype(*logits: Tensor) -> torch.dtype:
    """float64 if any of the logits are, else fp32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in logits) else torch.float32


def owned_places(ids: Tensor, columns: int, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Of global ids: this rank's column of each (any of its columns for another rank's id), and whether it owns it."""
    places = ids.long() - group.rank() * columns
    owned = (places >= 0) & (places < columns)
    return places.clamp_(0, columns - 1), owned


def owned_logits(logits: Tensor, places: Tensor, owned: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, C], [n, K] -> [n, K]: the logits of this rank's ids, 0 where another rank owns the id."""
    return logits.gather(-1, places).to(dtype).masked_fill_(~owned, 0.0)


def normalizer_parts(
    logits: Tensor, dtype: torch.dtype, temperature: float = 1.0, limit: int | None = None
) -> tuple[Tensor, Tensor]:
    """This rank's maximum of logits / temperature and the sum of exp(logits / temperature - maximum), each [...]."""
    highest = finite_max(logits, dtype, temperature)
    total = torch.empty_like(highest)
    for block in token_blocks(total.shape, logits.shape[-1] * dtype.itemsize, limit):
        # no name for the block: it would be held while the next is made
        total[block] = exponentials(logits[block], highest[block], temperature).sum(dim=-1)
    return highest, total


def finite_max(logits: Tensor, dtype: torch.dtype, temperature: float = 1.0) -> Tensor:
    """[..., C] -> [...]: maximum of logits / temperature; finite for a shard of -inf, which then adds 0, not NaN."""
    return logits.amax(dim=-1).to(dtype).div_(temperature).clamp_(min=torch.finfo(dtype).min / 2)


def join_normalizer(highest: Tensor, total: Tensor, group: ProcessGroup) -> Tensor:
    """Logarithm of the sum of exponentials over all ranks' columns, from each rank's `normalizer_parts`."""
    highest_anywhere = highest.clone()
    reduce_in_place(highest_anywhere, "max", group)
    total = total * (highest - highest_anywhere).exp_()
    reduce_in_place(total, "sum", group)
    return total.log_().add_(highest_anywhere)


def log_normalizer(logits: Tensor, dtype: torch.dtype, temperature: float, group: ProcessGroup) -> Tensor:
    """[..., V/tp] -> [...]: logarithm of the sum of exp(logit / temperature) over the whole vocabulary."""
    return join_normalizer(*normalizer_parts(logits, dtype, temperature), group)


def scaled(logits: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    """A copy of logits / temperature in `dtype`."""
    copy = logits.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return copy if temperature == 1.0 else copy.div_(temperature)


def exponentials(logits: Tensor, subtrahend: Tensor, temperature: float = 1.0) -> Tensor:
    """exp(logits / temperature - subtrahend), [n, C] and [n] -> [n, C] in the subtrahend's type."""
    if temperature != 1.0 or logits.dtype != subtrahend.dtype:  # torch.sub would convert into a second buffer
        return scaled(logits, subtrahend.dtype, temperature).sub_(subtrahend.unsqueeze(-1)).exp_()
    return torch.sub(logits, subtrahend.unsqueeze(-1)).exp_()


def floored(log_probs: Tensor) -> Tensor:
    """In place: -inf and what would become it gets a finite value whose exponential is 0, so that p log p is 0."""
    return log_probs.clamp_(min=torch.finfo(log_probs.dtype).min / 8)


def block_log_probs(logits: Tensor, normalizer: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of this rank's columns, [n, C] and [n] -> [n, C] in the normalizer's type, all finite."""
    return floored(scaled(logits, normalizer.dtype, temperature).sub_(normalizer.unsqueeze(-1)))


def check_logits(name: str, logits: Tensor, *others: tuple[str, Tensor]) -> None:
    """Raise FlowError unless each of `others` has the leading dimensions of the logits, which must be floating."""
    if not logits.is_floating_point() or logits.dim() < 1:
        raise FlowError(f"{name} must be floating logits [B, S, V/tp], not {logits.dtype} {list(logits.shape)}")
    for other_name, other in others:
        if other.shape[: logits.dim() - 1] != logits.shape[:-1] or other.dim() != logits.dim():
            raise FlowError(
                f"{other_name} {list(other.shape)} do not fit {name} {list(logits.shape)}: "
                f"give one row for each token, {[*logits.shape[:-1], 'K']}"
            )


def check_temperature(temperature: float) -> None:
    """Raise FlowError unless the temperature is a positive finite number."""
    if not (temperature > 0 and math.isfinite(temperature)):
        raise FlowError(f"temperature={temperature} must be a positive number; 1.0 leaves the logits as they are")
