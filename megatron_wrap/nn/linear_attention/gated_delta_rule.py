"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464) in torch, on any device.

A head has a state S [d_k, d_v]. Token t with query q, key k, value v, decay exp(g) and strength beta reads its value
back and corrects it, then the query reads the state:

    S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - exp(g_t) S_(t-1)^T k_t)^T,    o_t = scale S_t^T q_t

Within a chunk of C tokens, with G the cumulative sum of g and S the state before the chunk, the corrections
u_t = beta_t (v_t - exp(g_t) S_(t-1)^T k_t) solve a triangular system, section 3.3 of the paper:

    (I + L) U = diag(beta) (V - diag(exp G) K S),    L_ti = beta_t exp(G_t - G_i) k_t . k_i  for i < t

so all chunks are prepared at once: with U = U_v + U_k S the state after the chunk is

    A S + B,    A = exp(G_C) + K'^T U_k,    B = K'^T U_v,    row t of K' is exp(G_C - G_t) k_t

one matmul for each chunk after the other, and the outputs of all chunks follow from the states at once. On a GPU this
is two short kernels for each chunk, one forward and one backward, in addition to a number that does not grow with the
tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

CHUNK_SIZE = 64
"""Tokens of a chunk: the work within chunks grows with it, the number of steps shrinks."""
_NORM_EPSILON = 1e-6
"""Epsilon of the L2 norm of queries and keys, as in transformers and in the package flash-linear-attention."""
_SMALL = 8
"""Largest inner dimension of matrices that are multiplied element by element."""


def normalized(tensor: Tensor, scale: float = 1.0) -> Tensor:
    """The vectors of the last dimension, times `scale`, divided by their length, sqrt(sum of squares + 1e-6)."""
    width = tensor.shape[-1]
    weight = tensor.new_full((width,), scale * width**-0.5)
    return F.rms_norm(tensor, (width,), weight, _NORM_EPSILON / width)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    lengths: Sequence[int] | None = None,
    state: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
    recompute: bool = True,
) -> tuple[Tensor, Tensor]:
    """The rule over rows of tokens, in fp32, or in fp64 for fp64. Queries and keys are normalized, and queries are
    divided by sqrt(d_k).

    Args:
        query, key: [b, s, key heads, d_k]; each key head serves heads / key heads consecutive value heads.
        value: [b, s, heads, d_v].
        log_decay: [b, s, heads], g of the formula, at most 0.
        beta: [b, s, heads].
        lengths: lengths of the sequences in each row, in tokens; they cover the row, and the state is 0 before each.
            None: one sequence.
        state: [b, heads, d_k, d_v] before the first sequence; None: 0.
        chunk_size: a power of 2.
        recompute: keep the inputs alone for the backward pass, which computes the rule again; otherwise 13 times the
            values in fp32 are kept as well.

    Returns:
        Outputs [b, s, heads, d_v] in the value's dtype, and the state [b, heads, d_k, d_v] after the last token, fp32.

    Raises:
        ValueError: the lengths do not cover the row.
    """
    tokens, heads = value.shape[1:3]
    lengths = (tokens,) if lengths is None else tuple(lengths)
    check_lengths(tokens, lengths)
    chunk = min(chunk_size, 1 << (max(lengths) - 1).bit_length())
    rows = spaced_rows(lengths, 0, chunk, value.device)
    if state is None:
        precision = torch.promote_types(value.dtype, torch.float32)
        state = value.new_zeros(len(value), heads, key.shape[-1], value.shape[-1], dtype=precision)
    inputs = (query, key, value, log_decay, beta, state)
    if recompute and torch.is_grad_enabled():
        result: tuple[Tensor, Tensor] = checkpoint(
            _over_rows, *inputs, rows, chunk, use_reentrant=False, preserve_rng_state=False
        )
        return result
    return _over_rows(*inputs, rows, chunk)


