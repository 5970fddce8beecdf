"""Deferred logits: operations in chunks, and any use as a tensor, equal stored logits; values and gradients."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_wrap import ops
from megatron_wrap.ops import deferred_logits, token_chunks
from megatron_wrap.ops.deferred_logits import DeferredLogits, OutputProjection, with_loss_factor

B, S, H, V, UNPADDED = 2, 7, 8, 29, 27


class OneRank:
    size, rank = staticmethod(lambda: 1), staticmethod(lambda: 0)


GROUP: Any = OneRank()
IDS, SETS = torch.arange(B * S).view(B, S) + 3, torch.arange(B * S * 3).view(B, S, 3) % UNPADDED
TEACHER = torch.linspace(-2, 2, B * S * V).view(B, S, V).sin()
TOP = ops.TopK(torch.linspace(-1, 1, B * S * 3).view(B, S, 3), torch.tensor([1, 4, 9]).expand(B, S, 3))
OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "token_log_probs": lambda logits: ops.token_log_probs(logits, IDS, GROUP),
    "log_probs_and_entropy": lambda logits: ops.log_probs_and_entropy(logits, IDS, GROUP),
    "entropy": lambda logits: ops.entropy(logits, GROUP),
    "logsumexp": lambda logits: ops.logsumexp(logits, GROUP),
    "mean_log_probs": lambda logits: ops.mean_log_probs(logits, GROUP),
    "token_terms": lambda logits: ops.token_terms(logits, IDS, GROUP),
    "log_probs_and_logsumexp": lambda logits: ops.log_probs_and_logsumexp(logits, IDS, GROUP),
    "gather_logits": lambda logits: ops.gather_logits(logits, SETS, GROUP),
    "gather_log_probs": lambda logits: ops.gather_log_probs(logits, SETS, GROUP),
    "top_k": lambda logits: ops.top_k(logits, 3, GROUP),
    "top_k_log_probs": lambda logits: ops.top_k_log_probs(logits, 3, GROUP),
    "vocabulary_max": lambda logits: ops.vocabulary_max(logits, GROUP),
    "kl_divergence": lambda logits: ops.kl_divergence(logits, TEACHER, "reverse", 2.0, GROUP),
    "kl_divergence of top k": lambda logits: ops.kl_divergence(logits, TOP, "forward", 1.0, GROUP),
}
USER_CODE: dict[str, Callable[[Tensor], Any]] = {
    "log_softmax": lambda logits: torch.log_softmax(logits[:, :-1, :UNPADDED] / 2, dim=-1),
    "method": lambda logits: logits.float().div(3)[0],
    "in place": lambda logits: ops.token_log_probs(logits.div_(2.0), IDS, GROUP),
    "own function": lambda logits: Doubled.apply(logits),
}


class Doubled(torch.autograd.Function):
    """A function of a user."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits[..., :UNPADDED] * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.nn.functional.pad(grads[0] * 2, (0, V - UNPADDED))


@pytest.fixture(autouse=True)
def small_chunks() -> Iterator[None]:
    with (
        mock.patch.object(token_chunks, "MIN_CHUNK_TOKENS", 4),
        mock.patch.object(token_chunks, "chunk_bytes", return_value=1),
    ):
        yield


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(deferred_logits.logger, "warning_all_ranks", lines.append)
    return lines


class Model:
    """Hidden states and an output layer with padding of the vocabulary."""

    def __init__(self, seed: int = 0, softcap: float | None = None) -> None:
        self.softcap = softcap
        generator = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(B, S, H, generator=generator, requires_grad=True)
        self.weight = torch.nn.Parameter(torch.randn(V, H, generator=generator))
        self.projection = OutputProjection(self.weight, UNPADDED, softcap=softcap)

    def stored(self) -> Tensor:
        logits = torch.nn.functional.linear(self.hidden, self.weight)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        padding = torch.full((B, S, V - UNPADDED), torch.finfo(torch.float32).min / 2)
        return torch.cat([logits[..., :UNPADDED], padding], dim=-1)

    def deferred(self) -> DeferredLogits:
        return deferred_logits.deferred_logits(self.hidden * 1.0, self.projection)

    def results(self, returned: Any) -> list[Tensor]:
        """The tensors that an operation returned, and gradients of a function of them."""
        tensors = list(returned) if isinstance(returned, tuple) else [returned]
        weighted = [
            (tensor * torch.linspace(0.3, 1.7, tensor.numel()).view(tensor.shape)).sum()
            for tensor in tensors
            if tensor.requires_grad
        ]
        return [*tensors, *torch.autograd.grad(sum(weighted, torch.zeros(())), [self.hidden, self.weight])]


@pytest.mark.parametrize(
    ("name", "softcap"), [*((name, None) for name in OPERATIONS), ("token_log_probs", 2.0), ("entropy", 2.0)]
)
def test_an_operation_equals_that_on_stored_logits(name: str, softcap: float | None, warnings: list[str]) -> None:
    model, operation = Model(softcap=softcap), OPERATIONS[name]
    returned = operation(model.deferred())
    expected = operation(model.stored())
    assert type(returned) is type(expected)
    for actual, wanted in zip(model.results(returned), model.results(expected), strict=True):
        assert actual.requires_grad == wanted.requires_grad
        torch.testing.assert_close(actual, wanted, rtol=2e-6, atol=2e-6)
    with torch.no_grad():
        assert not any(tensor.requires_grad for tensor in [operation(model.deferred())] if isinstance(tensor, Tensor))
    assert warnings == []


