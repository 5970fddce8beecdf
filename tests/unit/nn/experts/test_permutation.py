"""The order of rows against Megatron-Core's permutation of tokens."""

import pytest
import torch

from megatron_wrap.nn.experts.permutation import row_order, rows_of_tokens, sums_of_rows
from megatron_wrap.platform import choose_platform

choose_platform("cpu").install()

from megatron.core.transformer.moe.moe_utils import permute, unpermute  # noqa: E402

TOKENS, EXPERTS, COUNT, COLUMNS = 37, 6, 3, 8


def routing(kind: str) -> torch.Tensor:
    """bool [tokens, experts] with `COUNT` experts for each token."""
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    if kind == "same experts":
        scores[:, :COUNT] += 1.0  # the other experts have no row
    chosen = scores.topk(COUNT).indices[: 1 if kind == "one token" else None]
    return torch.zeros(len(chosen), EXPERTS, dtype=torch.bool).scatter(1, chosen, True)


@pytest.mark.parametrize("kind", ["drawn", "same experts", "one token"])
def test_rows_and_gradients_equal_megatron_core_s(kind):
    routing_map = routing(kind)
    tokens = torch.randn(len(routing_map), COLUMNS, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(routing_map.shape, dtype=torch.float64, requires_grad=True)
    factor = torch.randn(len(routing_map) * COUNT, COLUMNS, dtype=torch.float64)
    outer = torch.randn(len(routing_map), COLUMNS, dtype=torch.float64)

    order = row_order(routing_map, EXPERTS, COUNT)
    rows, weights = rows_of_tokens(tokens, probs, order, len(routing_map) * COUNT)
    sums = sums_of_rows(rows * factor * weights[:, None], order)
    gradients = torch.autograd.grad(sums, (tokens, probs), outer)

    their_rows, their_weights, indices = permute(tokens, routing_map, probs=probs, num_out_tokens=len(rows))[:3]
    products = their_rows * factor * their_weights[:, None]
    their_sums = unpermute(products, indices, restore_shape=tokens.shape, routing_map=routing_map)
    their_gradients = torch.autograd.grad(their_sums, (tokens, probs), outer)
    assert torch.equal(rows, their_rows)
    assert torch.equal(weights, their_weights)
    assert torch.allclose(sums, their_sums, rtol=1e-12)
    for value, expected in zip(gradients, their_gradients, strict=True):
        assert torch.allclose(value, expected, rtol=1e-12, atol=1e-12)


def test_tokens_with_different_numbers_of_rows():
    generator = torch.Generator().manual_seed(6)
    mask = torch.rand(TOKENS, EXPERTS, generator=generator) < 0.3
    mask[0] = False  # no row
    width, total = int(mask.sum(1).max()), int(mask.sum())
    order = row_order(mask, EXPERTS, width)
    assert order.ends.tolist() == mask.sum(0).cumsum(0).tolist()
    tokens = torch.randn(TOKENS, COLUMNS, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(mask.shape, dtype=torch.float64, requires_grad=True)
    outer = torch.randn(TOKENS, COLUMNS, dtype=torch.float64)
    rows, of_rows = rows_of_tokens(tokens, weights, order, total)
    sums = sums_of_rows(rows * of_rows[:, None], order)
    expected = tokens * (weights * mask).sum(1, keepdim=True)
    assert torch.allclose(sums, expected, rtol=1e-12)
    pairs = zip(
        torch.autograd.grad(sums, (tokens, weights), outer),
        torch.autograd.grad(expected, (tokens, weights), outer),
        strict=True,
    )
    for value, other in pairs:
        assert torch.allclose(value, other, rtol=1e-12, atol=1e-12)


def test_tokens_are_sent_once_to_the_processes_of_their_experts():
    processes, local = 3, EXPERTS // 3
    routing_map = routing("drawn")
    routing_map[0] = False
    tokens = torch.randn(TOKENS, COLUMNS, dtype=torch.float64)
    weights = torch.rand(TOKENS, EXPERTS, dtype=torch.float64, requires_grad=True)
    order = row_order(routing_map, processes, processes)
    parts = routing_map.chunk(processes, dim=1)
    sent = [part.any(dim=1) for part in parts]
    counts = [int(each.sum()) for each in sent]
    assert order.totals[1:].tolist() == [counts, [int(part.sum()) for part in parts]]
    rows, of_rows = rows_of_tokens(tokens, weights, order, sum(counts), routing_map)
    (gradient,) = torch.autograd.grad(of_rows, weights, torch.ones(sum(counts), local, dtype=torch.float64))
    assert torch.equal(gradient, routing_map.double())
    assert torch.equal(rows, torch.cat([tokens[each] for each in sent]))
    marked = weights.masked_fill(~routing_map, -1.0).chunk(processes, dim=1)
    assert torch.equal(of_rows, torch.cat([part[each] for part, each in zip(marked, sent, strict=True)]))
    of_weights = torch.tensor([[0.0, -1.0], [-1.0, torch.nan]])
    assert row_order(of_weights, 2, 1).rows.tolist() == [[0], [1]]  # one that is not a number is that of a row
