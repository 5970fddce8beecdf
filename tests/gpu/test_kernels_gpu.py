"""Fused kernels of the layers on a GPU, against float64 on the CPU; skipped without a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from megatron_wrap.engine.state.checked_optimizer import KernelAdam
from megatron_wrap.nn.attention.attend import attend
from megatron_wrap.nn.attention.flash import StoredScores, add_, merge_
from megatron_wrap.nn.kernels.embedding_rows import add_row_gradients
from megatron_wrap.nn.kernels.optimizer import square_sum
from megatron_wrap.nn.kernels.rms_norm import rms_norm
from megatron_wrap.nn.kernels.rotary import apply_rotary, split_rotary
from megatron_wrap.nn.kernels.rotary_projections import HeadNorms, latent_rotary, split_normalized_rotary
from megatron_wrap.nn.kernels.swiglu import swiglu
from megatron_wrap.nn.kernels.weight_gradients import WeightGradients, can_accumulate_weight_gradients
from megatron_wrap.platform.megatron_core.adam import GroupStepAdam

DTYPES = [(torch.float32, 2e-6), (torch.bfloat16, 6e-3)]


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.cpu().double() - expected).norm() / expected.norm())


def compare(function, reference, inputs, dtype, tolerance):
    """Outputs and gradients of a function on the GPU against the reference in float64."""
    rounded = [tensor.to(dtype) for tensor in inputs]
    ours = [tensor.cuda().requires_grad_() for tensor in rounded]
    wide = [tensor.double().requires_grad_() for tensor in rounded]
    actual, expected = function(*ours), reference(*wide)
    actual, expected = (value if isinstance(value, tuple) else (value,) for value in (actual, expected))
    weights = [torch.randn(value.shape) for value in expected]
    sum(
        (value * weight.cuda().to(dtype)).float().sum() for value, weight in zip(actual, weights, strict=True)
    ).backward()
    sum((value * weight.to(dtype).double()).sum() for value, weight in zip(expected, weights, strict=True)).backward()
    for value, other in zip(actual, expected, strict=True):
        assert value.dtype == dtype
        assert error(value.detach(), other.detach()) < tolerance
    for value, other in zip(ours, wide, strict=True):
        assert error(value.grad, other.grad) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("columns", [3, 2048, 5000])
def test_swiglu(columns, dtype, tolerance):
    def reference(gates):
        gate, linear = gates.chunk(2, dim=-1)
        return F.silu(gate) * linear

    torch.manual_seed(columns)
    compare(swiglu, reference, [torch.randn(17, 2, 2 * columns)], dtype, tolerance)


def rotated(tensor, angles, interleaved):
    """float64 [S, B, heads, D] with the pairs of the first R entries as complex numbers."""
    rotated_width = angles.shape[-1]
    part, rest = tensor[..., :rotated_width], tensor[..., rotated_width:]
    if interleaved:
        pairs, of_pairs = part.unflatten(-1, (-1, 2)), angles[..., ::2]
    else:
        pairs, of_pairs = part.unflatten(-1, (2, -1)).transpose(-1, -2), angles[..., : rotated_width // 2]
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * of_pairs.double()))
    turned = turned if interleaved else turned.transpose(-1, -2)
    return torch.cat((turned.flatten(-2), rest), dim=-1)


def angles_of(tokens, rotated_width, interleaved):
    of_pairs = torch.outer(
        torch.arange(tokens).float(), 1.0 / 10000 ** (torch.arange(0, rotated_width, 2) / rotated_width)
    )
    both = of_pairs.repeat_interleave(2, dim=-1) if interleaved else torch.cat((of_pairs, of_pairs), dim=-1)
    return both[:, None, None]


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "width", "rotated_width"), [(3, 16, 16), (70, 64, 64), (5, 80, 24)])
def test_rotary(heads, width, rotated_width, interleaved, dtype, tolerance):
    angles = angles_of(19, rotated_width, interleaved)
    on_gpu = angles.cuda()
    value = torch.randn(2, 19, heads, width).transpose(0, 1)  # strided
    compare(
        lambda x: apply_rotary(x, on_gpu, interleaved),
        lambda x: rotated(x, angles, interleaved),
        [value],
        dtype,
        tolerance,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("groups", "queries", "width", "rotated_width"), [(2, 3, 16, 16), (20, 4, 64, 64), (4, 1, 80, 24)]
)
def test_split_rotary(groups, queries, width, rotated_width, interleaved, dtype, tolerance):
    angles = angles_of(19, rotated_width, interleaved)
    on_gpu = angles.cuda()

    def reference(mixed):
        query, key, value = mixed.unflatten(-1, (queries + 2, width)).split((queries, 1, 1), dim=-2)
        query, key, value = (part.flatten(2, 3) for part in (query, key, value))
        return rotated(query, angles, interleaved), rotated(key, angles, interleaved), value

    compare(
        lambda x: split_rotary(x, on_gpu, queries, width, interleaved),
        reference,
        [torch.randn(19, 2, groups, (queries + 2) * width)],
        dtype,
        tolerance,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(("interleaved", "zero_centered"), [(False, False), (True, True)])
@pytest.mark.parametrize(
    ("groups", "queries", "width", "rotated_width"), [(2, 3, 16, 16), (4, 8, 128, 128), (4, 1, 80, 24), (1, 4, 128, 64)]
)
def test_split_normalized_rotary(groups, queries, width, rotated_width, interleaved, zero_centered, dtype, tolerance):
    tokens, batch, factor, eps = 700, 2, 1.25, 1e-5
    angles = angles_of(tokens, rotated_width, interleaved)
    on_gpu = angles.cuda()

    def reference(mixed, of_query, of_key):
        query, key, value = mixed.unflatten(-1, (queries + 2, width)).split((queries, 1, 1), dim=-2)
        query, key, value = (part.flatten(2, 3) for part in (query, key, value))
        query, key = (
            rotated(F.rms_norm(part, (width,), weight + zero_centered, eps), angles, interleaved)
            for part, weight in ((query, of_query), (key, of_key))
        )
        scale = torch.ones(width, dtype=torch.float64)
        scale[:rotated_width] = factor
        return scale * query, scale * key, value

    def fused(mixed, of_query, of_key):
        norms = HeadNorms(of_query, of_key, eps, zero_centered)
        return split_normalized_rotary(mixed, norms, on_gpu, queries, interleaved, factor)

    torch.manual_seed(groups)
    compare(
        fused,
        reference,
        [torch.randn(tokens, batch, groups, (queries + 2) * width), 1 + torch.randn(width), 1 + torch.randn(width)],
        dtype,
        tolerance,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(
    ("heads", "plain", "rotated_width", "value_width"), [(3, 16, 8, 12), (20, 128, 64, 128), (32, 24, 6, 40)]
)
def test_latent_rotary(heads, plain, rotated_width, value_width, dtype, tolerance):
    tokens, batch, latent_width, factor = 700, 2, 24, 1.25
    on_gpu = angles_of(tokens + 5, rotated_width, interleaved=False).cuda()
    of_pairs = angles_of(tokens, rotated_width, interleaved=True)

    def by_halves(tensor):
        pairs = factor * rotated(tensor, of_pairs, interleaved=True)
        return pairs.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)

    def reference(query, mixed, shared):
        of_query, to_rotate = query.split((plain, rotated_width), dim=-1)
        of_key, value = mixed.split((plain, value_width), dim=-1)
        of_all = by_halves(shared[..., None, latent_width:]).expand(-1, -1, heads, -1)
        return torch.cat((of_query, by_halves(to_rotate)), dim=-1), torch.cat((of_key, of_all), dim=-1), value

    torch.manual_seed(heads)
    widths = [(heads, plain + rotated_width), (heads, plain + value_width), (latent_width + rotated_width,)]
    compare(
        lambda q, kv, shared: latent_rotary(q, kv, shared[..., latent_width:], on_gpu, value_width, factor),
        reference,
        [torch.randn(tokens, batch, *width) for width in widths],
        dtype,
        tolerance,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(3, 5), (700, 64), (2000, 2048), (40, 8192)])
def test_rms_norm(rows, columns, zero_centered, dtype, tolerance):
    def reference(x, gamma):
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (gamma + zero_centered)

    compare(
        lambda x, gamma: rms_norm(x, gamma, 1e-5, zero_centered),
        reference,
        [torch.randn(2, rows, columns), torch.randn(columns)],
        dtype,
        tolerance,
    )


def test_weight_gradients_are_accumulated_without_rounding():
    """The product in fp32 is nearer to float64 than the product in bf16 that is added afterwards."""
    assert can_accumulate_weight_gradients(torch.device("cuda"))
    torch.manual_seed(0)
    inputs, grad = torch.randn(3, 512, 96).bfloat16(), torch.randn(3, 512, 40).bfloat16()
    start = torch.randn(40, 96)
    expected = start.double() + grad.reshape(-1, 40).double().t() @ inputs.reshape(-1, 96).double()
    main_grad = start.cuda()
    WeightGradients.wgrad_gemm_accum_fp32(inputs.cuda(), grad.cuda(), main_grad)
    unfused = start.cuda() + grad.cuda().reshape(-1, 40).t() @ inputs.cuda().reshape(-1, 96)
    assert error(main_grad, expected) < 3e-6  # fp32 sums of 1,536 products
    assert 100 * error(main_grad, expected) < error(unfused, expected)
    wide = start.cuda()
    WeightGradients.wgrad_gemm_accum_fp32(inputs.cuda().float(), grad.cuda().float(), wide)
    assert error(wide, expected) < 3e-6


def ids_of(case: str, tokens: int, num_rows: int) -> torch.Tensor:
    """[2, tokens / 2]: words by Zipf's law, these with half of them padding, one word, or some outside of the rows."""
    if case == "equal":
        return torch.full((2, tokens // 2), num_rows - 1)
    if case == "outside":
        return torch.randint(-num_rows, 2 * num_rows, (2, tokens // 2))
    ids = torch.multinomial(1.0 / torch.arange(1, num_rows + 1), tokens, replacement=True).view(2, -1)
    return torch.where(torch.rand(ids.shape) < 0.5, 3, ids) if case == "padding" else ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["words", "padding", "equal", "outside"])
@pytest.mark.parametrize(("tokens", "columns"), [(2, 5), (500, 1000), (16384, 2048), (5000, 4096)])
def test_gradients_of_embeddings_are_added_to_their_rows(tokens, columns, case, dtype):
    """Without rounding sums to bf16, and the same bits in every run, also in a CUDA graph."""
    torch.manual_seed(tokens)
    num_rows = 5000
    ids, before = ids_of(case, tokens, num_rows).cuda(), torch.randn(num_rows, columns, device="cuda")
    grad = torch.randn(tokens // 2, 2, columns, device="cuda", dtype=dtype).transpose(0, 1)
    inside = (ids >= 0) & (ids < num_rows)
    weight = torch.zeros(num_rows, columns, device="cuda", dtype=torch.float64, requires_grad=True)
    F.embedding(ids[inside], weight).backward(grad[inside].double())
    total, repeated, replayed = before.clone(), before.clone(), before.clone()
    add_row_gradients(ids, grad, total)
    assert error(total, (before.double() + weight.grad).cpu()) < 1e-6
    add_row_gradients(ids, grad.contiguous(), repeated)
    assert torch.equal(repeated, total)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_row_gradients(ids, grad, replayed)
    graph.replay()
    assert torch.equal(replayed, total)


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_with_a_factor_of_the_gradients(decoupled):
    ours, theirs = (
        [torch.nn.Parameter(torch.randn(n, generator=torch.Generator().manual_seed(n)).cuda()) for n in (7, 70000)]
        for _ in range(2)
    )
    settings = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    optimizer = KernelAdam(ours, adam_w_mode=decoupled, **settings)
    optimizer.scale_gradients(0.3)
    optimizer.write_copies({ours[1]: torch.zeros(70000, dtype=torch.bfloat16, device="cuda")})
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, fused=True, **settings)
    for step in range(4):
        for actual, other in zip(ours, theirs, strict=True):
            actual.grad = torch.randn(actual.shape, generator=torch.Generator().manual_seed(step)).cuda()
            other.grad = 0.3 * actual.grad
        optimizer.step()
        reference.step()
    before = [tensor.clone() for param in ours for tensor in (param, *optimizer.state[param].values())]
    optimizer.scale_gradients(torch.tensor(float("nan"), device="cuda"))
    optimizer.step()
    after = [tensor for param in ours for tensor in (param, *optimizer.state[param].values())]
    assert all(map(torch.equal, before, after))
    assert torch.equal(optimizer.copies[ours[1]], ours[1].bfloat16())
    for actual, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, other, rtol=1e-6, atol=1e-6)
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                optimizer.state[actual][name], reference.state[other][name], rtol=1e-5, atol=1e-7
            )


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_equals_torch_fused(decoupled):
    ours, theirs = (
        [torch.nn.Parameter(torch.randn(n, generator=torch.Generator().manual_seed(n)).cuda()) for n in (7, 70000)]
        for _ in range(2)
    )
    settings = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    optimizer = GroupStepAdam(ours, adam_w_mode=decoupled, **settings)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, fused=True, **settings)
    for step in range(4):
        for actual, other in zip(ours, theirs, strict=True):
            actual.grad = torch.randn(actual.shape, generator=torch.Generator().manual_seed(step)).cuda()
            other.grad = actual.grad.clone()
        optimizer.step()
        reference.step()
    for actual, other in zip(ours, theirs, strict=True):
        assert torch.equal(actual, other)
        assert torch.equal(optimizer.state[actual]["exp_avg_sq"], reference.state[other]["exp_avg_sq"])
    assert optimizer.param_groups[0]["step"] == 4


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("packed", [False, True])
def test_attention_to_parts_of_the_keys_is_merged(packed, dtype, tolerance):
    """Into the second half of the tokens, as the ring of context-parallel ranks does."""
    torch.manual_seed(3)
    rows = 1 if packed else 2
    query, key = torch.randn(rows, 100, 6, 40, dtype=torch.float64), torch.randn(rows, 90, 2, 40, dtype=torch.float64)
    kernel = StoredScores(0.3, is_causal=False)
    expected, expected_total = kernel.forward(query, key, key)
    parts = [kernel.forward(query, key[:, used], key[:, used]) for used in (slice(0, 31), slice(31, 90))]
    (output, total), (other, other_total) = ((o.to(dtype).cuda(), t.float().cuda()) for o, t in parts)
    arguments = (output[:, 50:], total[..., 50:], other[:, 50:], other_total[..., 50:])
    merge_(*((tensor[0] for tensor in arguments) if packed else arguments))
    assert torch.equal(output[:, :50].cpu(), parts[0][0][:, :50].to(dtype))
    assert error(output[:, 50:], expected[:, 50:]) < tolerance
    assert error(total[..., 50:], expected_total[..., 50:]) < 2e-6


