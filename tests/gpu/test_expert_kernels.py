"""The Triton kernels of experts against float64, and the movement of rows on a GPU against that on a CPU."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from megatron_wrap.nn.experts.matmuls import grouped_linear
from megatron_wrap.nn.experts.permutation import row_order, rows_of_tokens, sums_of_rows
from megatron_wrap.nn.experts.router import can_gate, gate
from megatron_wrap.nn.kernels import expert_matmuls
from megatron_wrap.nn.kernels.available import Selection
from megatron_wrap.nn.kernels.expert_matmuls import add_weight_gradients
from megatron_wrap.nn.kernels.expert_rows import spread_rows, sum_rows
from megatron_wrap.nn.kernels.router import balance, route, split
from megatron_wrap.nn.kernels.swiglu import weighted_swiglu

DTYPES = [torch.float32, torch.bfloat16]


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of the expected values."""
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "columns", "count"), [(1, 8, 1), (37, 1000, 3), (64, 2048, 8)])
def test_sums_of_rows(dtype, tokens, columns, count):
    rows = torch.randn(tokens * count, columns, device="cuda", dtype=dtype)
    indices = torch.randperm(tokens * count, device="cuda").view(tokens, count)
    assert error(sum_rows(rows, indices), rows.double()[indices].sum(1)) < (4e-3 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "columns", "count"), [(1, 8, 1), (37, 1000, 3), (64, 2048, 8)])
