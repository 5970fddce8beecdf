"""Functions that the tests of `megatron_wrap.ops` run on each rank: results on vocabulary shards, compared with torch's
on the full vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_wrap import ops
from megatron_wrap.parallel import zigzag
from megatron_wrap.parallel.collectives import gather_on_group, gather_sequence, sum_on_group

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2}
VOCABULARIES = {"divides": (96, 4), "does not divide": (301, 4), "whole shards of padding": (6, 32)}
"""(vocabulary size, multiple that it is padded to)"""
K = 5

Operation = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""(student logits, teacher logits, ids [B, S, K], group or None for the reference) -> a differentiable result"""


def kl(log_target: Tensor, log_input: Tensor) -> Tensor:
    return F.kl_div(log_input, log_target, reduction="none", log_target=True).sum(-1)


def reference_divergence(student: Tensor, teacher: Tensor, kind: str, temperature: float) -> Tensor:
    log_q, log_p = (student / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1)
    if kind == "forward":
        return kl(log_p, log_q)
    if kind == "reverse":
        return kl(log_q, log_p)
    log_m = ((log_p.exp() + log_q.exp()) / 2).log()
    return (kl(log_p, log_m) + kl(log_q, log_m)) / 2


def reference_top_k_divergence(student: Tensor, values: Tensor, ids: Tensor, kind: str, temperature: float) -> Tensor:
    if kind == "reverse":
        return reference_divergence(student.gather(-1, ids), values, "reverse", temperature)
    q = (student / temperature).softmax(-1)
    p = torch.zeros_like(q).scatter(-1, ids, (values / temperature).softmax(-1))
    if kind == "forward":
        return F.kl_div(q.log(), p, reduction="none").sum(-1)
    log_m = ((p + q) / 2).log()
    return (F.kl_div(log_m, p, reduction="none") + F.kl_div(log_m, q, reduction="none")).sum(-1) / 2


def smoothed_loss(student: Tensor, teacher: Tensor, ids: Tensor, group: Any) -> Tensor:
    terms = ops.token_terms(student, ids[..., 0], group)
    return -0.9 * terms.log_probs - 0.1 * terms.mean_log_probs + 1e-2 * terms.logsumexp**2


def smoothed_loss_of_torch(student: Tensor, teacher: Tensor, ids: Tensor, group: Any) -> Tensor:
    losses = F.cross_entropy(student.flatten(0, 1), ids[..., 0].flatten(), label_smoothing=0.1, reduction="none")
    return losses.view(student.shape[:-1]) + 1e-2 * student.logsumexp(-1) ** 2


