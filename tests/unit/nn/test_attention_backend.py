"""The rule that selects the kernel of attention, with the capability of GPUs that are not here."""

import pytest
import torch

from megatron_wrap.nn.attention_backend import needs_padded_values, prefers_cudnn

HOPPER, AMPERE, ADA = (9, 0), (8, 0), (8, 9)
FULL = {
    "capability": HOPPER,
    "dtype": torch.bfloat16,
    "query_length": 4096,
    "key_length": 4096,
    "head_sizes": (64, 64),
    "dropout": 0.0,
}


def test_hopper_uses_cudnn_for_lengths_that_repeat():
    assert prefers_cudnn(**FULL)
    assert prefers_cudnn(**{**FULL, "dtype": torch.float16, "head_sizes": (256, 256)})
    assert prefers_cudnn(**{**FULL, "head_sizes": (192, 128)})  # latent attention


@pytest.mark.parametrize(
    "change",
    [
        {"capability": AMPERE},
        {"capability": ADA},
        {"dtype": torch.float32},
        {"query_length": 2048},  # a chunk of a context-parallel rank
        {"query_length": 4000, "key_length": 4000},  # a batch padded to its longest sequence
        {"head_sizes": (128, 192)},
        {"head_sizes": (192, 64)},
        {"head_sizes": (512, 512)},
        {"dropout": 0.1},
    ],
)
def test_everything_else_is_left_to_torch(change):
    assert not prefers_cudnn(**{**FULL, **change})


def test_full_attention_of_a_ring_has_other_lengths_of_queries_and_keys():
    assert prefers_cudnn(**{**FULL, "query_length": 2048}, aligned=False)
    assert not prefers_cudnn(**{**FULL, "query_length": 2000}, aligned=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_are_not_padded_on_a_cpu(dtype):
    query, value = (torch.zeros(1, 2, 8, width, dtype=dtype) for width in (192, 128))
    assert not needs_padded_values(query, query, value, None, 0.0, True)
