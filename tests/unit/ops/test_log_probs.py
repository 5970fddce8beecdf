"""Vocabulary-parallel log-probabilities against torch's full-vocabulary computation."""

from types import SimpleNamespace

import pytest
import torch

from megatron_wrap.ops import log_probs
from megatron_wrap.ops.log_probs import token_log_probs, vocabulary_max

ONE_RANK = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
"""A group of one, which needs no torch.distributed."""


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("chunk_bytes", [1, 2**20])
def test_values_and_gradients_equal_log_softmax(dtype, tolerance, chunk_bytes, monkeypatch):
    monkeypatch.setattr(log_probs, "CHUNK_BYTES", chunk_bytes)
    torch.manual_seed(0)
    logits = (torch.randn(2, 5, 37) * 3).to(dtype).requires_grad_()
    ids = torch.randint(0, 37, (2, 5))
    weights = torch.randn(2, 5, dtype=torch.float64)
    actual = token_log_probs(logits, ids, ONE_RANK)
    (actual.double() * weights).sum().backward()

    wide = logits.detach().double().requires_grad_()
    expected = wide.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
    (expected * weights).sum().backward()
    assert actual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=tolerance, atol=tolerance)


def test_vocabulary_max_equals_torch_max():
    logits = torch.randn(2, 3, 11, requires_grad=True)
    actual = vocabulary_max(logits, ONE_RANK)
    (actual**2).sum().backward()
    other = logits.detach().clone().requires_grad_()
    expected = other.max(dim=-1).values
    (expected**2).sum().backward()
    assert torch.equal(actual, expected)
    assert torch.equal(logits.grad, other.grad)