def pairs() -> Iterator[tuple[str, Operation, Operation]]:
    """(name, ours on this rank's columns, torch's on the full vocabulary) of each operation."""
    yield (
        "token_log_probs",
        lambda student, teacher, ids, group: ops.token_log_probs(student, ids[..., 0], group),
        lambda student, teacher, ids, group: student.log_softmax(-1).gather(-1, ids[..., :1]).squeeze(-1),
    )
    yield (
        "log_probs_and_entropy",
        lambda student, teacher, ids, group: torch.stack(ops.log_probs_and_entropy(student, ids[..., 0], group)),
        lambda student, teacher, ids, group: torch.stack(
            (
                student.log_softmax(-1).gather(-1, ids[..., :1]).squeeze(-1),
                torch.distributions.Categorical(logits=student.detach()).entropy(),
            )
        ),
    )
    yield (
        "gather_log_probs",
        lambda student, teacher, ids, group: ops.gather_log_probs(student, ids, group),
        lambda student, teacher, ids, group: student.log_softmax(-1).gather(-1, ids),
    )
    yield (
        "entropy",
        lambda student, teacher, ids, group: ops.entropy(student, group),
        lambda student, teacher, ids, group: torch.distributions.Categorical(logits=student).entropy(),
    )
    yield (
        "vocabulary_max",
        lambda student, teacher, ids, group: ops.vocabulary_max(student, group),
        lambda student, teacher, ids, group: student.max(dim=-1).values,
    )
    yield (
        "top_k",
        lambda student, teacher, ids, group: ops.top_k(student, K, group).values,
        lambda student, teacher, ids, group: student.topk(K).values,
    )
    yield (
        "logsumexp",
        lambda student, teacher, ids, group: ops.logsumexp(student, group),
        lambda student, teacher, ids, group: student.logsumexp(-1),
    )
    yield (
        "mean_log_probs",
        lambda student, teacher, ids, group: ops.mean_log_probs(student, group),
        lambda student, teacher, ids, group: student.log_softmax(-1).mean(-1),
    )
    yield (
        "gather_logits",
        lambda student, teacher, ids, group: ops.gather_logits(student, ids, group),
        lambda student, teacher, ids, group: student.gather(-1, ids),
    )
    yield (
        "top_k_log_probs",
        lambda student, teacher, ids, group: ops.top_k_log_probs(student, K, group).values,
        lambda student, teacher, ids, group: student.log_softmax(-1).topk(K).values,
    )
    yield "label smoothing and z-loss", smoothed_loss, smoothed_loss_of_torch
    for kind in ("forward", "reverse", "jensen_shannon"):
        for temperature in (1.0, 0.3, 2.0):

            def ours(student, teacher, ids, group, kind=kind, temperature=temperature):
                return ops.kl_divergence(student, teacher, kind, temperature, group)

            def whole(student, teacher, ids, group, kind=kind, temperature=temperature):
                return reference_divergence(student, teacher, kind, temperature)

            def of_top_k(student, teacher, ids, group, kind=kind, temperature=temperature):
                known = ops.top_k(teacher.detach(), K, group)
                return ops.kl_divergence(student, known, kind, temperature, group)

            def whole_of_top_k(student, teacher, ids, group, kind=kind, temperature=temperature):
                return reference_top_k_divergence(student, *teacher.detach().topk(K), kind, temperature)

            yield f"{kind} T={temperature}", ours, whole
            yield f"{kind} of top-k T={temperature}", of_top_k, whole_of_top_k