@pytest.mark.parametrize("shapes", [[(5000,)], [(3, 7), (4096, 2)], [(4096,), (10001,), (33,)], [(5,)] * 7])
def test_sums_in_one_kernel_are_those_of_torch(shapes):
    torch.manual_seed(3)
    for dtype in (torch.float32, torch.bfloat16):
        sums = [(torch.randn(shape).cuda(), torch.randn(shape).to(dtype).cuda()) for shape in shapes]
        sums += [(total.clone().to(dtype), part) for total, part in sums]
        expected = [total + part.to(total.dtype) for total, part in sums]
        add_(sums)
        for (total, _), value in zip(sums, expected, strict=True):
            assert torch.equal(total, value)


@pytest.mark.parametrize(
    ("queries", "keys", "kernels"),
    [
        (1024, 1024, {"cudnn"}),
        (1000, 1000, {"cudnn", "flash"}),
        (256, 1024, {"flash"}),  # a chunk of a context-parallel rank
    ],
)
def test_latent_attention_has_a_fast_kernel(queries, keys, kernels):
    """Heads of 192 for queries and keys, of 128 for values."""
    torch.manual_seed(7)
    shapes = [(queries, 2, 4, 192), (keys, 2, 4, 192), (keys, 2, 4, 128)]
    inputs = [torch.randn(shape) for shape in shapes]
    masked = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)

    def reference(query, key, value):
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * 192**-0.5
        return torch.einsum("bhqk,kbhe->qbhe", scores.masked_fill(masked, -torch.inf).softmax(-1), value)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compare(lambda *ours: attend(*ours, causal=True, scale=192**-0.5), reference, inputs, torch.bfloat16, 1e-2)
    names = {event.key for event in profile.key_averages()}
    used = {name for name in ("cudnn", "flash") if f"aten::_scaled_dot_product_{name}_attention" in names}
    slow = {name for name in names if "efficient_attention" in name}
    expected = kernels if torch.cuda.get_device_capability() == (9, 0) else {"cudnn", "flash"}
    assert len(used) == 1
    assert used <= expected
    assert not slow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_of_squares(dtype):
    tensors = [torch.randn(size, device="cuda").to(dtype) for size in (2**24 + 3, 5, 10**6)]
    total = square_sum(tensors)
    assert error(total, torch.cat(tensors).cpu().double().square().sum().view(1)) < 1e-6
    assert torch.equal(total, square_sum(tensors))
