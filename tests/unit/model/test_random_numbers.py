"""Noise on embeddings: its size and distribution, and what it depends on. No process group."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from megatron_wrap.model.random_numbers import EmbeddingNoise, noise_added

HIDDEN = 64


def of_rows(input_ids: Tensor, lengths: list[int], alpha: float = 5.0) -> EmbeddingNoise:
    rows = torch.arange(len(input_ids))[:, None].expand(input_ids.shape)
    columns = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
    noise: EmbeddingNoise = EmbeddingNoise.of(input_ids, rows, columns, torch.tensor(lengths), alpha, HIDDEN)
    return noise


def values(noise: EmbeddingNoise) -> Tensor:
    return noise.add_to(torch.zeros(*noise.keys.shape, HIDDEN))


def test_noise_is_uniform_with_the_magnitude_of_neftune():
    """alpha / sqrt(L * d) with the tokens L of the sequence, as trl's and transformers' NEFTune; nothing on padding."""
    ids = torch.randint(1000, (3, 512), generator=torch.Generator().manual_seed(0))
    lengths = [512, 100, 1]
    of_tokens = values(of_rows(ids, lengths))
    for row, length in zip(of_tokens, lengths, strict=True):
        bound = 5.0 / math.sqrt(length * HIDDEN)
        assert row[:length].abs().max() < bound
        assert not row[length:].any()
    bound = 5.0 / math.sqrt(512 * HIDDEN)
    scaled = (of_tokens[0] / bound).flatten().double()
    assert scaled.abs().max() > 0.999
    assert abs(float(scaled.mean())) < 0.02
    torch.testing.assert_close(float(scaled.square().mean()), 1 / 3, rtol=0.02, atol=0)
    neighbors = (scaled[1:] * scaled[:-1]).mean()  # not correlated
    assert abs(float(neighbors)) < 0.01


def test_noise_depends_on_the_sequence_its_positions_and_the_step_alone():
    ids = torch.randint(1000, (2, 12), generator=torch.Generator().manual_seed(1))
    both = of_rows(ids, [12, 7])
    expected = values(both)
    wider = torch.nn.functional.pad(ids.flip(0), (0, 5), value=999)  # another order, other padding
    assert torch.equal(values(of_rows(wider, [7, 12])).flip(0)[:, :12], expected)
    packed_ids = torch.cat([ids[0], ids[1, :7]])[None]
    rows = torch.tensor([[0] * 12 + [1] * 7])
    columns = torch.tensor([[*range(12), *range(7)]])
    packed = values(EmbeddingNoise.of(packed_ids, rows, columns, torch.tensor([12, 7]), 5.0, HIDDEN))
    assert torch.equal(packed[0], torch.cat([expected[0], expected[1, :7]]))
    other = ids.clone()
    other[0, 11] += 1
    changed = values(of_rows(other, [12, 7]))
    assert torch.equal(changed[1], expected[1])
    assert not torch.isclose(changed[0], expected[0]).any(dim=-1).all()
    assert not torch.equal(values(replace(both, step_key=1)), expected)
    torch.testing.assert_close(values(of_rows(ids, [12, 7], alpha=10.0)), 2 * expected)


def test_it_is_added_within_the_block_to_whole_rows_or_to_a_rank_s_part():
    class Group:
        size, rank = staticmethod(lambda: 2), staticmethod(lambda: 1)

    class Embedding(torch.nn.Module):
        def __init__(self, of_rank: bool) -> None:
            super().__init__()
            self.reduce_scatter_embeddings, self.tp_group = of_rank, Group
            self.table = torch.nn.Parameter(torch.randn(1000, HIDDEN, generator=torch.Generator().manual_seed(3)))

        def forward(self, ids: Tensor) -> Tensor:
            rows = self.table[ids]
            return rows.transpose(0, 1).chunk(2)[1] if self.reduce_scatter_embeddings else rows

    ids = torch.randint(1000, (2, 12))
    noise = of_rows(ids, [12, 9])
    whole, part = Embedding(False), Embedding(True)
    with noise_added(whole, noise), noise_added(part, noise):
        noisy = whole(ids)
        torch.testing.assert_close(noisy, whole.table[ids] + values(noise))
        torch.testing.assert_close(part(ids).transpose(0, 1), noisy[:, 6:])
    assert torch.equal(whole(ids), whole.table[ids])
    noisy.sum().backward()
    assert torch.equal(whole.table.grad, torch.zeros(1000, HIDDEN).index_add_(0, ids.flatten(), torch.ones(24, HIDDEN)))
