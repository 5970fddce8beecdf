"""The grouped products of experts against float64 loops."""

import pytest
import torch
from torch import Tensor

from megatron_wrap.nn.experts.matmuls import DeferredGradient, grouped_linear

COUNTS = {
    "uneven": [5, 0, 7, 1],
    "empty first and last": [0, 3, 4, 0],
    "one expert has all": [0, 0, 9, 0],
    "one row": [0, 1, 0, 0],
    "no row": [0, 0, 0, 0],
}


def drawn(counts: list[int], outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, weights and the gradient of the outputs in `dtype`; ends."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(sum(counts), inputs, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(len(counts), outputs, inputs, generator=generator).to(dtype).requires_grad_()
    outer = torch.randn(sum(counts), outputs, generator=generator).to(dtype)
    return rows, weight, outer, torch.tensor(counts).cumsum(0).int()


def exact(rows: Tensor, weight: Tensor, outer: Tensor, counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and the gradients of rows and weights by a loop over experts in float64."""
    rows, weight = (tensor.detach().double().requires_grad_() for tensor in (rows, weight))
    parts = zip(rows.split(counts), weight, strict=True)
    outputs = torch.cat([of_rows @ of_weight.t() for of_rows, of_weight in parts])
    of_rows, of_weight = torch.autograd.grad(outputs, (rows, weight), outer.double())
    return outputs, of_rows, of_weight


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 24), (13, 7)], ids=["aligned", "odd widths"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
def test_outputs_and_gradients(counts, outputs, inputs, dtype, bound):
    rows, weight, outer, ends = drawn(counts, outputs, inputs, dtype)
    actual = grouped_linear(rows, weight, ends)
    of_rows, of_weight = torch.autograd.grad(actual, (rows, weight), outer)
    for value, expected in zip((actual, of_rows, of_weight), exact(rows, weight, outer, counts), strict=True):
        assert value.dtype == dtype
        assert torch.allclose(value.double(), expected, rtol=bound, atol=bound * 4)


def test_gradients_are_added_to_the_buffer_in_fp32():
    counts = COUNTS["uneven"]
    rows, weight, outer, ends = drawn(counts, 16, 24, torch.float32)
    weight.main_grad = torch.randn(4, 16, 24)
    weight.grad_added_to_main_grad = False
    before = weight.main_grad.clone()
    grouped_linear(rows, weight, ends, accumulate=True).backward(outer)
    _, _, of_weight = exact(rows, weight, outer, counts)
    assert weight.grad_added_to_main_grad
    assert torch.allclose(weight.main_grad.double(), before.double() + of_weight, rtol=1e-6, atol=4e-6)


def test_frozen_weights_cost_no_gradient():
    rows, weight, outer, ends = drawn(COUNTS["uneven"], 16, 24, torch.float32)
    weight.requires_grad_(False)
    grouped_linear(rows, weight, ends).backward(outer)
    assert weight.grad is None
    assert rows.grad is not None


def test_a_deferred_gradient_is_computed_when_it_is_asked_for():
    counts = COUNTS["uneven"]
    rows, weight, outer, ends = drawn(counts, 16, 24, torch.float32)
    deferred = DeferredGradient(weight)
    assert deferred.compute() is None
    grouped_linear(rows, weight, ends, deferred=deferred).backward(outer)
    _, of_rows, of_weight = exact(rows, weight, outer, counts)
    assert weight.grad is None
    assert torch.allclose(rows.grad.double(), of_rows, rtol=1e-6, atol=4e-6)
    assert torch.allclose(deferred.compute().double(), of_weight, rtol=1e-6, atol=4e-6)
    assert deferred.compute() is None  # nothing is kept
