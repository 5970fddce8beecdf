"""Operations on vocabulary-parallel logits on one rank: gradcheck, masks, memory and errors.

`tests/distributed/test_ops.py` compares values and gradients with torch, on one and several ranks.
"""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from megatron_wrap import ops
from megatron_wrap.errors import FlowError
from megatron_wrap.ops import log_probs, vocabulary
from megatron_wrap.ops.vocabulary import TOKEN_BYTES, token_blocks

KINDS = ("forward", "reverse", "jensen_shannon")


ONE_RANK = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
"""A group of one, which needs no torch.distributed."""


def known(tokens: tuple[int, ...], columns: int, k: int, dtype: torch.dtype = torch.float64) -> ops.TopK:
    """A TopK teacher with k distinct ids per token, not sorted."""
    ids = torch.stack([torch.randperm(columns)[:k] for _ in range(math.prod(tokens))])
    return ops.TopK(torch.randn(*tokens, k, dtype=dtype), ids.view(*tokens, k))


def operations(tokens, columns, dtype, k=3):
    """name -> (function of the logits that require a gradient, how many logits it takes)"""
    ids = torch.randint(0, columns, (*tokens, k))
    teacher = known(tokens, columns, k + 1, dtype)
    table = {
        "token_log_probs": (lambda x: ops.token_log_probs(x, ids[..., 0], ONE_RANK), 1),
        "log_probs_and_entropy": (lambda x: ops.log_probs_and_entropy(x, ids[..., 0], ONE_RANK)[0], 1),
        "gather_log_probs": (lambda x: ops.gather_log_probs(x, ids, ONE_RANK), 1),
        "entropy": (lambda x: ops.entropy(x, ONE_RANK), 1),
        "vocabulary_max": (lambda x: ops.vocabulary_max(x, ONE_RANK), 1),
        "logsumexp": (lambda x: ops.logsumexp(x, ONE_RANK), 1),
        "mean_log_probs": (lambda x: ops.mean_log_probs(x, ONE_RANK), 1),
        "token_terms": (lambda x: torch.stack(ops.token_terms(x, ids[..., 0], ONE_RANK)), 1),
        "log_probs_and_logsumexp": (lambda x: torch.stack(ops.log_probs_and_logsumexp(x, ids[..., 0], ONE_RANK)), 1),
        "gather_logits": (lambda x: ops.gather_logits(x, ids, ONE_RANK), 1),
        "top_k_log_probs": (lambda x: ops.top_k_log_probs(x, k, ONE_RANK).values, 1),
        "top_k": (lambda x: ops.top_k(x, k, ONE_RANK).values, 1),
    }
    for kind in KINDS:
        table[kind] = (lambda x, y, kind=kind: ops.kl_divergence(x, y, kind, 1.5, ONE_RANK), 2)
        table[f"{kind} of top-k"] = (lambda x, kind=kind: ops.kl_divergence(x, teacher, kind, 1.5, ONE_RANK), 1)
    skewed = partial(ops.kl_divergence, kind="jensen_shannon", temperature=1.5, group=ONE_RANK, mixture=0.2)
    table["jensen_shannon of 0.2"] = (skewed, 2)
    table["jensen_shannon of 0.2 of top-k"] = (lambda x: skewed(x, teacher), 1)
    return table


NAMES = tuple(operations((1, 1), 4, torch.float32))


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name):
    torch.manual_seed(0)
    operation, count = operations((2, 2), 6, torch.float64)[name]
    logits = [torch.randn(2, 2, 6, dtype=torch.float64, requires_grad=True) for _ in range(count)]
    assert torch.autograd.gradcheck(operation, logits)


