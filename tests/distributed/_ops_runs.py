"""Functions that the tests of `megatron_wrap.ops` run on each rank: results on vocabulary shards, compared with torch's
on the full vocabulary."""

from __future__ import annotations

import functools
from collections.abc import Callable
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


KINDS = [(kind, temperature) for kind in ("forward", "reverse", "jensen_shannon") for temperature in (1.0, 0.3, 2.0)]


def ours(student: Tensor, teacher: Tensor, ids: Tensor, group: Any) -> dict[str, Callable[[], Tensor]]:
    """Name of each operation -> its result on this rank's columns, which is differentiable."""
    first = ids[..., 0]

    def smoothed() -> Tensor:
        terms = ops.token_terms(student, first, group)
        return -0.9 * terms.log_probs - 0.1 * terms.mean_log_probs + 1e-2 * terms.logsumexp**2

    def divergence(known: Any, kind: str, temperature: float) -> Tensor:
        known = ops.top_k(teacher.detach(), K, group) if known == "top-k" else teacher
        return ops.kl_divergence(student, known, kind, temperature, group)

    return {
        "token_log_probs": lambda: ops.token_log_probs(student, first, group),
        "log_probs_and_entropy": lambda: torch.stack(ops.log_probs_and_entropy(student, first, group)),
        "gather_log_probs": lambda: ops.gather_log_probs(student, ids, group),
        "entropy": lambda: ops.entropy(student, group),
        "vocabulary_max": lambda: ops.vocabulary_max(student, group),
        "top_k": lambda: ops.top_k(student, K, group).values,
        "logsumexp": lambda: ops.logsumexp(student, group),
        "mean_log_probs": lambda: ops.mean_log_probs(student, group),
        "gather_logits": lambda: ops.gather_logits(student, ids, group),
        "top_k_log_probs": lambda: ops.top_k_log_probs(student, K, group).values,
        "label smoothing and z-loss": smoothed,
        **{f"{kind} T={t}": functools.partial(divergence, "all", kind, t) for kind, t in KINDS},
        **{f"{kind} of top-k T={t}": functools.partial(divergence, "top-k", kind, t) for kind, t in KINDS},
    }


def of_torch(student: Tensor, teacher: Tensor, ids: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The same on the full vocabulary by torch."""
    first, known = ids[..., 0], teacher.detach().topk(K)
    log_probs = student.log_softmax(-1)

    def entropy(logits: Tensor) -> Tensor:
        return torch.distributions.Categorical(logits=logits).entropy()

    def smoothed() -> Tensor:
        losses = F.cross_entropy(student.flatten(0, 1), first.flatten(), label_smoothing=0.1, reduction="none")
        return losses.view(student.shape[:-1]) + 1e-2 * student.logsumexp(-1) ** 2

    def of_first() -> Tensor:
        return log_probs.gather(-1, first[..., None]).squeeze(-1)

    return {
        "token_log_probs": of_first,
        "log_probs_and_entropy": lambda: torch.stack((of_first(), entropy(student.detach()))),
        "gather_log_probs": lambda: log_probs.gather(-1, ids),
        "entropy": lambda: entropy(student),
        "vocabulary_max": lambda: student.max(dim=-1).values,
        "top_k": lambda: student.topk(K).values,
        "logsumexp": lambda: student.logsumexp(-1),
        "mean_log_probs": lambda: log_probs.mean(-1),
        "gather_logits": lambda: student.gather(-1, ids),
        "top_k_log_probs": lambda: log_probs.topk(K).values,
        "label smoothing and z-loss": smoothed,
        **{f"{kind} T={t}": functools.partial(reference_divergence, student, teacher, kind, t) for kind, t in KINDS},
        **{
            f"{kind} of top-k T={t}": functools.partial(reference_top_k_divergence, student, *known, kind, t)
            for kind, t in KINDS
        },
    }


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
    for name in ours(*wholes, ids, group):
        parts = [
            F.pad(whole, (0, padded - vocabulary), value=torch.finfo(dtype).min / 2)[..., mine].clone().requires_grad_()
            for whole in wholes
        ]
        wide = [whole.double().clone().requires_grad_() for whole in wholes]
        measured, expected = ours(*parts, ids, group)[name](), of_torch(*wide, ids)[name]()
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
