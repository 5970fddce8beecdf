"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464) in torch, on any device.

A head has a state S [d_k, d_v]. Token t with query q, key k, value v, decay exp(g) and strength beta reads its value
back and corrects it, then the query reads the state:

    S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - exp(g_t) S_(t-1)^T k_t)^T,    o_t = scale S_t^T q_t

Within a chunk of C tokens, with G the cumulative sum of g and S the state before the chunk, the corrections
u_t = beta_t (v_t - exp(g_t) S_(t-1)^T k_t) solve a triangular system, section 3.3 of the paper:

    (I + L) U = diag(beta) (V - diag(exp G) K S),    L_ti = beta_t exp(G_t - G_i) k_t . k_i  for i < t

so all chunks are prepared at once: with U = U_v - U_k S the state after the chunk is

    A S + B,    A = exp(G_C) - K'^T U_k,    B = K'^T U_v,    row t of K' is exp(G_C - G_t) k_t

one product for each chunk after the other, and the outputs of all chunks follow from the states at once. On a GPU this
is two short kernels for each chunk, one forward and one backward, beside a number that does not grow with the tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_wrap.nn.linear_attention.rows import check_lengths, spaced_rows

CHUNK_SIZE = 64
"""Tokens of a chunk: the work within chunks grows with it, the number of steps shrinks."""
_NORM_EPSILON = 1e-6
"""Of the L2 norm of queries and keys, as in transformers and in the package flash-linear-attention."""