def test_tokens_are_copied_to_their_rows(dtype, tokens, columns, count):
    values = torch.randn(tokens, columns, device="cuda", dtype=dtype)
    indices = torch.randperm(tokens * count, device="cuda").view(tokens, count)
    indices = torch.where(indices < tokens * count - 1, indices, -1)
    rows = spread_rows(values, indices, tokens * count - 1)
    inside = indices >= 0
    assert torch.equal(rows[indices[inside]], values.repeat_interleave(count, 0).view(tokens, count, columns)[inside])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("sequences", "balances", "counts"), [(1, False, False), (1, False, True), (1, True, False), (3, True, True)]
)
@pytest.mark.parametrize(
    ("experts", "selection"),
    [
        (128, Selection(8, False, False)),
        (60, Selection(4, False, True, 2.5)),
        (256, Selection(8, True, False, 2.5, groups=8, group_topk=4, group_score_experts=2)),
        (8, Selection(1, True, False)),
    ],
)
def test_routing_equals_megatron_core_s(experts, selection, sequences, balances, counts, padded):
    from megatron.core.transformer.moe import moe_utils

    from megatron_wrap.nn.experts.expert_choice import ExpertChoice

    length, batch = 335, 3
    ours = torch.randn(length * batch, experts, device="cuda", requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    bias = 0.1 * torch.randn(experts, device="cuda") if selection.sigmoid else None
    score = "sigmoid" if selection.sigmoid else "softmax"
    groups = (selection.groups, selection.group_topk) if selection.groups > 1 else (None, None)
    choice = ExpertChoice(selection.group_score_experts if selection.groups > 1 else None)
    expected, mask = moe_utils.topk_routing_with_score_function(
        *(theirs, selection.topk, selection.softmax_first, *groups, selection.scale, score, bias), router_replay=choice
    )
    best, scores = moe_utils.compute_routing_scores_for_aux_loss(theirs, selection.topk, score)
    padding = (torch.rand(batch, length, device="cuda") < 0.3).t() if padded else None  # not contiguous
    actual = route(ours, selection, bias, padding, sequences=sequences, balances=balances, counts=counts)
    same = (actual.chosen == mask).all(dim=1)  # sigmoids that differ in the last bit change the order of equal scores
    assert same.float().mean() > 0.995
    assert torch.equal(actual.chosen.sum(dim=1), mask.sum(dim=1))
    assert error(actual.weights[same], expected[same].double()) < 1e-6

    def over_tokens(values: torch.Tensor) -> torch.Tensor:
        kept = values if padding is None else values * ~padding.reshape(-1, 1)
        return kept.view(-1, sequences, experts).sum(0)

    if counts:
        assert torch.equal(actual.chosen_counts, over_tokens(actual.chosen).float())
    outer = torch.randn_like(expected) * same[:, None]
    objectives = [(actual.weights * outer).sum(), (expected * outer).sum()]
    if balances:
        assert (actual.best_counts - over_tokens(best)).abs().sum() <= 0.005 * len(ours) * 2 * selection.topk
        assert torch.equal(actual.best_counts.sum(-1), over_tokens(best).sum(-1).float())
        assert error(actual.score_sums, over_tokens(scores).double()) < 1e-6
        factor = torch.randn(sequences, experts, device="cuda")
        objectives[0] += (actual.score_sums * factor).sum()
        objectives[1] += (over_tokens(scores) * factor).sum()
    else:
        assert actual.score_sums is actual.best_counts is None
    (of_ours,), (of_theirs,) = (
        torch.autograd.grad(each, tensor) for each, tensor in zip(objectives, (ours, theirs), strict=True)
    )
    assert error(of_ours, of_theirs.double()) < 1e-5


def test_sums_of_one_row_of_gradients_and_of_no_tokens():
    logits = torch.randn(300, 16, device="cuda", requires_grad=True)
    selection, factor = Selection(2, False, False), torch.randn(16, device="cuda")
    route(logits, selection, None, None, sequences=3, balances=True).score_sums.sum(0).dot(factor).backward()
    exact = logits.detach().double().requires_grad_()
    exact.softmax(dim=-1).sum(0).dot(factor.double()).backward()
    assert error(logits.grad, exact.grad) < 1e-5
    nothing = route(logits[:0], selection, None, None, balances=True, counts=True)
    for values in (nothing.score_sums, nothing.best_counts, nothing.chosen_counts):
        assert torch.equal(values, torch.zeros(1, 16, device="cuda"))


@pytest.mark.parametrize(("sequences", "experts", "topk"), [(1, 128, 8), (3, 60, 4), (2, 7, 1)])
def test_gradient_of_a_load_balancing_loss(sequences, experts, topk):
    from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func

    counts = torch.randint(0, 500, (sequences, experts), device="cuda").float()
    load = counts + torch.randint(0, 500, (sequences, experts), device="cuda")
    scores = (1000 * torch.rand(sequences, experts, device="cuda")).requires_grad_()
    total = torch.tensor(3.0, device="cuda")
    gradient = balance(scores.detach(), counts, load, topk, 0.5 * experts, 0.25, total)
    assigned = counts.double().sum(dim=1)
    loads = load.double() / load.double().sum(dim=1, keepdim=True) * assigned[:, None]
    exact = scores.detach().double().requires_grad_()
    losses = [
        switch_load_balancing_loss_func(row[None], of_load, number / topk, topk, experts, 0.5)
        for row, of_load, number in zip(exact, loads, assigned, strict=True)
    ]
    loss = torch.stack(losses).sum()
    loss.backward()
    assert error(total - 3.0, loss.detach()) < 1e-5
    assert error(gradient, 0.25 * exact.grad) < 1e-6
    empty = torch.zeros(sequences, experts, device="cuda")
    assert not balance(empty, empty, empty, topk, 1.0, 1.0, total).any()
    assert error(total - 3.0, loss.detach()) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "columns"), [(1, 8), (37, 1000), (129, 768)])
def test_weighted_swiglu(dtype, count, columns):
    gates = torch.randn(count, 2 * columns, device="cuda", dtype=dtype, requires_grad=True)
    weights = torch.rand(count, device="cuda", requires_grad=True)
    outer = torch.randn(count, columns, device="cuda", dtype=dtype)
    actual = weighted_swiglu(gates, weights)
    actual.backward(outer)
    exact_gates = gates.detach().double().requires_grad_()
    exact_weights = weights.detach().double().requires_grad_()
    gate, up = exact_gates.chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up * exact_weights[:, None]
    expected.backward(outer.double())
    bound = 4e-3 if dtype == torch.bfloat16 else 1e-6
    assert error(actual, expected) < bound
    assert error(gates.grad, exact_gates.grad) < bound
    assert error(weights.grad, exact_weights.grad) < 1e-5


