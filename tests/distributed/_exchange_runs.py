"""Functions that the tests of `cp_comm_type` run on each rank."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from _started import started, train_until
from layout_runs import CONFIG, token_samples
from torch import Tensor

from megatron_wrap.parallel.zigzag import packed_positions

KEY = "megatron_lm.model.parallel.cp_comm_type"


class ShortLivedMemory:
    """`PeerMemory` for processes without GPUs: what has arrived is nan as soon as it is no longer valid."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size, self.regions = group.rank(), group.size(), {}
        self.exchanges = 0

    def exchange(
        self, purpose: str, shape: tuple[int], dtype: torch.dtype, *, sources: list[int], targets: list[int]
    ) -> _Exchange:
        region = self.regions.setdefault(purpose, torch.empty(self.size, *shape, dtype=dtype))
        region[sources[0]] = torch.nan
        self.exchanges += 1
        return _Exchange(region, sources[0], targets[0])


class _Exchange:
    def __init__(self, region: Tensor, source: int, target: int) -> None:
        self.region, self.source, self.target = region, source, target

    def send(self, target: int, *tensors: Tensor, produced: bool) -> None:
        assert target == self.target
        assert all(tensor.is_contiguous() for tensor in tensors)
        self.sent = torch.full_like(self.region[0], torch.nan)
        joined = torch.cat([tensor.flatten() for tensor in tensors])
        self.sent[: len(joined)] = joined
        self.received = torch.empty_like(self.sent)
        self.transfers = [dist.isend(self.sent, target), dist.irecv(self.received, self.source)]

    def finish(self) -> Tensor:
        for transfer in self.transfers:
            transfer.wait()
        self.region[self.source] = self.received
        return self.region


def ring_and_softmax(
    lengths: Sequence[int],
    rows: int,
    dtype: torch.dtype,
    causal: bool,
    value_width: int,
    with_sinks: bool,
    short_lived: bool = False,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Output and gradients of the ring of all ranks, and of a softmax in float64 over scores of 6 heads in 2 groups.

    Args:
        lengths: of the sequences in a packed row; one: unpacked, in each of `rows`.
        short_lived: what arrives is overwritten as with `PeerMemory`, also by another layer between both passes.
    """
    from megatron_wrap.nn.attention.packed_sequences import PackedSequences
    from megatron_wrap.nn.attention.ring import attend_in_ring
    from megatron_wrap.parallel import collectives

    group, scale = dist.group.WORLD, 0.4
    generator, tokens = torch.Generator().manual_seed(5), sum(lengths)
    shapes = {"query": (6, 8), "key": (2, 8), "value": (2, value_width), "weight": (6, value_width)}
    whole = {
        name: torch.randn(tokens, rows, *shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in shapes.items()
    }
    sinks = torch.randn(6, generator=generator, dtype=torch.float64).to(dtype) if with_sinks else None
    positions = packed_positions(lengths, group.size(), group.rank())
    local = {name: tensor[positions].requires_grad_(name != "weight") for name, tensor in whole.items()}
    own_sinks = None if sinks is None else sinks.clone().requires_grad_()
    packed = PackedSequences.of(lengths, group.size(), group.rank()) if len(lengths) > 1 else None
    inputs = [local[name] for name in ("query", "key", "value")]
    memory = ShortLivedMemory(group)
    peers = mock.patch.object(collectives, "peer_memory", return_value=memory)
    with peers if short_lived else contextlib.nullcontext():
        ours = attend_in_ring(*inputs, group, causal=causal, scale=scale, sinks=own_sinks, packed=packed)
        if short_lived:
            with torch.no_grad():
                attend_in_ring(*inputs, group, causal=causal, scale=2 * scale, packed=packed)
        (ours * local["weight"]).sum().backward()
    # keys in both forward passes and again in the backward pass but for the last ones, and gradients
    assert memory.exchanges == (4 * group.size() - 5 if short_lived else 0)

    wide = {name: tensor.double().requires_grad_() for name, tensor in whole.items()}
    wide_sinks = None if sinks is None else sinks.double().requires_grad_()
    expected = _softmax(wide, wide_sinks, lengths, causal, scale)
    (expected * wide["weight"]).sum().backward()
    results = {"output": (ours.detach(), expected.detach()[positions])}
    results |= {name: (local[name].grad, wide[name].grad[positions]) for name in ("query", "key", "value")}
    if own_sinks is not None:  # each rank has a part of the queries
        dist.all_reduce(own_sinks.grad)
        results["sinks"] = own_sinks.grad, wide_sinks.grad
    return results


def _softmax(
    whole: dict[str, Tensor], sinks: Tensor | None, lengths: Sequence[int], causal: bool, scale: float
) -> Tensor:
    key, value = (whole[name].repeat_interleave(3, dim=2) for name in ("key", "value"))
    scores = torch.einsum("qbhd,kbhd->bhqk", whole["query"], key) * scale
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    masked = sequence != sequence[:, None]
    if causal:
        masked |= torch.ones_like(masked).triu(1)
    scores = scores.masked_fill(masked, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), dim=-1)
    return torch.einsum("bhqk,kbhe->qbhe", scores.softmax(-1)[..., : len(key)], value)


def train(overrides: tuple[str, ...], steps: int) -> dict[str, Any]:
    """Train up to `steps`, from the last checkpoint if there is one, and save.

    Returns:
        the losses, the loss of an evaluation, generated tokens; cp_comm_type, what set it, and what each layer
        exchanges.
    """
    from megatron_wrap.nn.attention.torch_attention import TorchCoreAttention

    with started(CONFIG, overrides) as wrap:
        size = wrap.global_batch_size
        samples = token_samples(size * steps, wrap.config.train.seq_length)
        losses = [step["loss"] for step in train_until(wrap, samples, steps)]
        if wrap.config.train.save is not None:
            wrap.save()
        modules = [module for chunk in wrap.state.chunks for module in chunk.modules()]
        return {
            "losses": losses,
            "evaluation": wrap.evaluate({"samples": samples[:size]}),
            "generated": [
                completion["token_ids"] for completion in wrap.generate([[3, 4, 5], [6, 7]], max_new_tokens=6)
            ],
            "value": wrap.config.parallel.cp_comm_type,
            "set by": wrap.config.set_by(KEY).name,
            "exchanges": [core.exchange for core in modules if isinstance(core, TorchCoreAttention)],
        }
