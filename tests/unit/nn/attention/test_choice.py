"""The rule that selects the kernel of attention, with the capability of GPUs that are not here."""

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right

from megatron_wrap.nn.attention import choice
from megatron_wrap.nn.attention.choice import needs_padded_values, prefers_cudnn

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


@pytest.mark.parametrize(
    ("chosen", "has_flash", "queries", "mask", "padded"),
    [
        (SDPBackend.EFFICIENT_ATTENTION, True, 8, None, True),
        (SDPBackend.MATH, True, 8, None, True),
        (SDPBackend.CUDNN_ATTENTION, True, 8, None, False),  # takes both sizes
        (SDPBackend.EFFICIENT_ATTENTION, False, 8, None, False),  # the GPU has no flash attention
        (SDPBackend.EFFICIENT_ATTENTION, True, 1, None, False),  # a step of generation
        (SDPBackend.EFFICIENT_ATTENTION, True, 8, torch.ones(8, 8, dtype=torch.bool), False),
        (SDPBackend.CUDNN_ATTENTION, True, 4, causal_lower_right(4, 8), True),  # torch does not ask cuDNN
    ],
)
def test_values_are_padded_where_torch_has_flash_attention_only_for_equal_heads(
    monkeypatch, chosen, has_flash, queries, mask, padded
):
    def can_use_flash_attention(parameters):
        assert parameters.value.shape[-1] == 192
        return has_flash

    monkeypatch.setattr(choice, "_has_half_precision_on_gpu", lambda tensor: True)
    monkeypatch.setattr(choice, "can_use_flash_attention", can_use_flash_attention)
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *tensors, **named: chosen.value)
    query, key, value = torch.zeros(1, 2, queries, 192), torch.zeros(1, 2, 8, 192), torch.zeros(1, 2, 8, 128)
    assert needs_padded_values(query, key, value, mask, 0.0, mask is None) is padded
    assert not needs_padded_values(query, key, key, mask, 0.0, mask is None)
