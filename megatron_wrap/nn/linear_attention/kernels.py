"""The rule, the convolution and the norm by the kernels of the package flash-linear-attention, where it is installed
and the tensors are on a GPU, else in torch."""

from __future__ import annotations

import functools
import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_wrap.nn.linear_attention.convolution import causal_convolution
from megatron_wrap.nn.linear_attention.gated_delta_rule import gated_delta_rule
from megatron_wrap.nn.linear_attention.rows import PackedRow


@functools.cache
def has_fla() -> bool:
    """Whether flash-linear-attention, or its part fla-core, is installed."""
    return importlib.util.find_spec("fla") is not None and importlib.util.find_spec("triton") is not None


def uses_fla(tensor: Tensor) -> bool:
    """Whether its kernels compute this tensor: they are for 16-bit dtypes on a GPU."""
    return tensor.is_cuda and tensor.dtype in (torch.float16, torch.bfloat16) and has_fla()


def convolve(inputs: Tensor, weight: Tensor, packed: PackedRow | None, before: Tensor | None) -> Tensor:
    """As `causal_convolution`; `packed` has the sequences of a row, with b = 1."""
    if before is not None or not uses_fla(inputs):
        return causal_convolution(inputs, weight, lengths=None if packed is None else packed.lengths, before=before)
    from fla.modules.causal_conv1d import causal_conv1d

    output: Tensor
    output, _ = causal_conv1d(inputs.contiguous(), weight, activation="silu", cu_seqlens=_borders(packed))
    return output


def recur(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    packed: PackedRow | None,
    state: Tensor | None,
    keeps_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """As `gated_delta_rule`; without `keeps_state` the state that follows may be None."""
    if not uses_fla(value):
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


def _borders(packed: PackedRow | None) -> Tensor | None:
    return None if packed is None else packed.cu_seqlens_q.long()
