"""Choice of torch's attention kernel on a GPU, by a measured rule.

Measured on one H200 with torch 2.11 (docs/performance.md): forward and backward of causal attention take 1.2 to 1.9
times as long with flash attention 2 as with cuDNN, for 512 to 32,768 tokens and head sizes 64, 128 and 256. cuDNN
builds a plan for each new shape, which takes 140 ms; flash attention needs none. So cuDNN is used for lengths that are
multiples of 512, of which a run has few, and flash attention for the lengths of batches that are padded to their
longest sequence. The rule depends only on the shape, so that a resumed run uses the same kernels.

Values may have smaller heads than queries and keys (latent attention: 128 and 192). torch's flash attention does not
support this; its memory-efficient kernel does, but is several times slower. cuDNN supports 192 and 128. Where it cannot
be used, the values are padded.
"""

from __future__ import annotations

import contextlib
import functools
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
def _log_once(length: int, head_size: int) -> None:
    logger.info_rank_0(f"attention over {length:,} tokens, head size {head_size}: cuDNN, the fastest measured here")