def normalized(tensor: Tensor) -> Tensor:
    """The vectors of the last dimension divided by their length, sqrt(sum of squares + 1e-6)."""
    width = tensor.shape[-1]
    return F.rms_norm(tensor, (width,), eps=_NORM_EPSILON / width) * width**-0.5


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
) -> tuple[Tensor, Tensor]:
    """The rule over rows of tokens, in fp32, or in fp64 for fp64. Queries and keys are normalized, and queries are
    divided by sqrt(d_k).

    Args:
        query, key: [b, s, key heads, d_k]; each key head serves heads / key heads consecutive value heads.
        value: [b, s, heads, d_v].
        log_decay: [b, s, heads], g of the formula, at most 0.
        beta: [b, s, heads].
        lengths: of the sequences in each row, in tokens, which cover it; the state is 0 before each. None: one.
        state: [b, heads, d_k, d_v] before the first sequence; None: 0.

    Returns:
        Outputs [b, s, heads, d_v] in the value's dtype, and the state [b, heads, d_k, d_v] after the last token, fp32.

    Raises:
        ValueError: the lengths do not cover the row.
    """
    dtype, (batch, tokens, heads, d_v) = value.dtype, value.shape
    key_heads, d_k = key.shape[2:]
    lengths = (tokens,) if lengths is None else tuple(lengths)
    check_lengths(tokens, lengths)
    chunk = min(chunk_size, max(lengths))
    rows = spaced_rows(lengths, 0, chunk, value.device)
    precision = torch.promote_types(dtype, torch.float32)

    def in_chunks(tensor: Tensor) -> Tensor:
        """[b, s, heads, d] to [chunks, b, key heads, value heads or 1, chunk, d]; free positions are 0."""
        chunks = rows.spread(tensor.to(precision)).unflatten(1, (-1, chunk)).unflatten(3, (key_heads, -1))
        return chunks.permute(1, 0, 3, 4, 2, 5).contiguous()

    query, key = (in_chunks(normalized(tensor.to(precision))) for tensor in (query, key))
    # free positions have beta 0 and no decay, so they leave the state as it is
    value, log_decay, beta = (in_chunks(tensor) for tensor in (value, log_decay[..., None], beta[..., None]))
    if state is None:
        state = value.new_zeros(batch, heads, d_k, d_v)
    before = state.to(precision).unflatten(1, (key_heads, -1))
    first_chunks = tuple(start // chunk for start in rows.starts[1:])
    output, state = _over_chunks(query * d_k**-0.5, key, value, log_decay, beta, first_chunks, before)
    output = output.permute(1, 0, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)
    return rows.collect(output).to(dtype), state.flatten(1, 2)


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
        first_chunks: of the sequences after the first one.
        state: [b, key heads, values per key head, d_k, d_v] before the first chunk.

    Returns:
        Outputs in the shape of `value`, and the state after the last chunk.
    """
    chunk, d_k, d_v = key.shape[-2], key.shape[-1], value.shape[-1]
    total = log_decay.cumsum(dim=-2)
    ahead = torch.ones(chunk, chunk, dtype=torch.bool, device=query.device).triu(1)
    between = (total - total.mT).masked_fill(ahead, float("-inf")).exp()  # 0 for later tokens, without overflow
    decay, last = total.exp(), total[..., -1:, :]
    right = torch.cat((beta * value, beta * decay * key), dim=-1)
    solved = _SolveUnitLower.apply(key @ key.mT * (beta * between), right)
    additions, reads = ((key * (last - total).exp()).mT @ solved).split((d_v, d_k), dim=-1)
    transitions = last.exp() * torch.eye(d_k, dtype=key.dtype, device=key.device) - reads
    states = _States.apply(transitions, additions, state, first_chunks)
    from_values, from_state = solved.split((d_v, d_k), dim=-1)
    corrections = from_values - from_state @ states[:-1]
    outputs = (query * decay) @ states[:-1] + (query @ key.mT * between) @ corrections
    return outputs, states[-1]


class _States(torch.autograd.Function):
    """States before each chunk and after the last one: S_(c+1) = transition_c @ S_c + addition_c.

    One product for each chunk in either direction: the gradients of all transitions are one product over all chunks.
    """

    @staticmethod
    def forward(
        ctx: Any, transitions: Tensor, additions: Tensor, state: Tensor, first_chunks: tuple[int, ...]
    ) -> Tensor:
        """[chunks, ..., d_k, d_k], [chunks, ..., d_k, d_v], [..., d_k, d_v] to [chunks + 1, ..., d_k, d_v]; the state
        before each of `first_chunks` is 0."""
        states = torch.cat((state[None], additions))
        steps, products = states.flatten(1, -3), transitions.flatten(1, -3)
        for index in range(len(transitions)):
            if index in first_chunks:
                steps[index].zero_()
            steps[index + 1].baddbmm_(products[index], steps[index])
        ctx.save_for_backward(transitions, states)
        ctx.first_chunks = first_chunks
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """The same recursion from the last chunk to the first."""
        transitions, states = ctx.saved_tensors
        grads = grad.clone(memory_format=torch.contiguous_format)
        steps, products = grads.flatten(1, -3), transitions.flatten(1, -3)
        for index in reversed(range(len(transitions))):
            if index + 1 in ctx.first_chunks:
                steps[index + 1].zero_()
            steps[index].baddbmm_(products[index].mT, steps[index + 1])
        return grads[1:] @ states[:-1].mT, grads[1:], grads[0], None


class _SolveUnitLower(torch.autograd.Function):
    """X of (I + L) X = R, where L is the part of `system` below its diagonal; the rest is not read.

    By the inverse, which products of whole matrices build from the inverses of the blocks on the diagonal, twice as
    large each time: the inverse of [[P, 0], [L, Q]] is [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]]. A GPU has fast kernels for
    many small products, not for many small triangular systems.
    """

    @staticmethod
    def forward(ctx: Any, system: Tensor, right: Tensor) -> Tensor:
        """[..., C, C] and [..., C, d] to [..., C, d]."""
        inverse = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
        for number, mask in enumerate(_blocks_below(system.shape[-1], system.device)):
            below = system * mask
            inverse = inverse - (inverse @ below @ inverse if number else below)
        solved = inverse @ right
        ctx.save_for_backward(inverse, solved)
        return solved

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Of R: (I + L)^-T times the gradient; of L: minus that times X^T."""
        inverse, solved = ctx.saved_tensors
        of_right = inverse.mT @ grad
        return -(of_right @ solved.mT).tril(-1), of_right


@functools.lru_cache(maxsize=16)
def _blocks_below(size: int, device: torch.device) -> tuple[Tensor, ...]:
    """bool [size, size] for blocks of 1, 2, 4, ...: the blocks below the diagonal in each pair of neighbors."""
    row, column = torch.arange(size, device=device)[:, None], torch.arange(size, device=device)
    blocks = [2**power for power in range((size - 1).bit_length())]
    return tuple((row // block == column // block + 1) & (row // block % 2 == 1) for block in blocks)
