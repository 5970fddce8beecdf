"""Choices of a call of torch's attention, by shape, dtype and device; the table in `__init__.py` lists all of them.

cuDNN or flash attention 2, measured on one H200 with torch 2.11 (docs/performance.md): cuDNN is faster, but builds a
plan for each new shape; flash attention needs none. So cuDNN is used for lengths that are multiples of 512, of which a
run has few, and flash attention for the lengths of batches that are padded to their longest sequence. The rule depends
only on the shape, so that a resumed run uses the same kernels.

Values may have smaller heads than queries and keys (latent attention: 128 and 192). torch's flash attention does not
support this; its memory-efficient kernel does, but is several times slower. cuDNN supports 192 and 128. Where it cannot
be used, the values are padded.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_wrap.nn.attention.flash import (
    CpuKernel,
    CudnnKernel,
    FlashKernel,
    GpuKernel,
    PaddedValues,
    SequenceBySequence,
    StoredScores,
    flash_attention_with_sinks,
    has_flash_kernel,
)
from megatron_wrap.utils.dist_logger import logger

if TYPE_CHECKING:
    from megatron_wrap.nn.attention.packed_sequences import Boundaries


CUDNN_LENGTH_DIVISOR = 512
_CUDNN_CAPABILITY = (9, 0)
_CUDNN_MAX_HEAD_SIZE = 256
_CUDNN_LATENT_HEAD_SIZES = (192, 128)
"""Unequal head sizes (keys, values) whose backward pass cuDNN supports on Hopper and Blackwell; others have had
errors."""
_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def context_exchange(
    query: Tensor,
    cp_size: int,
    cp_comm_type: str | None,
    window: tuple[int, int] | None,
    dropout: float,
    softcap: float | None,
) -> str | None:
    """What context-parallel ranks exchange for attention: heads ("a2a"), keys and values around a ring ("p2p"), or all
    keys and values ("all_gather"), which every attention supports; None: a rank has whole sequences.

    Args:
        query: [s_local, b, heads, d].
        cp_comm_type: exchange that the configuration has chosen (`plan/context_exchange.py`).
    """
    if cp_size == 1:
        return None
    if cp_comm_type != "p2p":
        return "a2a" if cp_comm_type == "a2a" else "all_gather"
    obstacle = ring_obstacle(query, window=window, dropout=dropout, softcap=softcap)
    if obstacle is None:
        return "p2p"
    _log_gathering(obstacle)
    return "all_gather"


def ring_obstacle(
    query: Tensor, *, window: tuple[int, int] | None, dropout: float, softcap: float | None
) -> str | None:
    """Why a layer gathers keys and values although `cp_comm_type` is p2p; None: the ring can compute its attention."""
    if window is not None:
        return "a sliding window, of which a rank needs few keys"
    if softcap is not None:
        return "capped scores, which no kernel with a logsumexp computes"
    if dropout:
        return "dropout of attention weights"
    half_precision = query.dtype in (torch.float16, torch.bfloat16)
    if query.is_cuda and half_precision and not has_flash_kernel(query, query):
        return f"a head size of {query.shape[-1]}, which flash attention does not support on this GPU"
    return None


def packed_kernel(
    query: Tensor, sinks: Tensor | None, *, causal: bool, dropout: float, softcap: float | None
) -> Callable[..., Tensor] | None:
    """The kernel that computes all sequences of a packed row at once, for `attend_packed`; None: there is none, and
    attention is computed one sequence at a time.

    Args:
        query: [t_local, 1, heads, d].
    """
    kernel = varlen_kernel()
    if kernel is None or not _has_half_precision_on_gpu(query) or dropout > 0.0 or not causal or softcap is not None:
        return None
    if sinks is None:
        return kernel
    if not has_flash_kernel(query, query):  # attend_packed pads the values' heads to the queries' size
        return None
    return functools.partial(flash_attention_with_sinks, sinks=sinks)


@functools.cache
def varlen_kernel() -> Callable[..., Tensor] | None:
    """torch's flash attention for packed sequences with the arguments of `varlen_attn`; None if this torch lacks it."""
    try:
        kernel = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    known = set(inspect.signature(kernel).parameters)
    if not {"scale", "window_size"} <= known:
        return None

    def call(query: Tensor, key: Tensor, value: Tensor, *lengths: Any, **named: Any) -> Tensor:
        if query.shape[1] != key.shape[1]:
            if "enable_gqa" in known:
                named["enable_gqa"] = True
            else:  # older torch: the same kernel, but the copies cost memory
                key, value = (
                    tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value)
                )
        return kernel(query, key, value, *lengths, **named)

    return call


