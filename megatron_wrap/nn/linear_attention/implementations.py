"""Implementations of linear attention: the rule and the norm by the kernels of the package flash-linear-attention,
where it is installed and the tensors are on a GPU, else in torch; the convolution by a kernel of `nn.kernels`, else in
torch. Where that package cannot train, training uses the rule in torch."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_wrap.nn.kernels.available import can_convolve
from megatron_wrap.nn.linear_attention.gated_delta_rule import PackedRow, check_lengths, gated_delta_rule, spaced_rows
from megatron_wrap.utils.dist_logger import logger


@functools.cache
def has_fla() -> bool:
    """Whether flash-linear-attention, or its part fla-core, is installed."""
    return importlib.util.find_spec("fla") is not None and importlib.util.find_spec("triton") is not None


@functools.cache
def _imports_fla() -> bool:
    """Whether the package is installed and can be imported; the first call warns where it cannot."""
    if not has_fla():
        return False
    try:
        importlib.import_module("fla.ops")
    except (ImportError, OSError) as error:  # it, or tilelang which it imports, does not fit the other packages
        logger.warning_rank_0(
            "linear attention is computed in torch, which is slower: flash-linear-attention is installed, but cannot "
            f"be imported ({error}); install 'megatron-wrap[linear-attention]' again, or another version of it"
        )
        return False
    return True


def uses_fla(tensor: Tensor) -> bool:
    """Whether its kernels compute this tensor: they are for 16-bit dtypes on a GPU."""
    return tensor.is_cuda and tensor.dtype in (torch.float16, torch.bfloat16) and _imports_fla()


@functools.cache
def why_fla_cannot_train() -> str | None:
    """Why the backward pass of the package's gated delta rule fails on this machine's GPUs, and what to do; None: it
    does not fail.

    The package refuses this pass with Triton from 3.4 until 3.7.1 on Hopper GPUs, where its kernel computes wrong
    gradients (its issue 640), unless tilelang is installed, for which it has another version of the kernel. All
    conditions are those of the module that refuses.
    """
    from fla.ops.common import chunk_o
    from fla.ops.common.backends import CommonTileLangBackend

    computes_wrong = getattr(chunk_o, "TRITON_ABOVE_3_4_0", False) and not getattr(chunk_o, "TRITON_ABOVE_3_7_1", True)
    if not (computes_wrong and getattr(chunk_o, "IS_NVIDIA_HOPPER", False)):
        return None
    backend = CommonTileLangBackend()
    if backend.is_available() and backend.is_enabled():
        return None
    import triton

    if importlib.util.find_spec("tilelang") is None:
        advice = "pip install 'megatron-wrap[linear-attention]', which has tilelang"
    elif not backend.is_available():
        advice = "tilelang is installed, but not nvcc, which compiles its kernels: set CUDA_HOME to a CUDA toolkit"
    else:
        advice = "tilelang is installed, but FLA_TILELANG switches it off: unset it"
    return (
        f"flash-linear-attention refuses its backward pass with Triton {triton.__version__} on Hopper GPUs, where it "
        f"would compute wrong gradients; {advice}, or install a torch with Triton 3.7.1 or newer"
    )


@functools.cache
def _fla_trains() -> bool:
    """Whether the package's rule has a backward pass here; if not, the first call warns."""
    reason = why_fla_cannot_train()
    if reason is not None:
        logger.warning_rank_0(
            f"linear attention is trained with the gated delta rule in torch, which is slower: {reason}"
        )
    return reason is None


def convolved_heads(
    rows: Tensor, weight: Tensor, widths: tuple[int, ...], packed: PackedRow | None
) -> tuple[Tensor, ...]:
    """The columns of each head in parts, the first three after the convolution.

    Args:
        rows: [s, b, heads, W], W the sum of the widths.
        weight: [heads * (sum of the first three widths), K], as in `causal_convolution`.
        packed: the sequences of a row, with b = 1; None: each row is one sequence.

    Returns:
        [b, s, heads, width] for each width.
    """
    if can_convolve(rows):
        from megatron_wrap.nn.kernels import short_convolution

        return short_convolution.convolved_heads(rows, weight, widths, None if packed is None else _starts(packed))
    inputs, others = rows.transpose(0, 1).split((sum(widths[:3]), sum(widths[3:])), dim=-1)
    lengths = None if packed is None else packed.lengths
    convolved = causal_convolution(inputs.flatten(2), weight, lengths=lengths).unflatten(-1, (rows.shape[2], -1))
    return (*convolved.split(widths[:3], dim=-1), *others.split(widths[3:], dim=-1))


def recur(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    packed: PackedRow | None,
    state: Tensor | None,
    keeps_state: bool,
    trains: bool,
) -> tuple[Tensor, Tensor | None]:
    """`gated_delta_rule`, by the package's kernel where it can be used. Without `keeps_state` the returned state may be
    None.

    Args:
        trains: whether a backward pass follows, either directly or after a second forward pass (recomputation).
    """
    if not uses_fla(value) or (trains and not _fla_trains()):
        lengths = None if packed is None else packed.lengths
        return gated_delta_rule(query, key, value, log_decay, beta, lengths=lengths, state=state)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    output: tuple[Tensor, Tensor | None] = chunk_gated_delta_rule(
        *(tensor.contiguous() for tensor in (query, key, value, log_decay, beta)),
        initial_state=state,
        output_final_state=keeps_state,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=_borders(packed),
    )
    return output


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * silu(gate) over the last dimension, in fp32; in the dtype of x."""
    if uses_fla(x):
        from fla.modules.norm.fused_norm_gate import rms_norm_gated

        output: Tensor = rms_norm_gated(x.contiguous(), gate.contiguous(), weight, None, activation="swish", eps=eps)
        return output
    precision = torch.promote_types(x.dtype, torch.float32)
    normalized = F.rms_norm(x.to(precision), weight.shape, weight.to(precision), eps)
    return (normalized * F.silu(gate.to(precision))).to(x.dtype)


def _starts(packed: PackedRow) -> Tensor:
    """Position of the first token of each token's sequence, int32 [tokens]."""
    borders = packed.cu_seqlens_q
    return torch.repeat_interleave(borders[:-1], borders.diff(), output_size=sum(packed.lengths)).int()


def _borders(packed: PackedRow | None) -> Tensor | None:
    return None if packed is None else packed.cu_seqlens_q.long()


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
