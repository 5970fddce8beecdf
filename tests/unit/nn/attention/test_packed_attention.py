"""Attention of packed rows by a kernel that takes boundaries. The kernel's part is computed by torch in float64, and
the result with its gradients compared with an explicit softmax over the row. Ranks are simulated in one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_wrap.parallel.zigzag import packed_positions
from megatron_wrap.platform import choose_platform

choose_platform("cpu").install()

from megatron_wrap.nn.attention.attend import attend_packed  # noqa: E402
from megatron_wrap.nn.attention.packed_sequences import PackedSequences  # noqa: E402

LENGTHS, SCALE = [8, 24, 16], 0.4


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, masked: Tensor) -> Tensor:
    """[t, heads, d]; grouped queries."""
    copies = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    return torch.einsum("hqk,khe->qhe", scores.masked_fill(masked, -torch.inf).softmax(-1), value)


def kernel(query, key, value, cu_q, cu_k, longest_q, longest_k, *, scale, window_size):
    """What torch's `varlen_attn` documents: the last query of a sequence has the position of its last key."""
    assert (scale, window_size[1]) == (SCALE, 0)
    assert query.shape[-1] == value.shape[-1]
    assert (longest_q, longest_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    outputs = []
    for sequence in range(len(cu_q) - 1):
        q, k = (slice(int(cu[sequence]), int(cu[sequence + 1])) for cu in (cu_q, cu_k))
        queries, keys = q.stop - q.start, k.stop - k.start
        distance = torch.arange(keys) - (torch.arange(queries) + keys - queries)[:, None]
        masked = distance > 0
        if window_size[0] >= 0:
            masked |= distance < -window_size[0]
        outputs.append(softmax_attention(query[q], key[k], value[k], masked))
    return torch.cat(outputs)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("window", [None, (5, 0)])
def test_each_sequence_attends_within_itself(cp_size, window):
    generator = torch.Generator().manual_seed(cp_size)
    total = sum(LENGTHS)
    shapes = [(total, 1, 4, 8), (total, 1, 2, 8), (total, 1, 2, 5)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    indices = [packed_positions(LENGTHS, cp_size, rank) for rank in range(cp_size)]
    local = [[tensor[of_rank] for tensor in inputs] for of_rank in indices]
    # what the ranks send: keys, and values that are padded to the size of the keys
    sent = [torch.cat((key, F.pad(value, (0, 3))), dim=-1).squeeze(1) for _, key, value in local]
    whole = torch.zeros(total, 1, 4, 5, dtype=torch.float64)
    for rank, of_rank in enumerate(indices):
        packed = PackedSequences.of(LENGTHS, cp_size, rank)

        def gather(tensor, rank=rank):
            assert torch.equal(tensor, sent[rank])
            return torch.cat(sent)

        output = attend_packed(*local[rank], packed, SCALE, window, gather if cp_size > 1 else None, kernel)
        whole = whole.index_put((of_rank,), output)
    document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    distance = torch.arange(total) - torch.arange(total)[:, None]
    masked = (distance > 0) | (document[:, None] != document)
    if window is not None:
        masked |= distance < -window[0]
    expected = softmax_attention(*(tensor.squeeze(1) for tensor in inputs), masked).unsqueeze(1)
    torch.testing.assert_close(whole, expected, rtol=1e-10, atol=1e-12)
    weight = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    pairs = (torch.autograd.grad((result * weight).sum(), inputs) for result in (whole, expected))
    for ours, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
