"""Packing a collated micro-batch to one row, and this process's part of the row. No process group."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_wrap.engine.batches.micro_batch import (
    PACKED,
    PADDING_MASK,
    Localization,
    MicroBatch,
    filled_row,
    pack,
    padded_length,
    shard,
)
from megatron_wrap.flow.contract.base import SEQUENCE_LENGTHS
from megatron_wrap.parallel.state import Axis, ParallelState
from megatron_wrap.platform import choose_platform

choose_platform("cpu").install()

LENGTHS = [3, 6, 1, 5]
PAD = 99


def axis(size: int, rank: int = 0) -> Axis:
    return Axis(size, rank, None)  # type: ignore[arg-type]


def collated(lengths: list[int] = LENGTHS) -> MicroBatch:
    """ids 10 * sequence + position, a field [B, 2, S] and one [S, B], and fields without a sequence dimension."""
    width = max(lengths)
    positions = torch.arange(width).expand(len(lengths), width)
    ids = 10 * torch.arange(len(lengths))[:, None] + positions
    on_token = positions < torch.tensor(lengths)[:, None]
    return MicroBatch(
        model_inputs={"input_ids": ids, "position_ids": positions, "attention_mask": None},
        loss_inputs={
            "loss_mask": on_token.float(),
            "two_rows": torch.stack([ids, -ids], dim=1).float(),
            "by_token": ids.t().contiguous(),
            "weights": torch.arange(len(lengths)),
        },
        weights={"": float(sum(lengths))},
        num_samples=len(lengths),
        lengths=torch.tensor(lengths),
        width=width,
        seqdims={"input_ids": 1, "position_ids": 1, "loss_mask": 1, "two_rows": -1, "by_token": 0},
        pad_values={"input_ids": PAD},
    )


def expected_row(lengths: list[int], multiple: int) -> list[int]:
    row: list[int] = []
    for sequence, length in enumerate(lengths):
        padding = -length % multiple
        row += [10 * sequence + position for position in range(length)] + [PAD] * padding
    return row


@pytest.mark.parametrize("multiple", [1, 4, 8])
def test_sequences_are_concatenated_each_padded_to_a_multiple(multiple):
    micro_batch = collated()
    packed = pack(micro_batch, multiple)
    row = expected_row(LENGTHS, multiple)
    assert packed.model_inputs["input_ids"].tolist() == [row]
    assert packed.model_inputs["attention_mask"] is None
    assert packed.segments == tuple(padded_length(length, multiple) for length in LENGTHS)
    assert all(segment % multiple == 0 for segment in packed.segments)
    assert (packed.width, packed.num_rows, packed.num_samples) == (len(row), 1, 4)
    assert packed.lengths.tolist() == LENGTHS
    assert packed.weights == micro_batch.weights
    # padding has no loss, and positions begin with 0 in each sequence
    assert packed.loss_inputs["loss_mask"].tolist() == [[float(token != PAD) for token in row]]
    positions = [token % 10 if token != PAD else 0 for token in row]
    assert packed.model_inputs["position_ids"].tolist() == [positions]
    assert micro_batch.width == 6  # the collated micro-batch is unchanged
    assert micro_batch.model_inputs["input_ids"].shape == (4, 6)


def test_fields_with_another_sequence_dimension_are_packed_along_it_and_others_are_copied():
    packed = pack(collated(), 4)
    ids = torch.tensor(expected_row(LENGTHS, 4))
    tokens = torch.where(ids == PAD, 0, ids)  # their padding value is 0
    assert torch.equal(packed.loss_inputs["two_rows"], torch.stack([tokens, -tokens])[None].float())
    assert torch.equal(packed.loss_inputs["by_token"], tokens[:, None])
    assert packed.loss_inputs["weights"].tolist() == [0, 1, 2, 3]


def test_a_sequence_has_at_least_one_token():
    assert [padded_length(length, 4) for length in (0, 1, 4, 5)] == [4, 4, 4, 8]
    assert padded_length(0, 1) == 1


@pytest.mark.parametrize(("width", "expected"), [(12, (4, 8)), (14, (4, 8, 2)), (32, (4, 8, 8, 8, 4))])
def test_the_rest_of_a_row_forms_sequences_that_are_no_longer_than_the_others(width, expected):
    assert filled_row((4, 8), width) == expected


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_each_sequence_is_split_over_context_parallel_ranks(cp):
    multiple = 2 * cp if cp > 1 else 1
    packed = pack(collated(), multiple)
    width = packed.width + 2 * multiple
    parts = [shard(packed, width, axis(cp, rank)) for rank in range(cp)]
    row = torch.tensor([*expected_row(LENGTHS, multiple), *[PAD] * (2 * multiple)])
    start = 0
    for segment in packed.segments:
        chunks = row[start : start + segment].chunk(2 * cp if cp > 1 else 1)
        for rank, part in enumerate(parts):
            tokens = part.model_inputs["input_ids"][0, start // cp : (start + segment) // cp]
            mine = [chunks[0]] if cp == 1 else [chunks[rank], chunks[2 * cp - 1 - rank]]
            assert torch.equal(tokens, torch.cat(mine))
        start += segment
    for part in parts:
        expected = [segment // cp for segment in packed.segments] + [2 * multiple // cp]
        assert part.loss_inputs[SEQUENCE_LENGTHS].tolist() == expected
        assert sum(expected) == part.loss_inputs["loss_mask"].shape[1]
        assert part.loss_inputs["weights"].tolist() == [0, 1, 2, 3]
    assert sum(float(part.loss_inputs["loss_mask"].sum()) for part in parts) == sum(LENGTHS)


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (3, 2)])
def test_a_row_is_padded_for_the_layout_and_all_tokens_are_in_a_sequence(tp, cp):
    """A row to lcm(2 * CP, CP * TP) with sequence parallelism, by tokens without a loss at its end; the boundaries that
    attention gets cover them."""
    one_rank = axis(1)
    parallel = ParallelState(
        one_rank, axis(tp), one_rank, one_rank, axis(cp), one_rank, axis(cp), one_rank, one_rank, None
    )  # type: ignore[arg-type]
    localization = Localization(parallel, torch.device("cpu"), tp > 1, has_experts=True)
    packed = pack(collated(), 2 * cp if cp > 1 else 1)
    [local] = localization.localize([packed])
    divisor = math.lcm(2 * cp if cp > 1 else 1, cp * tp if tp > 1 else 1)
    assert local.padded_width == -(-packed.width // divisor) * divisor
    boundaries = local.model_inputs[PACKED]
    lengths = filled_row(packed.segments, local.padded_width)
    assert boundaries.lengths == lengths
    assert boundaries.cu_seqlens_q.tolist() == [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    assert boundaries.max_seqlen_q == max(lengths)
    assert boundaries.positions.shape == local.model_inputs["input_ids"].shape[1:]
    real = ~local.model_inputs[PADDING_MASK]
    assert int(real.sum()) <= sum(LENGTHS)
    assert torch.equal(real, local.model_inputs["input_ids"] != PAD)


def test_pipeline_stages_get_rows_of_one_length():
    one_rank: Any = axis(1)
    parallel = ParallelState(
        one_rank, one_rank, axis(2), one_rank, one_rank, one_rank, one_rank, one_rank, one_rank, None
    )  # type: ignore[arg-type]
    localization = Localization(parallel, torch.device("cpu"), False, has_experts=False)
    local = localization.localize([pack(collated(), 1), pack(collated([2, 2]), 1)])
    assert [row.model_inputs["input_ids"].shape for row in local] == [(1, 15), (1, 15)]
    assert [row.model_inputs[PACKED].lengths for row in local] == [(3, 6, 1, 5), (2,) * 7 + (1,)]
    assert local[1].loss_inputs[SEQUENCE_LENGTHS].tolist() == [2, 2, 11]
