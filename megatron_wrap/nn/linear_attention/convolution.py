"""The short causal convolution of each channel before linear attention, in torch, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_wrap.nn.linear_attention.rows import check_lengths, spaced_rows


def causal_convolution(
    inputs: Tensor, weight: Tensor, *, lengths: Sequence[int] | None = None, before: Tensor | None = None
) -> Tensor:
    """silu(sum_j weight[c, j] x[t - (K - 1) + j, c]): each token sees itself and K - 1 earlier ones of its sequence.

    Args:
        inputs: [b, s, c].
        weight: [c, K].
        lengths: lengths of the sequences in each row, in tokens; they cover the row. None: one sequence.
        before: [b, K - 1, c], the inputs before the row, which is then one sequence; None: 0.

    Returns:
        [b, s, c] in the inputs' dtype.

    Raises:
        ValueError: the lengths do not cover the row.
    """
    tokens, earlier = inputs.shape[1], weight.shape[1] - 1
    lengths = (tokens,) if lengths is None else tuple(lengths)
    check_lengths(tokens, lengths)
    rows = spaced_rows(lengths, earlier, 1, inputs.device)
    if before is not None:
        spread = torch.cat((before.to(inputs.dtype), inputs), dim=1)
    elif len(lengths) == 1:
        spread = F.pad(inputs, (0, 0, earlier, 0))
    else:
        spread = rows.spread(inputs)
    convolved = F.conv1d(spread.transpose(1, 2), weight[:, None], groups=len(weight)).transpose(1, 2)
    if len(lengths) > 1:
        convolved = convolved.index_select(1, rows.positions - earlier)
    return F.silu(convolved)