@pytest.mark.parametrize("name", NAMES)
def test_strided_logits_give_the_same_result_and_are_not_modified(name):
    torch.manual_seed(1)
    operation, count = operations((3, 4), 7, torch.float64)[name]
    plain = [torch.randn(3, 4, 7, dtype=torch.float64, requires_grad=True) for _ in range(count)]
    # like a [B, S, V] view of Megatron-Core's [S, B, V], without the first position and the last column
    stored = [F.pad(x.detach(), (0, 1, 1, 0)).transpose(0, 1).contiguous().requires_grad_() for x in plain]
    before = [x.detach().clone() for x in stored]
    actual, expected = operation(*(x.transpose(0, 1)[:, 1:, :-1] for x in stored)), operation(*plain)
    assert torch.equal(actual, expected)
    weights = torch.randn_like(expected)
    (actual * weights).sum().backward()
    (expected * weights).sum().backward()
    for with_exponentials, other, was in zip(stored, plain, before, strict=True):
        assert torch.equal(with_exponentials.grad.transpose(0, 1)[:, 1:, :-1], other.grad)
        assert torch.equal(with_exponentials.detach(), was)


@pytest.mark.parametrize("mask", [torch.finfo(torch.float32).min / 2, -math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_masked_columns_contribute_nothing(name, mask):
    """Vocabulary padding, or -inf set by a flow, compared with logits without these columns."""
    torch.manual_seed(2)
    operation, count = operations((2, 3), 9, torch.float32)[name]
    plain = [torch.randn(2, 3, 9, requires_grad=True) for _ in range(count)]
    padded = [F.pad(x.detach(), (0, 4), value=mask).requires_grad_() for x in plain]
    actual, expected = operation(*padded), operation(*plain)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    actual.sum().backward()
    expected.sum().backward()
    for of_padded, other in zip(padded, plain, strict=True):
        torch.testing.assert_close(of_padded.grad[..., :9], other.grad, rtol=1e-6, atol=1e-6)
        assert torch.equal(of_padded.grad[..., 9:], torch.zeros(2, 3, 4))


@pytest.mark.parametrize("mask", [torch.finfo(torch.float32).min / 2, -math.inf])
@pytest.mark.parametrize("chunk_bytes", [1, 10**6])
def test_the_entropy_beside_the_log_probs_has_no_gradient_and_no_masked_columns(monkeypatch, mask, chunk_bytes):
    monkeypatch.setattr(log_probs, "CHUNK_BYTES", chunk_bytes)
    logits = (torch.randn(2, 3, 9) * 5).requires_grad_()
    _, entropies = ops.log_probs_and_entropy(F.pad(logits, (0, 4), value=mask), torch.ones(2, 3), ONE_RANK)
    expected = torch.distributions.Categorical(logits=logits.detach().double()).entropy()
    torch.testing.assert_close(entropies.double(), expected, rtol=1e-5, atol=1e-6)
    assert not entropies.requires_grad


@pytest.mark.parametrize(("kind", "mixture"), [*((kind, 0.5) for kind in KINDS), ("jensen_shannon", 0.1)])
@pytest.mark.parametrize("temperature", [1.0, 0.25, 3.0])
def test_top_k_teacher_with_all_ids_equals_the_whole_teacher(kind, mixture, temperature):
    torch.manual_seed(3)
    student, teacher = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(2, 3, 8, dtype=torch.float64)
    a, b = student.clone().requires_grad_(), student.clone().requires_grad_()
    whole = ops.kl_divergence(a, teacher, kind, temperature, ONE_RANK, mixture)
    shifted = teacher.log_softmax(-1)  # log-probabilities give the same result as logits
    of_top_k = ops.kl_divergence(b, ops.top_k(shifted, 8, ONE_RANK), kind, temperature, ONE_RANK, mixture)
    whole.sum().backward()
    of_top_k.sum().backward()
    torch.testing.assert_close(of_top_k, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_id_without_a_column_has_no_probability(dtype):
    """Padding, and ids above it; a negative one is a label without loss, whose value is finite."""
    logits = F.pad(torch.randn(1, 4, 9).to(dtype), (0, 4), value=torch.finfo(dtype).min / 2)
    ids = torch.tensor([[8, 9, 13, -100]])
    sets = ids.unsqueeze(-1).expand(-1, -1, 2)
    results = {
        "token_log_probs": ops.token_log_probs(logits, ids, ONE_RANK),
        "log_probs_and_entropy": ops.log_probs_and_entropy(logits, ids, ONE_RANK)[0],
        "log_probs_and_logsumexp": ops.log_probs_and_logsumexp(logits, ids, ONE_RANK)[0],
        "token_terms": ops.token_terms(logits, ids, ONE_RANK).log_probs,
        "gather_log_probs": ops.gather_log_probs(logits, sets, ONE_RANK)[..., 1],
        "gather_logits": ops.gather_logits(logits, sets, ONE_RANK)[..., 1],
    }
    for name, result in results.items():
        assert result.isneginf().tolist() == [[False, True, True, False]], name
        assert result[0, [0, 3]].isfinite().all(), name


@pytest.mark.parametrize("wrong", [9, 13, -1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_s_id_without_a_column_gives_no_plausible_divergence(kind, wrong):
    """The student's probability there is 0: forward it is infinite, in a mixture the teacher's id is no student's."""
    logits = F.pad(torch.randn(1, 1, 9, dtype=torch.float64), (0, 4), value=torch.finfo(torch.float64).min / 2)
    teacher = ops.TopK(torch.zeros(1, 1, 2, dtype=torch.float64), torch.tensor([[[3, wrong]]]))
    actual = ops.kl_divergence(logits, teacher, kind, group=ONE_RANK)
    q = torch.tensor([logits.softmax(-1)[0, 0, 3].item(), 0.0], dtype=torch.float64)
    expected = {
        "forward": math.inf,
        "reverse": math.log(2),  # the student's distribution over the two ids has only the first
        "jensen_shannon": jensen_shannon(torch.tensor([0.5, 0.5], dtype=torch.float64), q),
    }[kind]
    assert actual.item() == pytest.approx(expected, rel=1e-12)


def jensen_shannon(p: torch.Tensor, q: torch.Tensor) -> float:
    """Of p and q, whose rest is on ids where p is 0."""
    m = (p + q) / 2
    rest = 1 - q.sum()
    of_q = torch.xlogy(q, q) - torch.xlogy(q, m)
    return 0.5 * float((p * (p.log() - m.log())).sum() + of_q.sum() + rest * math.log(2))


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_different_numbers_of_rows_are_compared_over_the_common_ones(kind):
    """The result and the gradient of slices; without vocab_size the divergence of all rows, which is infinite."""
    torch.manual_seed(4)
    lowest = torch.finfo(torch.float64).min / 2
    student, teacher = torch.randn(2, 3, 12, dtype=torch.float64), torch.randn(2, 3, 12, dtype=torch.float64)
    student[..., 10:], teacher[..., 7:] = lowest, lowest  # 10 and 7 rows of 12
    whole, parts = student.clone().requires_grad_(), student[..., :7].clone().requires_grad_()
    actual = ops.kl_divergence(whole, teacher, kind, 1.5, ONE_RANK, vocab_size=7)
    expected = ops.kl_divergence(parts, teacher[..., :7], kind, 1.5, ONE_RANK)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    actual.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(whole.grad, F.pad(parts.grad, (0, 5)), rtol=1e-12, atol=1e-12)
    of_top_k = ops.kl_divergence(student, ops.top_k(teacher, 7, ONE_RANK), kind, 1.5, ONE_RANK, vocab_size=7)
    torch.testing.assert_close(of_top_k, expected.detach(), rtol=1e-12, atol=1e-12)
    if kind != "jensen_shannon":  # the one that is averaged over has more rows
        pair = (teacher, student) if kind == "forward" else (student, teacher)
        assert ops.kl_divergence(*pair, kind, 1.5, ONE_RANK).isposinf().all()


def test_divergence_of_equal_logits_is_zero_and_jensen_shannon_is_bounded():
    logits = torch.randn(2, 3, 50, dtype=torch.float64) * 5
    for kind in KINDS:
        assert ops.kl_divergence(logits, logits.clone(), kind, group=ONE_RANK).abs().max() < 1e-14
    apart = 1e3 * torch.eye(4, dtype=torch.float64)  # no common id
    actual = ops.kl_divergence(apart, apart.roll(1, 0), "jensen_shannon", group=ONE_RANK)
    torch.testing.assert_close(actual, torch.full_like(actual, math.log(2)), rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_peak_memory_is_bounded_at_any_length(name, monkeypatch):
    """Peak memory besides inputs and outputs, and in the backward besides one gradient per input."""
    columns, k, chunk = 1024, 96, 2**17
    monkeypatch.setattr(vocabulary, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(log_probs, "CHUNK_BYTES", chunk)
    for length in (128, 512):
        operation, count = operations((2, length), columns, torch.float32, k)[name]
        logits = [torch.randn(2, length, columns, dtype=torch.bfloat16, requires_grad=True) for _ in range(count)]
        grad_out = torch.ones_like(operation(*logits))
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as forward:
            result = operation(*logits)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as backward:
            result.backward(grad_out)
        gradients = sum(x.grad.nbytes for x in logits)
        ids = k * 8 * 2 * length if name in ("top_k", "top_k_log_probs") else 0  # the other output
        assert gradients > 2 * chunk  # otherwise a copy of the logits would not exceed the bound
        bound = chunk + TOKEN_BYTES * 2 * length
        assert 0 < peak_bytes(forward) - result.nbytes - ids <= bound
        assert 0 < peak_bytes(backward) - gradients <= bound
        del result


def peak_bytes(trace: profile) -> int:
    """Peak of the allocated bytes in the profiler's trace."""
    live = peak = 0
    for event in sorted(trace.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.mark.parametrize("shape", [(3, 5), (5,), (), (2, 3, 4), (0, 4), (4, 0)])
@pytest.mark.parametrize("limit", [1, 20, 30, 60, 70, 10**6])
def test_token_blocks_cover_each_token_once_within_the_limit(shape, limit):
    seen = torch.zeros(shape)
    for block in token_blocks(shape, 10, limit):
        seen[block] += 1
        assert seen[block].numel() <= max(1, limit // 10)
    assert torch.equal(seen, torch.ones(shape))


def test_invalid_arguments_are_refused():
    logits = torch.randn(2, 3, 8)
    with pytest.raises(FlowError, match=r"'backward'; choose one of forward, reverse, jensen_shannon"):
        ops.kl_divergence(logits, logits, "backward", group=ONE_RANK)
    for temperature in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(FlowError, match=f"temperature={temperature}"):
            ops.kl_divergence(logits, logits, temperature=temperature, group=ONE_RANK)
    with pytest.raises(FlowError, match=r"teacher logits \[2, 3, 7\] and student logits \[2, 3, 8\]"):
        ops.kl_divergence(logits, logits[..., :7], group=ONE_RANK)
    with pytest.raises(FlowError, match=r"the teacher is a tuple; .*TopK"):
        ops.kl_divergence(logits, (logits, logits.long()), group=ONE_RANK)
    with pytest.raises(FlowError, match=r"TopK teacher .*; detach its values"):
        ops.kl_divergence(logits, ops.top_k(logits.clone().requires_grad_(), 2, ONE_RANK), group=ONE_RANK)
    with pytest.raises(FlowError, match=r"k=9 .* 1 <= k <= 8"):
        ops.top_k(logits, 9, ONE_RANK)
    with pytest.raises(FlowError, match=r"id_sets \[2, 3\] .* logits \[2, 3, 8\].*\[2, 3, 'K'\]"):
        ops.gather_log_probs(logits, torch.zeros(2, 3, dtype=torch.long), ONE_RANK)
    with pytest.raises(FlowError, match=r"torch\.int64 \[2, 3, 8\]"):
        ops.entropy(logits.long(), ONE_RANK)


def test_second_derivative_is_refused():
    logits = torch.randn(1, 2, 5, requires_grad=True)
    (first,) = torch.autograd.grad(ops.entropy(logits, ONE_RANK).square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
