"""Operations on vocabulary-parallel logits over real ranks, against torch on the whole vocabulary in float64."""

from __future__ import annotations

import _ops_runs
import pytest
import torch


@pytest.mark.parametrize("dtype", list(_ops_runs.TOLERANCES), ids=str)
@pytest.mark.parametrize("vocabulary", list(_ops_runs.VOCABULARIES))
@pytest.mark.parametrize("size", [1, 2, 4])
def test_values_and_gradients_are_torchs(size: int, vocabulary: str, dtype: torch.dtype, ranks):
    names = ranks(size).run(_ops_runs.compare, *_ops_runs.VOCABULARIES[vocabulary], dtype)
    assert len(set(names[0])) == 5 + 2 * 3 * 3
    assert all(other == names[0] for other in names)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_finds_the_same_ids(size: int, ranks):
    found = ranks(size).run(_ops_runs.ids_of_top_k, 12)
    assert all(ids == found[0] for ids in found)


@pytest.mark.parametrize("chunk_bytes", [1, 4096])
def test_small_blocks_give_the_same(chunk_bytes: int, ranks):
    ranks(2).run(_ops_runs.blocks_change_nothing, chunk_bytes)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_collectives_have_their_adjoints(size: int, ranks):
    ranks(size).run(_ops_runs.adjoints)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_gathered_sequence_has_its_order_and_its_adjoint(size: int, ranks):
    ranks(size).run(_ops_runs.sequence_adjoint)
