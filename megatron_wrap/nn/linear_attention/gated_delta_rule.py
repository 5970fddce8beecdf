"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464) in torch, on any device.

A head has a state S [d_k, d_v]. Token t with query q, key k, value v, decay exp(g) and strength beta reads its value
back and corrects it, then the query reads the state:

    S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - exp(g_t) S_(t-1)^T k_t)^T,    o_t = scale S_t^T q_t

Within a chunk of C tokens, with G the cumulative sum of g and S the state before the chunk, the corrections
u_t = beta_t (v_t - exp(g_t) S_(t-1)^T k_t) solve a triangular system, section 3.3 of the paper:

    (I + L) U = diag(beta) (V - diag(exp G) K S),    L_ti = beta_t exp(G_t - G_i) k_t . k_i  for i < t

so all chunks are prepared at once, and only a few products for each chunk follow one another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_wrap.nn.linear_attention.rows import check_lengths, spaced_rows

CHUNK_SIZE = 64
"""Tokens of a chunk: the work within chunks grows with it, the number of steps shrinks."""
_NORM_EPSILON = 1e-6
"""Of the L2 norm of queries and keys, as in transformers and in the package flash-linear-attention."""


def normalized(tensor: Tensor) -> Tensor:
    """The vectors of the last dimension divided by their length."""
    return tensor * torch.rsqrt(tensor.square().sum(dim=-1, keepdim=True) + _NORM_EPSILON)


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
    dtype, tokens = value.dtype, value.shape[1]
    lengths = (tokens,) if lengths is None else tuple(lengths)
    check_lengths(tokens, lengths)
    chunk = min(chunk_size, max(lengths))
    rows = spaced_rows(lengths, 0, chunk, value.device)
    precision = torch.promote_types(dtype, torch.float32)
    copies = value.shape[2] // key.shape[2]
    query, key = (normalized(tensor.to(precision)) for tensor in (query, key))
    query = query * query.shape[-1] ** -0.5
    query, key = (tensor.repeat_interleave(copies, dim=2) for tensor in (query, key))
    tensors = (query, key, value, log_decay[..., None], beta[..., None])
    # [b, heads, chunks, chunk, d]; free positions have beta 0, so they leave the state as it is
    query, key, value, log_decay, beta = (
        rows.spread(tensor.to(precision)).transpose(1, 2).unflatten(2, (-1, chunk)) for tensor in tensors
    )
    first_chunks = {start // chunk for start in rows.starts}
    output, state = _over_chunks(query, key, value, log_decay, beta, first_chunks, state)
    return rows.collect(output.flatten(2, 3).transpose(1, 2)).to(dtype), state


def _over_chunks(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, first: set[int], state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The rule over tensors [b, heads, chunks, chunk, d], where sequences begin with the chunks `first`."""
    chunk, d_k, d_v = query.shape[-2], key.shape[-1], value.shape[-1]
    total = log_decay.cumsum(dim=-2)  # [.., chunk, 1]
    ahead = torch.ones(chunk, chunk, dtype=torch.bool, device=query.device).triu(1)
    between = (total - total.mT).masked_fill(ahead, float("-inf")).exp()  # 0 for later tokens, without overflow
    system = (beta * key) @ key.mT * between  # its diagonal is not read
    right = torch.cat((beta * value, beta * total.exp() * key), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    from_values, from_state = solved.split((d_v, d_k), dim=-1)
    scores = query @ key.mT * between
    decayed_query = query * total.exp()
    decayed_key = (key * (total[..., -1:, :] - total).exp()).mT
    chunk_decay = total[..., -1:, :].exp()
    if state is None:
        state = value.new_zeros(*value.shape[:2], d_k, d_v)
    state = state.to(value.dtype)
    outputs = []
    for index in range(query.shape[2]):
        if index in first and index > 0:
            state = torch.zeros_like(state)
        corrections = from_values[:, :, index] - from_state[:, :, index] @ state
        outputs.append(decayed_query[:, :, index] @ state + scores[:, :, index] @ corrections)
        state = chunk_decay[:, :, index] * state + decayed_key[:, :, index] @ corrections
    return torch.stack(outputs, dim=2), state
