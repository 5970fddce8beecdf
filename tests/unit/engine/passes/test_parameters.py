"""The checksum by which copies of parameters are compared."""

import pytest
import torch

from megatron_wrap.engine.passes import parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_checksum_is_the_weighted_sum_of_the_words(dtype, monkeypatch):
    monkeypatch.setattr(parameters, "_WORDS", 3)
    values = torch.randint(0, 256, (101 * 4,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)).view(
        dtype
    )
    octets = values.view(torch.uint8).tolist()
    words = [int.from_bytes(bytes(octets[start : start + 8]), "little") for start in range(0, len(octets), 8)]
    expected = sum((2 * index + 1) * word for index, word in enumerate(words)) % 2**64
    assert parameters.checksum(values).item() % 2**64 == expected
    assert parameters.checksum(values.flip(0)) != parameters.checksum(values)


def test_any_changed_bit_changes_it():
    values = torch.randn(64)
    before = parameters.checksum(values)
    for bit in range(64 * 32):
        values.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        assert parameters.checksum(values) != before
        values.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