def _over_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    rows: SpacedRows,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` for rows whose sequences begin at multiples of `chunk`."""
    dtype, (key_heads, d_k) = value.dtype, key.shape[2:]
    precision = torch.promote_types(dtype, torch.float32)

    def in_chunks(tensor: Tensor) -> Tensor:
        """Split into chunks: [b, s, heads, d] -> [chunks, b, key heads, value heads or 1, chunk, d]; free positions are
        0."""
        parts = rows.spread(tensor).unflatten(1, (-1, chunk)).unflatten(3, (key_heads, -1)).permute(1, 0, 3, 4, 2, 5)
        return parts.to(precision, memory_format=torch.contiguous_format).contiguous()  # one copy

    query, key = normalized(in_chunks(query), d_k**-0.5), normalized(in_chunks(key))
    # free positions have beta 0 and no decay, so they leave the state as it is
    value, log_decay, beta = (in_chunks(tensor) for tensor in (value, log_decay[..., None], beta[..., None]))
    before = state.to(precision).unflatten(1, (key_heads, -1))
    first_chunks = tuple(start // chunk for start in rows.starts[1:])
    output, state = _over_chunks(query, key, value, log_decay, beta, first_chunks, before)
    output = output.permute(1, 0, 4, 2, 3, 5).to(dtype, memory_format=torch.contiguous_format)
    return rows.collect(output.flatten(3, 4).flatten(1, 2)), state.flatten(1, 2)


def _over_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    first_chunks: tuple[int, ...],
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """The rule over chunks.

    Args:
        query, key: [chunks, b, key heads, 1, chunk, d_k].
        value: [chunks, b, key heads, values per key head, chunk, d_v]; log_decay, beta: the same with 1 for d_v.
        first_chunks: index of the first chunk of each sequence after the first one.
        state: [b, key heads, values per key head, d_k, d_v] before the first chunk.

    Returns:
        Outputs in the shape of `value`, and the state after the last chunk.
    """
    chunk = key.shape[-2]
    total = log_decay.cumsum(dim=-2)
    ahead = torch.ones(chunk, chunk, dtype=torch.bool, device=query.device).triu(1)
    between = (total - total.mT).masked_fill(ahead, float("-inf")).exp()  # 0 for later tokens, without overflow
    decay, last = total.exp(), total[..., -1:, :]
    inverse = _UnitLowerInverse.apply(key @ key.mT * (beta * between)) * beta.mT
    from_values = inverse @ value
    # all value heads of a key head in one matmul, which reads its keys once
    from_state = ((inverse * -decay.mT).flatten(-3, -2) @ key.squeeze(-3)).unflatten(-2, (-1, chunk))
    decayed_key = key * (last - total).exp()
    before, after = _States.apply(last.exp(), decayed_key, from_state, from_values, state, first_chunks)
    corrections = _plus_product(from_values, from_state, before)
    scores = query @ key.mT * between
    return _plus_product((query * decay) @ before, scores, corrections), after


def _plus_product(base: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """base + left @ right, of matrices in the last two dimensions."""
    return torch.baddbmm(*(tensor.flatten(0, -3) for tensor in (base, left, right))).view_as(base)


class _States(torch.autograd.Function):
    """States before each chunk and after the last one: S_(c+1) = A_c S_c + B_c of the module's formula.

    One matmul for each chunk in either direction: the gradients of all A_c are one matmul over all chunks. The backward
    pass computes A again instead of keeping it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        decays: Tensor,
        keys: Tensor,
        from_state: Tensor,
        from_values: Tensor,
        state: Tensor,
        first_chunks: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        """States [chunks, ..., d_k, d_v] before each chunk, which are 0 before each of `first_chunks`, and
        [..., d_k, d_v] after the last.

        Args:
            decays: exp(G_C), [chunks, ..., 1, 1].
            keys, from_state, from_values: K', U_k, U_v, [chunks, ..., chunk, d].
            state: [..., d_k, d_v] before the first chunk.
        """
        states = state.new_empty(len(keys) + 1, *state.shape)
        states[0] = state
        torch.bmm(keys.flatten(0, -3).mT, from_values.flatten(0, -3), out=states[1:].flatten(0, -3))
        transitions = _transitions(decays, keys, from_state)
        steps, products = states.flatten(1, -3), transitions.flatten(1, -3)
        for index in range(len(keys)):
            if index in first_chunks:
                steps[index].zero_()
            steps[index + 1].baddbmm_(products[index], steps[index])
        ctx.save_for_backward(decays, keys, from_state, from_values, states)
        ctx.first_chunks = first_chunks
        return states[:-1], states[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_before: Tensor, of_after: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients, by the same recursion from the last chunk to the first."""
        decays, keys, from_state, from_values, states = ctx.saved_tensors
        grads = torch.cat((of_before, of_after[None]))
        transitions = _transitions(decays, keys, from_state)
        steps, products = grads.flatten(1, -3), transitions.flatten(1, -3)
        for index in reversed(range(len(keys))):
            if index + 1 in ctx.first_chunks:
                steps[index + 1].zero_()
            steps[index].baddbmm_(products[index].mT, steps[index + 1])
        of_additions = grads[1:]
        of_transitions = of_additions @ states[:-1].mT
        of_decays = of_transitions.diagonal(dim1=-2, dim2=-1).sum(dim=-1)[..., None, None]
        of_keys = _plus_product(from_state @ of_transitions.mT, from_values, of_additions.mT)
        return of_decays, of_keys, keys @ of_transitions, keys @ of_additions, grads[0], None


def _transitions(decays: Tensor, keys: Tensor, from_state: Tensor) -> Tensor:
    """A = exp(G_C) + K'^T U_k of each chunk, [chunks, ..., d_k, d_k]."""
    transitions = keys.mT @ from_state
    transitions.diagonal(dim1=-2, dim2=-1).add_(decays.squeeze(-1))
    return transitions


class _UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1, where L is the part below the diagonal of a matrix [..., C, C], whose other part is not read; C is a
    power of 2.

    It is computed from the inverses of the blocks on the diagonal, whose size doubles each time: the inverse of [[P,
    0], [L, Q]] is [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]]. A GPU has fast kernels for many small matmuls, not for many small
    triangular systems.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        """The inverse, in the shape of `matrix` [..., C, C]."""
        matrices = matrix.flatten(0, -3)
        inverses = matrices.new_ones(*matrices.shape[:2], 1, 1)  # [matrices, blocks, size, size]
        while (size := inverses.shape[-1]) < matrix.shape[-1]:
            blocks = matrices.unflatten(2, (-1, 2 * size)).unflatten(1, (-1, 2 * size)).diagonal(dim1=1, dim2=3)
            below = blocks[:, size:, :size].movedim(-1, 1)
            upper, lower = inverses[:, ::2], inverses[:, 1::2]
            merged = inverses.new_zeros(len(matrices), inverses.shape[1] // 2, 2 * size, 2 * size)
            merged[..., :size, :size], merged[..., size:, size:] = upper, lower
            merged[..., size:, :size] = -_small_product(_small_product(lower, below), upper)
            inverses = merged
        inverse = inverses.view_as(matrix)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """-M^T G M^T below the diagonal, with M the inverse and G its gradient."""
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT).tril(-1)


def _small_product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right of many matrices; small ones do not take a block of threads each."""
    if left.shape[-1] <= _SMALL:
        return (left[..., None] * right[..., None, :, :]).sum(dim=-2)
    return left @ right


class PackedRow(Protocol):
    """Attributes of `nn.attention.packed_sequences.PackedSequences` that linear attention reads; the sequences cover a
    row with b = 1."""

    lengths: tuple[int, ...]
    """Length of each sequence in tokens, on the host; global, not of a context-parallel rank."""
    cu_seqlens_q: Tensor
    """Cumulative lengths of the sequences, int32 [N + 1]."""


@dataclass(frozen=True)
class SpacedRows:
    """Rows of sequences with free positions before or after each sequence."""

    length: int
    """Number of positions of a row, free ones included."""
    positions: Tensor
    """Position of each token, int64 [tokens]."""
    starts: tuple[int, ...]
    """The first position of each sequence, free ones included."""

    def spread(self, tensor: Tensor) -> Tensor:
        """Insert free positions: [b, tokens, ...] -> [b, length, ...], 0 at free positions; the tensor itself if there
        are none."""
        if self.length == len(self.positions):
            return tensor
        rows = tensor.new_zeros(tensor.shape[0], self.length, *tensor.shape[2:])
        return rows.index_copy(1, self.positions, tensor)

    def collect(self, rows: Tensor) -> Tensor:
        """The inverse of `spread`."""
        if self.length == len(self.positions):
            return rows
        return rows.index_select(1, self.positions)


@functools.lru_cache(maxsize=64)
def spaced_rows(lengths: tuple[int, ...], before: int, multiple: int, device: torch.device) -> SpacedRows:
    """Rows in which `before` free positions precede each sequence, and others follow it up to a multiple of `multiple`.

    Args:
        lengths: lengths of the sequences of a row, in tokens.
    """
    counts = np.asarray(lengths, dtype=np.int64)
    widths = before + -(-counts // multiple) * multiple
    starts = np.cumsum(widths) - widths
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = torch.from_numpy(np.repeat(starts + before, counts) + within).to(device)
    return SpacedRows(int(widths.sum()), positions, tuple(starts.tolist()))


def check_lengths(tokens: int, lengths: Sequence[int]) -> None:
    """Raise ValueError if sequences do not cover the tokens of a row."""
    if sum(lengths) != tokens:
        raise ValueError(f"sequences of {sum(lengths)} tokens in all do not cover a row of {tokens}")


class RecurrentState:
    """State of one layer: the last inputs of the convolution, and the state of each head.

    Args:
        padding: [prompts], number of padding positions on the left of each prompt in the first pass.
        sources: [batch size], for each sequence the index of its prompt in the first pass.
    """

    def __init__(self, padding: Tensor, sources: Tensor) -> None:
        self._padding, self._sources = padding, sources
        self.inputs: Tensor | None = None
        """Last inputs of the convolution, [b, K - 1, channels]; None before the first pass."""
        self.heads: Tensor | None = None
        """State of each head, fp32 [b, heads, d_k, d_v]; None before the first pass."""

    def without_padding(self, inputs: Tensor) -> Tensor:
        """The inputs [b, s, channels] of a pass, 0 in the padding, where keys and values are then 0 as well."""
        if self.inputs is not None:
            return inputs
        is_padding = torch.arange(inputs.shape[1], device=inputs.device) < self._padding[:, None]
        return inputs.masked_fill(is_padding[..., None], 0.0)

    def keep(self, inputs: Tensor, earlier: int, heads: Tensor) -> None:
        """Keep the last `earlier` inputs [b, s, channels], and the state of the heads after a pass."""
        if self.inputs is None:
            last = F.pad(inputs, (0, 0, earlier, 0))[:, inputs.shape[1] :]
            self.inputs, self.heads = last[self._sources], heads[self._sources]
            return
        self.inputs = torch.cat((self.inputs, inputs), dim=1)[:, -earlier:] if earlier else self.inputs
        self.heads = heads
