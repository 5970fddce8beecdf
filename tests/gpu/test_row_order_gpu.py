"""The order and movement of rows on a GPU against those on a CPU, bit for bit but for sums."""

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from megatron_wrap.nn.experts.permutation import row_order, rows_of_tokens, sums_of_rows

COLUMNS = 1100
CASES = {
    "one process": (300, 128, 128, 8),
    "two processes": (5000, 128, 2, 2),
    "processes of 15 experts": (301, 60, 4, 4),
    "processes of one expert": (77, 8, 8, 2),
    "one expert": (9, 4, 4, 1),
    "many tokens": (40000, 256, 8, 8),
    "many tokens and experts": (9000, 256, 256, 8),
    "no token": (0, 16, 4, 2),
}
"""Name -> tokens, experts, groups, largest number of groups of a token."""


def routing(name: str) -> torch.Tensor:
    """bool [tokens, experts]; tokens have up to as many experts as groups, some none."""
    tokens, experts, _groups, width = CASES[name]
    chosen = torch.rand(tokens, experts).argsort(dim=1)[:, :width]
    mask = torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, chosen, True)
    return mask & (torch.rand(tokens, experts) < 0.9)


def moved(device: str, mask: torch.Tensor, groups: int, width: int, dtype: torch.dtype) -> tuple[list[Any], list[Any]]:
    """Values that are equal on all devices, and sums."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(len(mask), COLUMNS, generator=generator).to(device, dtype).requires_grad_()
    weights = torch.rand(mask.shape, generator=generator).to(device).requires_grad_()
    columns = COLUMNS if len(mask) < 6000 else 8
    tokens, mask = hidden[:, :columns], mask.to(device)
    order = row_order(mask, groups, width)
    total = int(order.ends[-1])
    has_one = groups == mask.shape[1]
    rows, of_rows = rows_of_tokens(tokens, weights, order, total, None if has_one else mask)
    outer = [torch.randn(each.shape, generator=generator).to(device, dtype) for each in (rows, tokens)]
    factor = torch.randn(of_rows.shape, generator=generator).to(device)
    sums = sums_of_rows(rows, order)
    of_tokens, of_weights = torch.autograd.grad((rows, of_rows), (hidden, weights), (outer[0], factor), True)
    (of_sums,) = torch.autograd.grad(sums, rows, outer[1], True)
    exact = [*order, rows.detach(), of_rows.detach(), of_weights, of_sums]
    if not has_one:  # the receiver, which has the weights alone
        exact += row_order(of_rows.detach(), of_rows.shape[1], of_rows.shape[1])
    return [value.cpu() for value in exact], [sums.detach().cpu(), of_tokens.cpu()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(CASES))
def test_rows_move_as_on_a_cpu(name, dtype):
    torch.manual_seed(5)
    mask, (groups, width) = routing(name), CASES[name][2:]
    there = moved("cuda", mask, groups, width, dtype)
    here = moved("cpu", mask, groups, width, dtype)
    for actual, expected in zip(there[0], here[0], strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    for actual, expected in zip(there[1], here[1], strict=True):
        assert torch.allclose(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


def test_a_weight_that_is_not_a_number_is_one_of_a_row():
    weights = torch.tensor([[0.0, -1.0], [-1.0, torch.nan], [-1.0, -1.0]], device="cuda")
    assert row_order(weights, 2, 1).rows.tolist() == [[0], [1], [-1]]


def test_the_order_of_rows_is_captured_in_a_graph():
    mask, (groups, width) = routing("two processes").cuda(), CASES["two processes"][2:]
    row_order(mask, groups, width)  # kernels are compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = row_order(mask, groups, width)
    mask.copy_(routing("two processes"))
    graph.replay()
    for actual, expected in zip(captured, row_order(mask, groups, width), strict=True):
        assert torch.equal(actual, expected)
