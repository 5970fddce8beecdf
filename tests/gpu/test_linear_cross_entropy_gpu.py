"""Linear cross-entropy on a GPU: values and gradients no further from float64 than with stored logits, and its memory;
skipped without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from megatron_wrap import ops
from megatron_wrap.nn.kernels.weight_gradients import WeightGradients
from megatron_wrap.ops import token_chunks
from megatron_wrap.ops.deferred_logits import (
    OutputProjection,
    chunk_bytes,
    deferred_logits,
    whole_logits,
    with_loss_factor,
)


class OneRank:
    size, rank = staticmethod(lambda: 1), staticmethod(lambda: 0)


ONE_RANK: Any = OneRank()


def gradients(kind: str, hidden: torch.Tensor, weight: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Of the hidden states, in the gradient buffer of the weight, and the log-probabilities; the loss is their sum."""
    weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    projection = OutputProjection(weight, weight.shape[0], WeightGradients.add)
    logits: torch.Tensor = deferred_logits(hidden, projection)
    if kind == "known":
        logits = with_loss_factor(logits, 1.0)
    elif kind == "stored":
        logits = whole_logits(logits)
    result = ops.token_log_probs(logits, ids, ONE_RANK, loss_gradient=torch.ones(ids.shape, device="cuda"))
    (of_hidden,) = torch.autograd.grad(result.sum(), [hidden])
    return [of_hidden, weight.main_grad, result.detach()]


@pytest.mark.parametrize("kind", ["known", "recomputed"])
def test_gradients_are_as_exact_as_with_stored_logits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_chunks, "MIN_CHUNK_TOKENS", 96)
    monkeypatch.setattr(token_chunks, "chunk_bytes", lambda device: 1)
    torch.manual_seed(0)
    hidden = torch.randn(2, 200, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(5003, 64, device="cuda", dtype=torch.bfloat16) / 8)
    ids = torch.randint(5003, (2, 200), device="cuda")
    wide = [hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    expected = torch.nn.functional.linear(*wide).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
    exact = [*torch.autograd.grad(expected.sum(), wide), expected.detach()]
    stored, deferred = gradients("stored", hidden, weight, ids), gradients(kind, hidden, weight, ids)
    for of_stored, of_deferred, wanted in zip(stored, deferred, exact, strict=True):
        assert (of_deferred - wanted).norm() <= 1.05 * (of_stored - wanted).norm() + 1e-6 * wanted.norm()


def test_memory_does_not_contain_the_logits() -> None:
    """16,384 tokens: their logits are 4.2 GB in bf16, and their gradient as much."""
    hidden = torch.randn(1, 16384, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(128256, 512, device="cuda", dtype=torch.bfloat16) / 32)
    ids = torch.randint(128256, (1, 16384), device="cuda")
    for kind in ("known", "recomputed"):
        gradients(kind, hidden, weight, ids)  # compiles the kernels
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gradients(kind, hidden, weight, ids)
        buffer = weight.numel() * 4
        assert torch.cuda.max_memory_allocated() - before <= buffer + 1.2 * chunk_bytes(hidden.device)
