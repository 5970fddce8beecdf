"""Which parts of the parameters are read at once."""

from __future__ import annotations

import pytest
import torch

from megatron_wrap.bridge.loading.load_weights import _Part, _reads, _region
from megatron_wrap.bridge.mapping.tensors import column, interleaved, row, stacked, transposed

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
    assert [len(read) for read in reads] == [1, 1, EXPERTS, EXPERTS, EXPERTS]
    experts, width = (FIRST, FIRST + EXPERTS), (rank * WIDTH // size, (rank + 1) * WIDTH // size)
    both = (2 * width[0], 2 * width[1])
    expected = [(experts, (0, HIDDEN), both), (experts, both), (experts, width, (0, HIDDEN))]
    assert [_region(read) for read in reads[2:]] == expected
    assert [_region(read) for read in reads[:2]] == [((0, 2), (0, HIDDEN)), ((2, 3), (0, HIDDEN))]
    for read in reads[2:]:
        assert [part.name.split(".")[0] for part in read] == [str(expert) for expert in range(*experts)]


def test_a_read_has_at_most_the_bytes_and_at_least_an_expert():
    bytes_of_fc1 = 2 * WIDTH * HIDDEN * 4
    assert [len(read) for read in _reads(parts(), 2 * bytes_of_fc1)] == [1, 1, 2, 2, 1, EXPERTS, 4, 1]
    assert [len(read) for read in _reads(parts(), 1)] == [1] * (2 + 3 * EXPERTS)


def test_a_gap_between_experts_ends_a_read():
    without_one = (part for part in parts() if not part.name.startswith("4."))
    assert [[part.name for part in read] for read in _reads(without_one, 10**6)][2:4] == [
        ["2.fc1", "3.fc1"],
        ["5.fc1", "6.fc1"],
    ]
