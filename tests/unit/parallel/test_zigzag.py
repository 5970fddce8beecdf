"""The zig-zag split of a sequence over context-parallel ranks."""

import pytest
import torch

from megatron_wrap.errors import LayoutError
from megatron_wrap.parallel.zigzag import chunks_of, merge, packed_positions, pad_to, sequence_divisor


def positions(length: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    return packed_positions([length], cp_size, cp_rank)


def test_positions_of_each_rank():
    assert positions(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert positions(8, 2, 1).tolist() == [2, 3, 4, 5]
    assert positions(5, 1, 0).tolist() == [0, 1, 2, 3, 4]
    assert positions(24, 3, 2).tolist() == [8, 9, 10, 11, 12, 13, 14, 15]
    assert chunks_of(1, 0) == (0,)
    assert chunks_of(4, 1) == (1, 6)


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_merge_restores_the_order(cp_size, dim):
    whole = torch.randn(24, 48, 24)
    indices = [positions(whole.shape[dim], cp_size, rank) for rank in range(cp_size)]
    assert {len(of_rank) for of_rank in indices} == {whole.shape[dim] // cp_size}
    assert torch.equal(merge([whole.index_select(dim, of_rank) for of_rank in indices], dim), whole)


def test_every_sequence_of_a_row_is_split_on_its_own():
    assert packed_positions([4, 8], 2, 0).tolist() == [0, 3, 4, 5, 10, 11]
    assert packed_positions([4, 8], 2, 1).tolist() == [1, 2, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("tp_size", "cp_size", "sequence_parallel", "divisor"),
    [(1, 1, False, 1), (4, 1, False, 1), (4, 1, True, 4), (1, 2, False, 4), (3, 2, True, 12), (4, 2, True, 8)],
)
def test_sequence_divisor(tp_size, cp_size, sequence_parallel, divisor):
    assert sequence_divisor(tp_size, cp_size, sequence_parallel) == divisor
    local = divisor // cp_size  # the shortest sequence that can be split
    assert cp_size == 1 or local % 2 == 0
    assert not sequence_parallel or local % tp_size == 0


def test_pad_to_appends_the_value():
    padded = pad_to(torch.ones(2, 3, dtype=torch.int64), 1, 5, 7)
    assert padded.dtype == torch.int64
    assert padded.tolist() == [[1, 1, 1, 7, 7]] * 2
    full = torch.ones(2, 3)
    assert pad_to(full, 0, 2, 0) is full


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: positions(10, 2, 0), "sequence of 10 .* context_parallel_size = 4 .* pad it to 12"),
        (lambda: positions(8, 2, 2), "rank 2 is not in a group of 2"),
        (lambda: merge([torch.zeros(4), torch.zeros(6)], 0), r"lengths \[4, 6\]"),
        (lambda: merge([], 0), "0 context-parallel parts"),
        (lambda: pad_to(torch.zeros(8), 0, 4, 0), "length 8 along dimension 0 .* to 4"),
    ],
)
def test_invalid_lengths_and_ranks_are_refused(call, message):
    with pytest.raises(LayoutError, match=message):
        call()