@pytest.mark.parametrize("name", USER_CODE)
def test_use_as_a_tensor_warns_once_with_the_line(name: str, warnings: list[str]) -> None:
    model, user_code = Model(), USER_CODE[name]
    returned, again = user_code(model.deferred()), user_code(model.deferred())
    assert len(warnings) == 1
    assert f"{__file__}:" in warnings[0]
    expected = model.results(user_code(model.stored()))
    for result in (returned, again):
        for actual, wanted in zip(model.results(result), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=2e-6, atol=2e-6)


def test_divergence_of_two_models_with_deferred_logits() -> None:
    student, teacher = Model(0), Model(1)
    leaves = [student.hidden, student.weight, teacher.hidden, teacher.weight]
    results = []
    for first, second in ((student.stored(), teacher.stored()), (student.deferred(), teacher.deferred())):
        divergence = ops.kl_divergence(first, second, "jensen_shannon", 1.5, GROUP)
        results.append([divergence, *torch.autograd.grad(divergence.sum(), leaves)])
    for actual, wanted in zip(*results, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("upstream", ["as declared", "another", "none"])
def test_a_known_gradient_is_computed_in_the_forward_pass(upstream: str) -> None:
    """The weight's gradient is in the buffer once, that of all chunks but the last one after the forward pass, that of
    the last one after the backward pass; another upstream gradient corrects it."""
    model, factor = Model(), 0.25
    weight: Any = model.weight
    mask = (torch.arange(B * S).view(B, S) % 3 > 0).float()
    known = ops.token_log_probs(model.stored(), IDS, GROUP)
    actual_mask = mask.flip(0) if upstream == "another" else mask
    of_hidden, of_weight = torch.autograd.grad((known * actual_mask).sum() * factor, [model.hidden, weight])
    weight.main_grad = torch.zeros(V, H)
    weight.grad_added_to_main_grad = False
    logits = with_loss_factor(model.deferred(), factor)
    with mock.patch.object(token_chunks, "_recomputed", wraps=token_chunks._recomputed) as recomputed:
        log_probs = ops.token_log_probs(logits, IDS, GROUP, loss_gradient=mask)
        torch.testing.assert_close(log_probs, known)
        assert not weight.grad_added_to_main_grad
        if upstream == "none":  # without a backward pass the gradients would be discarded with the step
            assert weight.main_grad.abs().sum() > 0
            return
        (actual,) = torch.autograd.grad((log_probs * actual_mask).sum() * factor, [model.hidden])
    torch.testing.assert_close(actual, of_hidden, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(weight.main_grad, of_weight, rtol=2e-6, atol=2e-6)
    assert recomputed.call_count == (upstream == "another")


def test_without_a_graph_nothing_is_added_to_the_buffer() -> None:
    model = Model()
    weight: Any = model.weight
    weight.main_grad = torch.zeros(V, H)
    with torch.no_grad():
        logits = with_loss_factor(model.deferred(), 1.0)
        ops.token_log_probs(logits, IDS, GROUP, loss_gradient=torch.ones(B, S))
        ops.token_log_probs(logits.detach(), IDS, GROUP, loss_gradient=torch.ones(B, S))
    assert weight.main_grad.abs().sum() == 0


def test_agrees_with_torchs_linear_cross_entropy() -> None:
    """The oracle of torch 2.13, of hidden states and weight without padding."""
    model = Model()
    projection = OutputProjection(model.weight, V)
    logits = deferred_logits.deferred_logits(model.hidden, projection)
    loss = -ops.token_log_probs(logits, IDS, GROUP).sum()
    function = torch.nn.functional.linear_cross_entropy
    expected = function(model.hidden.view(-1, H), model.weight, IDS.view(-1), reduction="sum")
    leaves = [model.hidden, model.weight]
    torch.testing.assert_close(loss, expected)
    for actual, wanted in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=2e-6, atol=2e-6)


def bf16_results(way: str) -> list[Tensor]:
    """Loss, and gradients of hidden states and weight, of 256 tokens: stored or deferred in bf16, or the same values in
    fp32. The weight's gradient is added to a buffer in fp32, as in training."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 256, 64, generator=generator).bfloat16()
    values = (0.3 * torch.randn(500, 64, generator=generator)).bfloat16()
    ids = torch.randint(0, 500, (1, 256), generator=generator)
    hidden, values = (hidden.float(), values.float()) if way == "fp32" else (hidden, values)
    weight: Any = torch.nn.Parameter(values)
    hidden.requires_grad_()
    if way in ("fp32", "stored"):
        loss = -ops.token_log_probs(torch.nn.functional.linear(hidden, weight), ids, GROUP).mean()
        return [loss, *torch.autograd.grad(loss, [hidden, weight])]
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(500, 64), False
    logits = deferred_logits.deferred_logits(hidden, OutputProjection(weight, 500))
    known = None if way == "recomputed" else -torch.ones(1, 256)
    log_probs = ops.token_log_probs(with_loss_factor(logits, 1 / 256), ids, GROUP, loss_gradient=known)
    loss = -log_probs.sum() / 256
    return [loss, *torch.autograd.grad(loss, [hidden]), weight.main_grad]


@pytest.mark.parametrize("way", ["forward", "recomputed"])
def test_in_bf16_it_is_no_further_from_fp32_than_stored_logits(way: str) -> None:
    """Relative errors of seven chunks; 1% is left for kernels that sum in another order for another number of rows."""
    with mock.patch.object(token_chunks, "MIN_CHUNK_TOKENS", 40):
        exact, stored, deferred = (bf16_results(name) for name in ("fp32", "stored", way))
    for wanted, of_stored, of_deferred in zip(exact, stored, deferred, strict=True):
        error = (of_deferred.float() - wanted).norm()
        assert error <= 1.01 * (of_stored.float() - wanted).norm() + 1e-6 * wanted.norm()
