"""Divergence of a student's from a teacher's next-token distribution, with vocabulary-parallel logits.

With k known ids per token of the teacher, p = softmax(values / T) over the ids K, x the student's logits at these ids
divided by T, and Z the normalizer of the student's softmax over the whole vocabulary:

    forward          sum_K p (log p - log q)                                     q = exp(x - log Z)
    jensen_shannon   c + sum_K [b p (log p - l) + (1 - b) q (log q - l)]         l = log(b / (1 - b) p + q)
    reverse          sum_K q (log q - log p)                                     q = softmax of x over K

In jensen_shannon b is the teacher's share of the mixture and c = -log(1 - b); each q outside K contributes
(1 - b) q c, which the constant c includes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_wrap.errors import FlowError
from megatron_wrap.ops.token_chunks import chunked
from megatron_wrap.ops.token_values import TopK
from megatron_wrap.ops.vocabulary import (
    Block,
    block_log_probs,
    check_logits,
    check_temperature,
    clamp_log_probs,
    columns_below,
    compute_dtype,
    exclude_outside,
    local_indices,
    log_normalizer,
    owned_logits,
    token_blocks,
    with_infinite,
)
from megatron_wrap.parallel.collectives import ProcessGroup, reduce_in_place
from megatron_wrap.parallel.state import tensor_parallel_group

DivergenceKind = Literal["forward", "reverse", "jensen_shannon"]

_BUFFERS = 4  # temporary tensors [tokens, V/tp]: log-probabilities of both and of the mixture, one product


@chunked
def kl_divergence(
    student_logits: Tensor,
    teacher: Tensor | TopK,
    kind: DivergenceKind = "forward",
    temperature: float = 1.0,
    group: ProcessGroup | None = None,
    mixture: float = 0.5,
    vocab_size: int | None = None,
) -> Tensor:
    """Divergence at each token, in nats; fp32 (float64 for float64 logits).

    With q = softmax(student_logits / temperature) and p the teacher's distribution:

    - forward: KL(p || q) = sum p (log p - log q)
    - reverse: KL(q || p) = sum q (log q - log p)
    - jensen_shannon: b KL(p || m) + (1 - b) KL(q || m), m = b p + (1 - b) q, with b = mixture (Agarwal et al. 2023,
      arXiv:2306.13649, equation 1); for b = 1/2 at most log 2 (Lin 1991, doi 10.1109/18.61115)

    For teacher logits, p = softmax(teacher / temperature) over the whole vocabulary; the teacher gets a gradient if it
    requires one. For a `TopK` teacher, p = softmax(values / temperature) over its k ids and 0 elsewhere (logits and
    log-probabilities give the same p); its values must not require a gradient. q is the softmax over the whole
    vocabulary, except for reverse, which would be infinite: there q is the softmax over the k ids, and other logits of
    the student get no gradient. With k = V, all three equal the result for whole logits.

    The result is inf where the distribution that is averaged over has an id that is padding of the other vocabulary.
    With `vocab_size` both softmaxes are over the ids below it, the rows that models of different numbers of rows have
    in common. Unlike in some distillation losses, the result is not multiplied by temperature^2.

    Args:
        student_logits: [B, S, V/tp], this rank's columns of the vocabulary.
        teacher: logits [B, S, V/tp] with the same columns, in any floating type; or a TopK [B, S, k] of global ids,
            distinct within a token and inside the vocabulary, equal on all tensor-parallel ranks.
        temperature: divides the logits of both, > 0.
        group: the tensor-parallel group; default: the current layout's.
        mixture: the teacher's share of m in jensen_shannon, between 0 and 1.
        vocab_size: number of ids that both models have; None: all.

    Returns:
        [B, S], equal on every tensor-parallel rank.

    Raises:
        FlowError: unknown kind, an argument out of range, mismatched shapes, or a TopK that requires a gradient.
    """
    _check_options(kind, temperature, mixture)
    check_logits("student_logits", student_logits)
    group = group or tensor_parallel_group()
    if isinstance(teacher, TopK):
        return top_k_divergence(student_logits, teacher, kind, temperature, group, mixture, vocab_size)
    if not isinstance(teacher, Tensor):
        raise FlowError(f"the teacher is a {type(teacher).__name__}; pass its logits or a TopK(values, ids)")
    if teacher.shape != student_logits.shape:
        raise FlowError(
            f"teacher logits {list(teacher.shape)} and student logits {list(student_logits.shape)} differ; "
            "pass the same tokens and the same shard of the same padded vocabulary"
        )
    check_logits("teacher logits", teacher)
    first, second = (student_logits, teacher) if kind == "reverse" else (teacher, student_logits)
    formula = _jensen_shannon(mixture) if kind == "jensen_shannon" else _KULLBACK_LEIBLER
    columns = columns_below(vocab_size, student_logits.shape[-1], group)
    return _Divergence.apply(first, second, formula, temperature, group, columns)


def _check_options(kind: str, temperature: float, mixture: float) -> None:
    if kind not in get_args(DivergenceKind):
        raise FlowError(f"kl_divergence has no kind {kind!r}; choose one of {', '.join(get_args(DivergenceKind))}")
    check_temperature(temperature)
    if not 0 < mixture < 1:
        raise FlowError(f"mixture {mixture} is not between 0 and 1; use kind forward for 0 and reverse for 1")


class _Formula(NamedTuple):
    """A divergence of two distributions f and s: the weighted total of its sums. The functions may overwrite their
    inputs."""

    weights: tuple[float, ...]
    """Factor of each sum."""
    sums: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
    """(log f [n, C], log s [n, C]) -> this rank's part of each sum over the vocabulary, [n]."""
    gradients: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], Callable[[Tensor, Tensor, Tensor], Tensor]]
    """Gradients by the logits of f and of s: (own log-probabilities, the other's, own sum [n, 1]) -> [n, C]."""


