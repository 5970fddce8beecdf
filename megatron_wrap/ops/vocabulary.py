"""Shared parts of the operations on vocabulary-parallel logits: token blocks, ownership of ids, softmax normalizer.

Logits are [..., V/tp], in a flow [B, S, V/tp]: tensor-parallel rank r holds the V/tp columns from `r * V/tp`. A loss is
replicated over TP, so sums over TP have an identity backward: each rank's gradient is that of its own columns.
Half-precision logits are computed in fp32. Padding columns of the vocabulary contain `finfo.min / 2`
(`model/gpt_provider.py`): they have probability 0 and contribute nothing to values and gradients. An id of a
padding column or above the vocabulary has the logit -inf, so that a loss that uses it is not finite and ends the step.
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
"""Maximum temporary memory of one block of tokens, in bytes; a block has at least one token."""
TOKEN_BYTES = 64
"""Maximum memory that an operation keeps per token besides its blocks, in bytes: normalizers and other scalars."""

_MASKED = -1e30  # larger than any padding column in bf16 and fp32, smaller than any other logit
_INFINITE = 1e30  # larger than any divergence, smaller than one that clamped log-probabilities make finite

Block = tuple[slice, ...]
"""Index of one block of tokens: a slice for each dimension of a tensor except the last."""


def token_blocks(shape: Sequence[int], token_bytes: int, limit: int | None = None) -> Iterator[Block]:
    """Split tokens with leading dimensions `shape` into blocks of at most `limit` bytes (default `CHUNK_BYTES`).

    The blocks index tensors of any strides without copying them. They are equal on all ranks of a group whose tensors
    have the same shape.

    Args:
        token_bytes: temporary memory per token, in bytes.
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
    """float64 if any of the logits are float64, else fp32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in logits) else torch.float32


def local_indices(ids: Tensor, columns: int, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """This rank's column of each global id (arbitrary if another rank owns the id), and whether this rank owns it."""
    indices = ids.long() - group.rank() * columns
    owned = (indices >= 0) & (indices < columns)
    return indices.clamp_(0, columns - 1), owned


def owned_logits(logits: Tensor, indices: Tensor, owned: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits of this rank's ids, 0 if another rank owns the id: [n, C], [n, K] -> [n, K]."""
    return logits.gather(-1, indices).to(dtype).masked_fill_(~owned, 0.0)


def masked_below(dtype: torch.dtype) -> float:
    """Logits up to this value are padding of the vocabulary or -inf, also after a division by a temperature."""
    return max(_MASKED, torch.finfo(dtype).min / 4)


def exclude_outside(values: Tensor, ids: Tensor, logits: Tensor, group: ProcessGroup) -> Tensor:
    """The logits of ids, summed over ranks, with -inf in place for each id that is padding or above the vocabulary. A
    negative id, such as -100 of a token without loss, keeps its meaningless value."""
    outside = ids >= logits.shape[-1] * group.size()
    return values.masked_fill_(outside.logical_or_(values <= masked_below(logits.dtype)), -math.inf)


def with_infinite(divergences: Tensor) -> Tensor:
    """Divergences with inf in place where p is positive and q is 0, which clamped log-probabilities make finite."""
    return divergences.masked_fill_(divergences > _INFINITE, math.inf)


def columns_below(vocab_size: int | None, columns: int, group: ProcessGroup) -> int:
    """Number of this rank's columns whose ids are below `vocab_size`; None: all columns."""
    return columns if vocab_size is None else min(max(vocab_size - group.rank() * columns, 0), columns)


def normalizer_parts(
    logits: Tensor, dtype: torch.dtype, temperature: float = 1.0, limit: int | None = None
) -> tuple[Tensor, Tensor]:
    """This rank's maximum of logits / temperature and sum of exp(logits / temperature - maximum), each [...]."""
    highest = finite_max(logits, dtype, temperature)
    total = torch.empty_like(highest)
    for block in token_blocks(total.shape, logits.shape[-1] * dtype.itemsize, limit):
        # not assigned to a variable, which would keep the block in memory while the next is computed
        total[block] = exponentials(logits[block], highest[block], temperature).sum(dim=-1)
    return highest, total


def finite_max(logits: Tensor, dtype: torch.dtype, temperature: float = 1.0) -> Tensor:
    """Maximum of logits / temperature, [..., C] -> [...]. It is finite even if all are -inf or C is 0, so that the sum
    of exponentials is 0, not NaN."""
    if logits.shape[-1] == 0:
        return torch.full(logits.shape[:-1], torch.finfo(dtype).min / 2, dtype=dtype, device=logits.device)
    return logits.amax(dim=-1).to(dtype).div_(temperature).clamp_(min=torch.finfo(dtype).min / 2)


def log_normalizer(logits: Tensor, dtype: torch.dtype, temperature: float, group: ProcessGroup) -> Tensor:
    """Logsumexp of logits / temperature over the whole vocabulary, [..., V/tp] -> [...]."""
    highest, total = normalizer_parts(logits, dtype, temperature)
    highest_anywhere = highest.clone()
    reduce_in_place(highest_anywhere, "max", group)
    total = total * (highest - highest_anywhere).exp_()
    reduce_in_place(total, "sum", group)
    return total.log_().add_(highest_anywhere)


def scaled(logits: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    """A copy of logits / temperature in `dtype`."""
    copy = logits.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return copy if temperature == 1.0 else copy.div_(temperature)


def exponentials(logits: Tensor, subtrahend: Tensor, temperature: float = 1.0) -> Tensor:
    """exp(logits / temperature - subtrahend), [n, C] and [n] -> [n, C] in the subtrahend's dtype."""
    if temperature != 1.0 or logits.dtype != subtrahend.dtype:  # torch.sub would need a second buffer to convert
        return scaled(logits, subtrahend.dtype, temperature).sub_(subtrahend.unsqueeze(-1)).exp_()
    return torch.sub(logits, subtrahend.unsqueeze(-1)).exp_()


def clamp_log_probs(log_probs: Tensor) -> Tensor:
    """Clamp log-probabilities in place to a finite minimum whose exponential is 0, so that p log p is 0, not NaN."""
    return log_probs.clamp_(min=torch.finfo(log_probs.dtype).min / 8)


def block_log_probs(logits: Tensor, normalizer: Tensor, temperature: float) -> Tensor:
    """Finite log-probabilities of this rank's columns, [n, C] and [n] -> [n, C] in the normalizer's dtype."""
    return clamp_log_probs(scaled(logits, normalizer.dtype, temperature).sub_(normalizer.unsqueeze(-1)))


def check_logits(name: str, logits: Tensor, *others: tuple[str, Tensor]) -> None:
    """Raise FlowError unless the logits are floating and each of `others` has their leading dimensions."""
    if not logits.is_floating_point() or logits.dim() < 1:
        raise FlowError(f"{name} must be floating-point logits [B, S, V/tp], not {logits.dtype} {list(logits.shape)}")
    for other_name, other in others:
        if other.shape[: logits.dim() - 1] != logits.shape[:-1] or other.dim() != logits.dim():
            raise FlowError(
                f"{other_name} {list(other.shape)} do not match {name} {list(logits.shape)}; "
                f"pass one row per token, {[*logits.shape[:-1], 'K']}"
            )


def check_temperature(temperature: float) -> None:
    """Raise FlowError unless the temperature is a positive finite number."""
    if not (temperature > 0 and math.isfinite(temperature)):
        raise FlowError(f"temperature={temperature} must be positive and finite; 1.0 leaves the logits unchanged")
