"""Products of adapters: values and gradients are those of the plain formula, in the memory of the base's results."""

import pytest
import torch

from megatron_wrap.nn.adapters.matmuls import InputMatmul, LayerPart, OutputMatmul, assembled

ROWS, INPUTS, OUTPUTS = 5, 7, 12


def parts() -> list[LayerPart]:
    """Two modules of other ranks and scales in interleaved rows, the second one in two parts; some rows have none."""
    first = torch.tensor([0, 1, 6, 7])
    return [
        LayerPart(first, slice(0, 3), 2.0),
        LayerPart(torch.tensor([2, 3]), slice(3, 5), 0.5),
        LayerPart(torch.tensor([8]), slice(3, 5), 0.5),
    ]


def tensors(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("strided", [False, True])
def test_both_products_are_the_plain_formula(strided: bool) -> None:
    """Values and all gradients, in float64; a base whose results have gaps is added to as well."""
    shapes = [(2, ROWS, INPUTS), (OUTPUTS, INPUTS), (5, INPUTS), (4, 3), (2, 2), (1, 2)]
    inputs, weight, a, *matrices = tensors(shapes, torch.float64)
    wanted = [inputs, a, *matrices]

    def base(values: torch.Tensor) -> torch.Tensor:
        if not strided:
            return torch.nn.functional.linear(values, weight)
        return torch.stack([torch.nn.functional.linear(values, weight)] * 2, dim=-1)[..., 0]

    dense = torch.zeros(OUTPUTS, 5, dtype=torch.float64)
    for part, matrix in zip(parts(), matrices, strict=True):
        dense[part.rows[:, None], torch.arange(5)[part.columns]] = matrix * part.scale
    expected = base(inputs) + inputs @ a.t() @ dense.t()
    gradients = torch.autograd.grad(expected.sin().sum(), wanted)

    taken, product = InputMatmul.apply(inputs, a)
    actual = OutputMatmul.apply(base(taken), product, parts(), *matrices)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(torch.autograd.grad(actual.sin().sum(), wanted), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert torch.equal(assembled(parts(), matrices, OUTPUTS, 5), dense)


def test_the_sum_takes_no_memory_and_frozen_factors_no_gradient() -> None:
    inputs, output, a, b = tensors([(ROWS, INPUTS), (ROWS, OUTPUTS), (3, INPUTS), (OUTPUTS, 3)], torch.float32)
    _, product = InputMatmul.apply(inputs, a.detach())
    base = output * 1
    part = LayerPart(torch.arange(OUTPUTS), slice(0, 3), 2.0)
    added = OutputMatmul.apply(base, product, [part], b.detach())
    assert added.data_ptr() == base.data_ptr()
    added.sum().backward()
    assert a.grad is None
    assert b.grad is None
    assert torch.equal(output.grad, torch.ones_like(output))


def test_a_result_that_a_function_returns_as_it_is_can_be_added_to() -> None:
    """Megatron-Core's functions of one tensor-parallel rank return their argument, which autograd takes for a view."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    values, product, b = tensors([(ROWS, OUTPUTS), (ROWS, 3), (OUTPUTS, 3)], torch.float32)
    part = LayerPart(torch.arange(OUTPUTS), slice(0, 3), 1.0)
    OutputMatmul.apply(Same.apply(values * 2), product, [part], b).sum().backward()
    assert torch.equal(values.grad, torch.full_like(values, 2))
