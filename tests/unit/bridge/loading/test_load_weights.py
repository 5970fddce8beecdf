"""Which parts of the parameters are read at once, and where they are written."""

from __future__ import annotations

import pytest
import torch

from megatron_wrap.bridge.loading.load_weights import _copy, _Part, _reads, _region
from megatron_wrap.bridge.mapping.model_parameters import view_of
from megatron_wrap.bridge.mapping.tensors import column, interleaved, query_key_value, row, stacked, transposed

EXPERTS, HIDDEN, WIDTH = 5, 6, 4
FIRST = 2
"""Expert of this rank, which has the experts 2 to 6."""


def parts(rank=0, size=1):
    """As Megatron-Core orders the parameters of experts that are modules: expert by expert."""
    weights = {
        "fc1": (interleaved(transposed(column("gate_up", 2 * WIDTH, HIDDEN))), torch.empty(2 * WIDTH // size, HIDDEN)),
        "fc1.bias": (interleaved(column("gate_up_bias", 2 * WIDTH)), torch.empty(2 * WIDTH // size)),
        "fc2": (transposed(row("down", HIDDEN, WIDTH)), torch.empty(HIDDEN, WIDTH // size)),
    }
    dense = column("router", 3, HIDDEN).pieces((3, HIDDEN), 0, 1)[0]
    for rows in ((0, 2), (2, 3)):
        yield _Part("router", torch.empty(3, HIDDEN), False, dense, (rows, (0, HIDDEN)), is_whole=False)
    for expert in range(FIRST, FIRST + EXPERTS):
        for name, (mapping, parameter) in weights.items():
            (piece,) = stacked(mapping, expert).pieces(parameter.shape, rank, size)
            yield _Part(f"{expert}.{name}", parameter, False, piece, piece.region, is_whole=True)


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
def test_experts_of_one_tensor_are_read_at_once(rank, size):
    reads = _reads(parts(rank, size), 10**6)
    assert [len(read) for read in reads] == [2, EXPERTS, EXPERTS, EXPERTS]
    experts, width = (FIRST, FIRST + EXPERTS), (rank * WIDTH // size, (rank + 1) * WIDTH // size)
    both = (2 * width[0], 2 * width[1])
    expected = [(experts, (0, HIDDEN), both), (experts, both), (experts, width, (0, HIDDEN))]
    assert [_region(read) for read in reads] == [((0, 3), (0, HIDDEN)), *expected]
    for read in reads[1:]:
        assert [part.name.split(".")[0] for part in read] == [str(expert) for expert in range(*experts)]


def test_a_read_has_at_most_the_bytes_and_at_least_an_expert():
    bytes_of_fc1 = 2 * WIDTH * HIDDEN * 4
    assert [len(read) for read in _reads(parts(), 2 * bytes_of_fc1)] == [2, 2, 2, 1, EXPERTS, 4, 1]
    assert [len(read) for read in _reads(parts(), 1)] == [1] * (2 + 3 * EXPERTS)


def test_a_gap_between_experts_ends_a_read():
    without_one = (part for part in parts() if not part.name.startswith("4."))
    assert [[part.name for part in read] for read in _reads(without_one, 10**6)][1:3] == [
        ["2.fc1", "3.fc1"],
        ["5.fc1", "6.fc1"],
    ]


@pytest.mark.parametrize("in_one_tensor", [True, False])
def test_experts_that_are_read_at_once_are_written_as_one_by_one(in_one_tensor, monkeypatch):
    wide, copies = torch.randn(FIRST + EXPERTS, HIDDEN, 2 * WIDTH), []
    copy = torch.Tensor.copy_
    stack = torch.zeros(EXPERTS, 2 * WIDTH, HIDDEN)
    parameters = list(stack if in_one_tensor else (torch.zeros(2 * WIDTH, HIDDEN) for _ in range(EXPERTS)))
    of_fc1 = [part for part in parts() if part.name.endswith("fc1")]
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *tensors: copies.append(copy(*tensors)))
    views = [view_of(values, part.piece, part.block) for values, part in zip(parameters, of_fc1, strict=True)]
    _copy(wide[FIRST:], of_fc1, views)
    assert len(copies) == (1 if in_one_tensor else EXPERTS)
    for values, expected in zip(parameters, wide[FIRST:], strict=True):  # gate and up alternate in the file
        assert torch.equal(values, torch.cat([expected[:, 0::2], expected[:, 1::2]], 1).T)


def test_the_groups_of_a_projection_are_read_and_written_at_once():
    heads, groups, size = 6, 3, 2
    mapping = query_key_value("q", "k", "v", heads, groups, size, HIDDEN)
    tensors = {name: torch.randn(rows * size, HIDDEN) for name, rows in {"q": heads, "k": groups, "v": groups}.items()}
    parameter = torch.zeros(mapping.local_shape(1))
    pieces = mapping.pieces(parameter.shape, 0, 1)
    of_parameter = [_Part("qkv", parameter, False, piece, piece.region, is_whole=False) for piece in pieces]
    reads = _reads(of_parameter, 10**6)
    assert [_region(read)[0] for read in reads] == [(0, heads * size), (0, groups * size), (0, groups * size)]
    for read in reads:
        views = [view_of(parameter, part.piece, part.block) for part in read]
        _copy(tensors[read[0].piece.name], read, views)
    expected = [tensors[piece.name][slice(*piece.region[0])] for piece in pieces]
    assert torch.equal(parameter, torch.cat(expected))