def prefers_cudnn(
    capability: tuple[int, int],
    dtype: torch.dtype,
    query_length: int,
    key_length: int,
    head_sizes: tuple[int, int],
    dropout: float,
    aligned: bool = True,
) -> bool:
    """Whether cuDNN's kernel is the fastest for causal or full attention without an explicit mask.

    Args:
        capability: compute capability of the GPU, such as (9, 0).
        head_sizes: head sizes of keys and values.
        aligned: whether the attention may be causal, so that the lengths must be equal.
    """
    return (
        capability >= _CUDNN_CAPABILITY
        and dtype in (torch.float16, torch.bfloat16)
        and (query_length == key_length or not aligned)
        and query_length % CUDNN_LENGTH_DIVISOR == key_length % CUDNN_LENGTH_DIVISOR == 0
        and (head_sizes[0] == head_sizes[1] <= _CUDNN_MAX_HEAD_SIZE or head_sizes == _CUDNN_LATENT_HEAD_SIZES)
        and head_sizes[0] % 8 == 0
        and dropout == 0.0
    )


def attention_backend(
    query: Tensor, key: Tensor, value: Tensor, dropout: float
) -> contextlib.AbstractContextManager[None]:
    """Selects the kernel of `scaled_dot_product_attention` for tensors [b, heads, s, d] without an explicit mask."""
    if not query.is_cuda:
        return contextlib.nullcontext()
    sizes = (key.shape[-1], value.shape[-1])
    lengths = (query.shape[2], key.shape[2])
    capability = torch.cuda.get_device_capability(query.device)
    if not prefers_cudnn(capability, query.dtype, *lengths, sizes, dropout):
        return contextlib.nullcontext()
    _log_once(lengths[0], sizes[0])
    return sdpa_kernel(_FIRST, set_priority=True)


def needs_padded_values(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, dropout: float, is_causal: bool
) -> bool:
    """Whether `scaled_dot_product_attention` is faster with values padded to the head size of the queries: flash
    attention or cuDNN supports them with padding, and neither does without. Call it within `attention_backend`.

    Args:
        query: [b, heads, s_q, d]; key: [b, groups, s_k, d]; value: [b, groups, s_k, d_v].
        attn_mask: None, a tensor, for which there is no faster kernel, or a `CausalBias`, which torch computes by flash
            attention and otherwise by the memory-efficient kernel.
    """
    if not _has_half_precision_on_gpu(query) or value.shape[-1] >= query.shape[-1] or type(attn_mask) is Tensor:
        return False
    if query.shape[2] == 1:  # takes as long as to read the cached keys and values, which a copy would more than double
        return False
    has_groups = query.shape[1] != key.shape[1]
    if attn_mask is None:
        chosen = torch._fused_sdp_choice(query, key, value, None, dropout, is_causal, enable_gqa=has_groups)
        if chosen == SDPBackend.CUDNN_ATTENTION.value:
            return False
    padded_like_keys = SDPAParams(query, key, key, None, dropout, is_causal, has_groups)
    return can_use_flash_attention(padded_like_keys)


def kernel_with_logsumexp(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> FlashKernel:
    """The fastest kernel that returns the logsumexp, for tensors [b, s, heads, d] without dropout; causal attention has
    as many keys as queries. On a GPU, half precision requires `has_flash_kernel` for the head size of the queries."""
    if query.shape[-1] != value.shape[-1]:
        return PaddedValues(kernel_with_logsumexp(query, key, key, scale, causal))
    if not _has_half_precision_on_gpu(query):
        return StoredScores(scale, causal) if query.is_cuda else CpuKernel(scale, causal)
    lengths, sizes = (query.shape[1], key.shape[1]), (key.shape[-1], value.shape[-1])
    capability = torch.cuda.get_device_capability(query.device)
    if prefers_cudnn(capability, query.dtype, *lengths, sizes, dropout=0.0, aligned=causal):
        return CudnnKernel(scale, causal)
    return GpuKernel((None, None, *lengths), scale, is_causal=causal)


def packed_kernel_with_logsumexp(
    query: Tensor, key: Tensor, value: Tensor, boundaries: Boundaries, scale: float, causal: bool
) -> FlashKernel:
    """The kernel of `kernel_with_logsumexp` for concatenated sequences [t, heads, d]; causal attention has as many keys
    as queries in each."""
    if query.shape[-1] != value.shape[-1]:
        return PaddedValues(packed_kernel_with_logsumexp(query, key, key, boundaries, scale, causal))
    queries, keys = boundaries.queries, boundaries.keys
    if not _has_half_precision_on_gpu(query):
        return SequenceBySequence(
            StoredScores(scale, causal) if query.is_cuda else CpuKernel(scale, causal), queries, keys
        )
    cumulative = boundaries.cu_seqlens_q, boundaries.cu_seqlens_k
    return GpuKernel((*cumulative, max(queries), max(keys)), scale, is_causal=causal)


def _has_half_precision_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype in (torch.float16, torch.bfloat16)


@functools.cache
def _log_gathering(obstacle: str) -> None:
    logger.info_rank_0(f"cp_comm_type p2p: attention gathers keys and values where there is {obstacle}")


@functools.cache
def _log_once(length: int, head_size: int) -> None:
    logger.info_rank_0(f"attention over {length:,} tokens, head size {head_size}: cuDNN, the fastest measured here")
