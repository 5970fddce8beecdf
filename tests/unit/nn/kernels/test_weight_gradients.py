"""The lookup of embeddings against torch's, with a sum by torch instead of the kernel."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_wrap.nn.kernels.weight_gradients import lookup
from megatron_wrap.platform.megatron_core.first_gradients import _STALE

IDS = torch.tensor([[4, 0, 4, 4], [2, 0, 6, 4]])


def add(ids: Tensor, grad: Tensor, total: Tensor) -> None:
    total.index_add_(0, ids.flatten(), grad.flatten(0, 1).to(total.dtype))


def weight_with_buffer(dtype: torch.dtype = torch.float32, **marks: Any) -> Any:
    weight: Any = torch.nn.Parameter(torch.randn(7, 3).to(dtype))
    weight.main_grad = torch.randn(7, 3)
    for name, value in {"grad_added_to_main_grad": False, **marks}.items():
        setattr(weight, name, value)
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_added_to_the_buffer(dtype: torch.dtype) -> None:
    """Autograd returns memory without values, so that the hook of the buffer is called."""
    weight = weight_with_buffer(dtype)
    before, wide = weight.main_grad.clone(), weight.detach().double().requires_grad_()
    factors = torch.randn(2, 4, 3).to(dtype)
    for _ in range(2):
        rows = lookup(IDS, weight, add)
        assert torch.equal(rows, weight[IDS])
        rows.backward(factors)
        F.embedding(IDS, wide).backward(factors.double())
    assert weight.grad_added_to_main_grad
    assert weight.grad.shape == weight.shape
    torch.testing.assert_close(weight.main_grad.double(), before.double() + wide.grad, rtol=1e-6, atol=1e-6)


def test_the_gradient_replaces_that_of_the_step_before() -> None:
    weight = weight_with_buffer()
    setattr(weight.main_grad, _STALE, True)
    lookup(IDS, weight, add).sum().backward()
    assert torch.equal(weight.main_grad, torch.bincount(IDS.flatten(), minlength=7)[:, None].expand(7, 3).float())


@pytest.mark.parametrize("case", ["no buffer", "half precision", "not contiguous", "no mark", "tied"])
def test_torch_returns_the_gradient_of_a_weight_without_such_a_buffer(case: str) -> None:
    weight = weight_with_buffer(zero_out_wgrad=case == "tied")
    if case == "no buffer":
        del weight.main_grad
    elif case == "half precision":
        weight.main_grad = weight.main_grad.bfloat16()
    elif case == "not contiguous":
        weight.main_grad = torch.zeros(3, 7).t()
    elif case == "no mark":
        del weight.grad_added_to_main_grad
    factors, expected = torch.randn(2, 4, 3), weight.detach().clone().requires_grad_()
    lookup(IDS, weight, lambda *_: pytest.fail("added")).backward(factors)
    F.embedding(IDS, expected).backward(factors)
    assert torch.equal(weight.grad, expected.grad)
    assert not getattr(weight, "grad_added_to_main_grad", False)


@pytest.mark.parametrize("case", ["frozen", "no_grad"])
def test_without_a_gradient_it_is_torch_s(case: str) -> None:
    weight = weight_with_buffer()
    weight.requires_grad_(case != "frozen")
    with torch.set_grad_enabled(case != "no_grad"):
        rows = lookup(IDS, weight, lambda *_: pytest.fail("added"))
    assert torch.equal(rows, weight[IDS])
    assert not rows.requires_grad
