"""Operations on vocabulary-parallel logits on real ranks, compared with torch on the full vocabulary in float64."""

from __future__ import annotations

import _ops_runs
import pytest
import torch


@pytest.mark.parametrize("dtype", list(_ops_runs.TOLERANCES), ids=str)
@pytest.mark.parametrize("vocabulary", list(_ops_runs.VOCABULARIES))
@pytest.mark.parametrize("size", [1, 2, 4])
def test_values_and_gradients_agree_with_torch(size: int, vocabulary: str, dtype: torch.dtype, ranks):
    names = ranks(size).run(_ops_runs.compare, *_ops_runs.VOCABULARIES[vocabulary], dtype)
    assert len(set(names[0])) == 11 + 2 * 3 * 3
    assert all(other == names[0] for other in names)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_finds_the_same_ids(size: int, ranks):
    measured = ranks(size).run(_ops_runs.ids_of_top_k, 12)
    assert all(ids == measured[0] for ids in measured)


@pytest.mark.parametrize("chunk_bytes", [1, 4096])
def test_small_chunks_give_the_same_results(chunk_bytes: int, ranks):
    ranks(2).run(_ops_runs.compare_with_chunks, chunk_bytes)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_backward_of_collectives_is_their_adjoint(size: int, ranks):
    ranks(size).run(_ops_runs.adjoints)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_gathered_sequence_is_ordered_and_its_backward_is_the_adjoint(size: int, ranks):
    ranks(size).run(_ops_runs.sequence_adjoint)