def distinct_logits(tokens: tuple[int, ...], vocabulary: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random logits, distinct for each token in `dtype`, because the choice among equal logits is not defined."""
    ladder = torch.arange(vocabulary, dtype=torch.float64) - vocabulary // 2
    shuffled = torch.stack(
        [ladder[torch.randperm(vocabulary, generator=generator)] for _ in range(tokens[0] * tokens[1])]
    )
    spacing = 1 / 16 if dtype == torch.bfloat16 else 1 / 32
    return (shuffled.view(*tokens, vocabulary) * spacing).to(dtype)


def compare(vocabulary: int, multiple: int, dtype: torch.dtype) -> list[str]:
    """Compare values and gradients of every operation with torch's; returns the names of the operations."""
    group = dist.distributed_c10d._get_default_group()
    tolerance, size = TOLERANCES[dtype], group.size()
    padded = -(-vocabulary // (multiple * size)) * multiple * size if multiple > 4 else -(-vocabulary // size) * size
    columns = padded // size
    mine = slice(group.rank() * columns, (group.rank() + 1) * columns)
    generator = torch.Generator().manual_seed(7)
    tokens = (2, 6)
    wholes = [distinct_logits(tokens, vocabulary, dtype, generator) for _ in range(2)]
    ids = torch.randint(0, vocabulary, (*tokens, K), generator=generator)
    edges = [min(edge, vocabulary - 1) for r in range(size) for edge in (r * columns, (r + 1) * columns - 1)]
    ids[0, : len(edges), 0] = torch.tensor(edges[: tokens[1]])
    ids[1, : len(edges), 1] = torch.tensor(edges[-tokens[1] :])
    done = []
    for name, ours, reference in pairs():
        parts = [
            F.pad(whole, (0, padded - vocabulary), value=torch.finfo(dtype).min / 2)[..., mine].clone().requires_grad_()
            for whole in wholes
        ]
        wide = [whole.double().clone().requires_grad_() for whole in wholes]
        measured, expected = ours(*parts, ids, group), reference(*wide, ids, None)
        weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
        (measured.double() * weights).sum().backward()
        (expected * weights).sum().backward()
        torch.testing.assert_close(
            measured.double(), expected, rtol=tolerance, atol=tolerance, msg=(name + ": {}").format
        )
        for part, whole in zip(parts, wide, strict=True):
            assert (part.grad is None) == (whole.grad is None), name
            if part.grad is not None:
                shard = F.pad(whole.grad, (0, padded - vocabulary))[..., mine]
                torch.testing.assert_close(
                    part.grad.double(), shard, rtol=tolerance, atol=tolerance, msg=f"gradient of {name}: {{}}".format
                )
                assert not part.grad[..., max(0, vocabulary - mine.start) :].any(), f"{name}: padding has a gradient"
        done.append(name)
    return done


def ids_of_top_k(vocabulary: int) -> list[list[int]]:
    """Ids of the largest logits on this rank, compared with torch's."""
    group = dist.distributed_c10d._get_default_group()
    whole = distinct_logits((1, 3), vocabulary, torch.float32, torch.Generator().manual_seed(1))
    columns = vocabulary // group.size()
    for k in (1, 7, vocabulary):  # the last two are larger than some shards
        best = ops.top_k(whole[..., group.rank() * columns :][..., :columns], k, group)
        assert torch.equal(best.ids, whole.topk(k).indices)
        assert torch.equal(best.values, whole.topk(k).values)
    return best.ids[0].tolist()


def compare_with_chunks(chunk_bytes: int) -> None:
    """`compare` with chunks of this size, with collectives inside and outside of the chunks."""
    from megatron_wrap.ops import log_probs, vocabulary

    whole_chunk = vocabulary.CHUNK_BYTES
    vocabulary.CHUNK_BYTES = log_probs.CHUNK_BYTES = chunk_bytes
    try:
        compare(50, 4, torch.float64)
    finally:
        vocabulary.CHUNK_BYTES = log_probs.CHUNK_BYTES = whole_chunk


def adjoints() -> None:
    """Gradient of the sum of all ranks' objectives, compared with one process that has all inputs."""
    group = dist.distributed_c10d._get_default_group()
    rank, size = group.rank(), group.size()
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(size, 2, 3, 4, generator=generator, dtype=torch.float64)
    shares = torch.randn(size, 2, 3 * size, 4, generator=generator, dtype=torch.float64)
    together = inputs.clone().requires_grad_()
    whole = torch.cat(list(together), dim=1)
    sum((whole.sin() * share).sum() for share in shares).backward()
    for dim in (1, -2):
        mine = inputs[rank].clone().requires_grad_()
        gathered = gather_on_group(mine, dim, group)
        assert torch.equal(gathered, whole.detach())
        (gathered.sin() * shares[rank]).sum().backward()
        torch.testing.assert_close(mine.grad, together.grad[rank], rtol=1e-12, atol=1e-12)
    together.grad = None
    sum((together.sum(0).sin() * share[:, :3]).sum() for share in shares).backward()
    mine = inputs[rank].clone().requires_grad_()
    (sum_on_group(mine, group).sin() * shares[rank][:, :3]).sum().backward()
    torch.testing.assert_close(mine.grad, together.grad[rank], rtol=1e-12, atol=1e-12)


def sequence_adjoint() -> None:
    """Zig-zag shards gather to the ordered sequence; the backward differentiates the sum of all ranks' objectives."""
    group = dist.distributed_c10d._get_default_group()
    rank, size = group.rank(), group.size()
    generator = torch.Generator().manual_seed(5)
    for shape, dim in (((2, 8 * size), 1), ((3, 8 * size, 4), 1), ((8 * size, 3), 0), ((2, 3, 8 * size), -1)):
        whole = torch.randn(shape, generator=generator, dtype=torch.float64)
        weights = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(size)]
        positions = zigzag.packed_positions([8 * size], size, rank)
        mine = whole.index_select(dim, positions).clone().requires_grad_()
        gathered = gather_sequence(mine, dim, group)
        assert torch.equal(gathered, whole)
        # not linear along the sequence; each rank differentiates its own share of a sum
        (gathered.cumsum(dim).sin() * weights[rank]).sum().backward()
        alone = whole.clone().requires_grad_()
        (alone.cumsum(dim).sin() * sum(weights)).sum().backward()
        torch.testing.assert_close(mine.grad, alone.grad.index_select(dim, positions), rtol=1e-12, atol=1e-12)