def _kl_sums(log_first: Tensor, log_second: Tensor) -> tuple[Tensor, ...]:
    ratio = log_second.neg_().add_(log_first)
    return (log_first.exp_().mul_(ratio).sum(dim=-1),)


def _kl_gradient_first(log_own: Tensor, log_other: Tensor, divergence: Tensor) -> Tensor:
    excess = log_other.neg_().add_(log_own).sub_(divergence)
    return log_own.exp_().mul_(excess)


def _kl_gradient_second(log_own: Tensor, log_other: Tensor, divergence: Tensor) -> Tensor:
    return log_own.exp_().sub_(log_other.exp_())


_KULLBACK_LEIBLER = _Formula((1.0,), _kl_sums, (_kl_gradient_first, _kl_gradient_second))


def _jensen_shannon(mixture: float) -> _Formula:
    weights = (mixture, 1 - mixture)
    logs = (math.log(mixture), math.log1p(-mixture))

    def log_mixture(log_own: Tensor, log_other: Tensor, index: int) -> Tensor:
        return torch.logaddexp(log_own, log_other + (logs[1 - index] - logs[index])).add_(logs[index])

    def sums(log_first: Tensor, log_second: Tensor) -> tuple[Tensor, ...]:
        of_both = log_mixture(log_first, log_second, 0)
        sum_first = log_first.exp().mul_(log_first.sub_(of_both)).sum(dim=-1)
        return sum_first, log_second.exp().mul_(log_second.sub_(of_both)).sum(dim=-1)

    def gradient(log_own: Tensor, log_other: Tensor, own_sum: Tensor, index: int) -> Tensor:
        # the derivative through the mixture cancels
        excess = log_mixture(log_own, log_other, index).neg_().add_(log_own).sub_(own_sum)
        return log_own.exp_().mul_(excess).mul_(weights[index])

    return _Formula(weights, sums, (partial(gradient, index=0), partial(gradient, index=1)))


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        whole_first: Tensor,
        whole_second: Tensor,
        formula: _Formula,
        temperature: float,
        group: ProcessGroup,
        columns: int,
    ) -> Tensor:
        first, second = whole_first[..., :columns], whole_second[..., :columns]
        dtype = compute_dtype(first, second)
        normalizers = [log_normalizer(logits, dtype, temperature, group) for logits in (first, second)]
        sums: list[Tensor] = []
        for block in _blocks(first, dtype):
            shares = formula.sums(*_log_probs_of_both(first, second, normalizers, block, temperature))
            sums = sums or [torch.empty_like(normalizers[0]) for _ in shares]
            for total, share in zip(sums, shares, strict=True):
                total[block] = share
        for total in sums:
            reduce_in_place(total, "sum", group)
        ctx.save_for_backward(whole_first, whole_second, *normalizers, *sums)
        ctx.formula, ctx.temperature, ctx.columns = formula, temperature, columns
        if not sums:  # no tokens
            return torch.empty_like(normalizers[0])
        weighted = [total * weight for total, weight in zip(sums, formula.weights, strict=True)]
        return with_infinite(torch.stack(weighted).sum(dim=0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        whole, normalizers, sums = ctx.saved_tensors[:2], ctx.saved_tensors[2:4], ctx.saved_tensors[4:]
        first, second = (logits[..., : ctx.columns] for logits in whole)
        grads: list[Tensor | None] = [None, None]
        for index, logits in enumerate(whole):
            if not ctx.needs_input_grad[index]:
                continue
            whole_grad = grads[index] = torch.empty_like(logits)
            whole_grad[..., ctx.columns :] = 0.0
            grad = whole_grad[..., : ctx.columns]
            for block in _blocks(first, normalizers[0].dtype):
                logs = _log_probs_of_both(first, second, normalizers, block, ctx.temperature)
                own_sum = sums[min(index, len(sums) - 1)][block].unsqueeze(-1)
                gradient = ctx.formula.gradients[index](logs[index], logs[1 - index], own_sum)
                grad[block] = gradient.mul_(grad_outputs[0][block].unsqueeze(-1) / ctx.temperature)
                del logs, gradient  # free the memory before the next block
        return grads[0], grads[1], None, None, None, None


def _blocks(logits: Tensor, dtype: torch.dtype) -> Iterator[Block]:
    return token_blocks(logits.shape[:-1], _BUFFERS * logits.shape[-1] * dtype.itemsize)


def _log_probs_of_both(
    first: Tensor, second: Tensor, normalizers: Sequence[Tensor], block: Block, temperature: float
) -> tuple[Tensor, Tensor]:
    return (
        block_log_probs(first[block], normalizers[0][block], temperature),
        block_log_probs(second[block], normalizers[1][block], temperature),
    )


_NUMBERS_PER_ID = 12  # 8-byte numbers per known id: index, masks, log-probabilities of both, temporaries


def top_k_divergence(
    student_logits: Tensor,
    teacher: TopK,
    kind: str,
    temperature: float,
    group: ProcessGroup,
    mixture: float = 0.5,
    vocab_size: int | None = None,
) -> Tensor:
    """`kl_divergence` for a TopK teacher, after validation of kind and temperature; same arguments and errors."""
    values, ids = teacher
    check_logits("student_logits", student_logits, ("the teacher's values", values), ("the teacher's ids", ids))
    if values.shape != ids.shape:
        raise FlowError(f"the teacher's values {list(values.shape)} and ids {list(ids.shape)} differ in shape")
    if values.requires_grad:
        raise FlowError("a TopK teacher cannot get a gradient; detach its values, or pass the teacher's whole logits")
    columns = columns_below(vocab_size, student_logits.shape[-1], group)
    return _TopKDivergence.apply(student_logits, values, ids, kind, temperature, group, mixture, columns)


class _TopKDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        values: Tensor,
        ids: Tensor,
        kind: str,
        temperature: float,
        group: ProcessGroup,
        mixture: float,
        columns: int,
    ) -> Tensor:
        dtype = compute_dtype(logits, values)
        known_columns = logits[..., :columns]
        normalizer_of_all = log_normalizer(known_columns, dtype, temperature, group) if kind != "reverse" else None
        result = torch.empty(ids.shape[:-1], dtype=dtype, device=logits.device)
        # saved per token for the backward
        normalizer = torch.empty_like(result) if normalizer_of_all is None else normalizer_of_all
        mean = torch.empty_like(result)
        for block in token_blocks(result.shape, _known_bytes(ids)):
            indices, owned = local_indices(ids[block], logits.shape[-1], group)
            log_q = owned_logits(logits[block], indices, owned, dtype)
            reduce_in_place(log_q, "sum", group)
            exclude_outside(log_q, ids[block], logits, group).masked_fill_(ids[block] < 0, -math.inf)
            log_q.div_(temperature)
            if kind == "reverse":
                normalizer[block] = log_q.logsumexp(dim=-1)
            clamp_log_probs(log_q.sub_(normalizer[block].unsqueeze(-1)))
            log_p = _teacher_log_probs(values[block], dtype, temperature)
            result[block], mean[block] = _value_and_mean(kind, log_q, log_p, mixture)
            del indices, owned, log_q, log_p  # free the memory before the next block
        ctx.save_for_backward(logits, values, ids, normalizer, mean)
        ctx.kind, ctx.temperature, ctx.group, ctx.mixture, ctx.columns = kind, temperature, group, mixture, columns
        return with_infinite(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        logits, values, ids, normalizer, mean = ctx.saved_tensors
        columns, dtype = logits.shape[-1], normalizer.dtype
        grad = torch.empty_like(logits)
        for block in token_blocks(ids.shape[:-1], columns * dtype.itemsize + _known_bytes(ids)):
            indices, owned = local_indices(ids[block], columns, ctx.group)
            log_q = owned_logits(logits[block], indices, owned, dtype).div_(ctx.temperature)
            clamp_log_probs(log_q.sub_(normalizer[block].unsqueeze(-1)))
            log_p = _teacher_log_probs(values[block], dtype, ctx.temperature)
            of_known = _gradient_of_known(ctx.kind, log_q, log_p, mean[block].unsqueeze(-1), ctx.mixture)
            known = of_known.masked_fill_(~owned, 0.0)
            part = _gradient_of_all(ctx.kind, logits, block, normalizer, mean, ctx.temperature, ctx.mixture)
            part[..., ctx.columns :] = 0.0
            part.scatter_add_(-1, indices, known)
            grad[block] = part.mul_(grad_outputs[0][block].unsqueeze(-1) / ctx.temperature)
            del indices, owned, log_q, log_p, of_known, known, part
        return grad, None, None, None, None, None, None, None


def _known_bytes(ids: Tensor) -> int:
    return ids.shape[-1] * _NUMBERS_PER_ID * 8


def _teacher_log_probs(values: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    return clamp_log_probs((values.to(dtype) / temperature).log_softmax(dim=-1))


def _value_and_mean(kind: str, log_q: Tensor, log_p: Tensor, mixture: float) -> tuple[Tensor, Tensor]:
    """Divergence [n], and the mean under q of its derivative with respect to log q [n], for the backward."""
    if kind == "forward":
        value = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
        return value, value  # the backward needs no mean
    if kind == "reverse":
        value = (log_q.exp() * (log_q - log_p)).sum(dim=-1)
        return value, value
    log_sum, constant = _log_sum(log_q, log_p, mixture), -math.log1p(-mixture)
    part_p = constant + (log_p.exp() * (log_p - log_sum)).sum(dim=-1)
    part_q = constant + (log_q.exp() * (log_q - log_sum)).sum(dim=-1)
    return mixture * part_p + (1 - mixture) * part_q, part_q


def _log_sum(log_q: Tensor, log_p: Tensor, mixture: float) -> Tensor:
    """log(b / (1 - b) p + q)."""
    return torch.logaddexp(log_p + (math.log(mixture) - math.log1p(-mixture)), log_q)


def _gradient_of_known(kind: str, log_q: Tensor, log_p: Tensor, mean: Tensor, mixture: float) -> Tensor:
    """Additional gradient at the known ids, [n, K], to be added to `_gradient_of_all`."""
    if kind == "forward":
        return log_p.exp().neg_()
    if kind == "reverse":
        return log_q.exp() * (log_q - log_p - mean)
    return log_q.exp() * (log_q - _log_sum(log_q, log_p, mixture)) * (1 - mixture)


def _gradient_of_all(
    kind: str, logits: Tensor, block: Block, normalizer: Tensor, mean: Tensor, temperature: float, mixture: float
) -> Tensor:
    """Gradient with respect to the scaled logits if no column were a known id, [n, C]."""
    if kind == "reverse":
        return torch.zeros_like(logits[block], dtype=normalizer.dtype, memory_format=torch.contiguous_format)
    probability = block_log_probs(logits[block], normalizer[block], temperature).exp_()
    if kind == "forward":
        return probability
    return probability.mul_((-math.log1p(-mixture) - mean[block]).unsqueeze(-1) * (1 - mixture))
