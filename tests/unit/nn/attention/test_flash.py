"""Kernels with a logsumexp: their arithmetic against torch's softmax in float64, what those of GPUs accept on torch's
meta device, and the merge of parts of the keys."""

import pytest
import torch
from torch import Tensor

from megatron_wrap.nn.attention.flash import (
    CpuKernel,
    CudnnKernel,
    FlashKernel,
    GpuKernel,
    PaddedValues,
    SequenceBySequence,
    StoredScores,
    flash_attention,
    merge_,
)

SCALE, CLOSE = 0.4, {"rtol": 1e-10, "atol": 1e-12}


def tensors(s_q: int = 12, s_k: int = 12, value_width: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(s_q)
    shapes = [(2, s_q, 6, 8), (2, s_k, 2, 8), (2, s_k, 2, value_width)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


def by_softmax(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    key, value = (tensor.repeat_interleave(3, dim=2) for tensor in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * SCALE
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bhqk,bkhe->bqhe", scores.softmax(-1), value)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", [CpuKernel, StoredScores])
@pytest.mark.parametrize("value_width", [8, 5])
def test_values_and_gradients_are_those_of_a_softmax(kind, causal, value_width):
    inputs = tensors(s_k=12 if causal else 18, value_width=value_width)
    kernel: FlashKernel = kind(SCALE, causal)
    kernel = kernel if value_width == 8 else PaddedValues(kernel)
    ours, expected = flash_attention(*inputs, None, kernel), by_softmax(*inputs, causal)
    torch.testing.assert_close(ours, expected, **CLOSE)
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9), dtype=ours.dtype)
    pairs = (torch.autograd.grad((output * weight).sum(), inputs) for output in (ours, expected))
    for mine, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


def test_attention_to_parts_of_the_keys_is_merged():
    query, key, value = (tensor.detach() for tensor in tensors(s_k=18))
    kernel = StoredScores(SCALE, is_causal=False)
    output, total = kernel.forward(query, key[:, :5], value[:, :5])
    merge_(output, total, *kernel.forward(query, key[:, 5:], value[:, 5:]))
    torch.testing.assert_close(output, by_softmax(query, key, value, causal=False), **CLOSE)
    torch.testing.assert_close(total, kernel.forward(query, key, value)[1], **CLOSE)


def test_concatenated_sequences_attend_within_themselves_and_none_to_keys_without_queries():
    query, key, value = (tensor.detach()[0].requires_grad_() for tensor in tensors(s_k=18))
    ours = flash_attention(query, key, value, None, SequenceBySequence(CpuKernel(SCALE, False), (5, 0, 7), (6, 3, 9)))
    parts = ((slice(0, 5), slice(0, 6)), (slice(5, 12), slice(9, 18)))
    expected = [by_softmax(query[None, q], key[None, k], value[None, k], False)[0] for q, k in parts]
    torch.testing.assert_close(ours, torch.cat(expected), **CLOSE)
    pairs = (torch.autograd.grad((out**2).sum(), (query, key, value)) for out in (ours, torch.cat(expected)))
    for mine, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


def test_flash_attention_of_gpus_accepts_concatenated_sequences():
    query, key = (torch.empty(96, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (6, 2))
    ends = torch.empty(5, dtype=torch.int32, device="meta")
    kernel = GpuKernel((ends, ends, 64, 32), SCALE, is_causal=False)
    output, total = kernel.forward(query, key, key)
    assert (output.shape, total.shape, total.dtype) == (query.shape, (6, 96), torch.float32)
    gradients = kernel.backward(torch.empty_like(output), query, key, key, output, total)
    assert [each.shape for each in gradients] == [query.shape, key.shape, key.shape]


@pytest.mark.parametrize(
    "kernel", [GpuKernel((None, None, 64, 128), SCALE, is_causal=False), CudnnKernel(SCALE, False)]
)
def test_kernels_of_gpus_accept_their_arguments(kernel):
    """On the meta device, which checks arguments and computes shapes."""
    query, key = (torch.empty(2, s, heads, 64, dtype=torch.bfloat16, device="meta") for s, heads in ((64, 6), (128, 2)))
    output, total = kernel.forward(query, key, key)
    assert (output.shape, total.shape, total.dtype) == (query.shape, (2, 6, 64), torch.float32)
    gradients = kernel.backward(torch.empty_like(output), query, key, key, output, total)
    assert [each.shape for each in gradients] == [query.shape, key.shape, key.shape]