def test_fp32_logits_of_bf16_hidden_states():
    hidden = torch.randn(1000, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(128, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert can_gate(hidden, weight, None, "fp32")
    logits = gate(hidden, weight)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = exact[0] @ exact[1].t()
    outer = torch.randn(1000, 128, device="cuda")
    assert error(logits, expected) < 1e-6
    pairs = zip(
        torch.autograd.grad(logits, (hidden, weight), outer),
        torch.autograd.grad(expected, exact, outer.double()),
        strict=True,
    )
    for actual, exact_gradient in pairs:
        assert error(actual, exact_gradient) < 4e-3


@pytest.mark.parametrize("columns", [128, 60])
def test_three_halves_add_up_to_fp32(columns):
    values = torch.randn(1000, columns, device="cuda") * torch.logspace(-6, 3, columns, device="cuda")
    parts = split(values).view(1000, 3, columns)
    assert torch.equal(parts[:, 0], values.bfloat16())
    assert torch.equal(parts.float().sum(1), values)


@pytest.mark.parametrize("loads_tiles", [True, False], ids=["descriptors", "pointers"])
@pytest.mark.parametrize("counts", [[5, 0, 700, 64, 1], [0, 0, 300, 0, 0], [0, 0]])
@pytest.mark.parametrize(("outputs", "inputs"), [(1536, 2048), (2048, 768), (104, 72), (101, 71)])
def test_weight_gradients_are_added_without_rounding(monkeypatch, loads_tiles, counts, outputs, inputs):
    if not loads_tiles:
        monkeypatch.setattr(expert_matmuls, "can_load_tiles", lambda matrix: False)
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    grad = torch.randn(sum(counts), outputs, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(sum(counts), inputs, device="cuda", dtype=torch.bfloat16)
    before = torch.randn(len(counts), outputs, inputs, device="cuda")
    total = before.clone()
    add_weight_gradients(grad, rows, ends, total)
    pairs = zip(grad.double().split(counts), rows.double().split(counts), strict=True)
    expected = before.double() + torch.stack([of_grad.t() @ of_rows for of_grad, of_rows in pairs])
    assert error(total, expected) < 1e-6
    repeated = before.clone()
    add_weight_gradients(grad, rows, ends, repeated)
    assert torch.equal(total, repeated)
    added, written = torch.zeros_like(total), torch.full_like(total, torch.nan)
    add_weight_gradients(grad, rows, ends, added)
    add_weight_gradients(grad, rows, ends, written, overwrite=True)
    assert torch.equal(written, added)


@pytest.mark.parametrize("counts", [[5, 0, 700, 64, 1], [5, 0, 70, 64, 1]], ids=["many rows", "few rows"])
@pytest.mark.parametrize(("outputs", "inputs"), [(1536, 2048), (1528, 1048), (100, 70), (101, 71)])
def test_grouped_products_against_float64(outputs, inputs, counts):
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    rows = torch.randn(sum(counts), inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(len(counts), outputs, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    outer = torch.randn(sum(counts), outputs, device="cuda", dtype=torch.bfloat16)
    actual = grouped_linear(rows, weight, ends)
    actual.backward(outer)
    exact_rows, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (rows, weight))
    parts = zip(exact_rows.split(counts), exact_weight, strict=True)
    expected = torch.cat([of_rows @ of_weight.t() for of_rows, of_weight in parts])
    expected.backward(outer.double())
    assert error(actual, expected) < 4e-3
    assert error(rows.grad, exact_rows.grad) < 4e-3
    assert error(weight.grad, exact_weight.grad) < 4e-3


def test_nothing_waits_for_the_gpu():
    tokens, experts, count, columns = 300, 16, 4, 64
    chosen = torch.rand(tokens, experts).topk(count).indices
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, chosen, True).cuda()
    probs = torch.rand(tokens, experts, device="cuda")
    values = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(experts, 2 * columns, columns, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    logits = torch.randn(tokens, experts, device="cuda", requires_grad=True)
    padding, total = torch.zeros(tokens, 1, dtype=torch.bool, device="cuda"), torch.zeros((), device="cuda")

    def run() -> None:
        routed = route(logits, Selection(count, False, False), None, padding, balances=True, counts=True)
        counts = routed.best_counts
        gradient = balance(routed.score_sums.detach(), counts, counts, count, experts, 0.1, total)
        torch.autograd.backward((routed.weights, routed.score_sums), (probs, gradient))
        order = row_order(routing_map, experts, count)
        rows, weights = rows_of_tokens(values, probs, order, tokens * count)
        inner = weighted_swiglu(grouped_linear(rows, weight, order.ends), weights)
        sums_of_rows(inner, order).sum().backward()

    run()  # kernels are compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
