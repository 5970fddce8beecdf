"""Mappings applied to tensors, compared with slicing."""

from __future__ import annotations

import pytest
import torch

from megatron_wrap.bridge.mapping import tensors as weights
from megatron_wrap.bridge.mapping.model_parameters import view_of
from megatron_wrap.bridge.mapping.tensors import Mapping


def fill(mapping: Mapping, theirs: dict[str, torch.Tensor], rank: int, size: int, extra: int = 0) -> torch.Tensor:
    shape = list(mapping.local_shape(size))
    shape[mapping.along] += extra
    local = torch.zeros(shape)
    for piece in mapping.pieces(shape, rank, size):
        part = theirs[piece.name][tuple(slice(*bounds) for bounds in piece.region)]
        view_of(local, piece, piece.region).copy_(part)
    return local


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_a_split_takes_equal_slices_of_rows_or_columns():
    whole = random(12, 10)
    assert torch.equal(fill(weights.column("w", 12, 10), {"w": whole}, 1, 3), whole[4:8])
    assert torch.equal(fill(weights.row("w", 12, 10), {"w": whole}, 1, 2), whole[:, 5:])
    assert torch.equal(fill(weights.replicated("w", 12, 10), {"w": whole}, 1, 2), whole)
    assert torch.equal(fill(weights.transposed(weights.row("w", 10, 12)), {"w": whole}, 1, 2), whole[6:].T)


@pytest.mark.parametrize("fused", [False, True])
def test_a_shard_of_a_gated_projection_contains_slices_of_gate_and_up(fused):
    gate, up = random(8, 5), -random(8, 5)
    theirs = {"gu": torch.cat([gate, up])} if fused else {"g": gate, "u": up}
    mapping = weights.gated(*(("gu", "gu") if fused else ("g", "u")), 8, 5)
    assert torch.equal(fill(mapping, theirs, 1, 2), torch.cat([gate[4:], up[4:]]))
    assert mapping.shapes() == {name: tuple(tensor.shape) for name, tensor in theirs.items()}


@pytest.mark.parametrize("fused", [False, True])
def test_query_key_value_rows_are_ordered_by_group(fused):
    heads, groups, width = 6, 2, 3
    q, k, v = random(18, 4), random(6, 4) + 10, random(6, 4) + 20
    theirs = {"qkv": torch.cat([q, k, v])} if fused else {"q": q, "k": k, "v": v}
    mapping = weights.query_key_value(*(("qkv",) * 3 if fused else "qkv"), heads, groups, width, 4)
    by_group = [torch.cat([q[9 * g : 9 * g + 9], k[3 * g : 3 * g + 3], v[3 * g : 3 * g + 3]]) for g in range(2)]
    assert torch.equal(fill(mapping, theirs, 0, 1), torch.cat(by_group))
    assert torch.equal(fill(mapping, theirs, 1, 2), by_group[1])
    assert mapping.shapes() == {name: tuple(tensor.shape) for name, tensor in theirs.items()}


def test_padding_of_a_vocabulary_is_not_written():
    whole = random(7, 2)
    mapping = weights.vocabulary("w", 7, 2)
    parts = [mapping.pieces((4, 2), rank, 3) for rank in range(3)]
    assert [[piece.region[0] for piece in rank_pieces] for rank_pieces in parts] == [[(0, 4)], [(4, 7)], []]
    local = torch.full((4, 2), 9.0)
    [piece] = parts[1]
    view_of(local, piece, piece.region).copy_(whole[4:7])
    assert torch.equal(local, torch.cat([whole[4:], torch.full((1, 2), 9.0)]))


def test_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"\(5, 10\)"):
        weights.column("w", 12, 10).pieces((5, 10), 0, 2)
