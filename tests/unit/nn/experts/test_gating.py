"""The router's linear layer in bf16 parts against the product in float64."""

import torch

from megatron_wrap.nn.experts.gating import gate


def test_logits_and_gradients_are_those_of_fp32():
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(6, 5, 32, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(12, 32, generator=generator).bfloat16().requires_grad_()
    outer = torch.randn(6, 5, 12, generator=generator) * torch.logspace(-6, 3, 12)
    logits = gate(hidden, weight)
    assert logits.dtype == torch.float32
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = exact[0] @ exact[1].t()
    torch.testing.assert_close(logits.double(), expected, rtol=1e-6, atol=1e-6)
    actual = torch.autograd.grad(logits, (hidden, weight), outer)
    of_exact = torch.autograd.grad(expected, exact, outer.double())
    assert torch.equal(actual[1], of_exact[1].bfloat16())
    torch.testing.assert_close(actual[0].double(), of_exact[0], rtol=2**-8, atol=0.0)
