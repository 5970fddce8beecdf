"""`left_padded` with Megatron-Core's rotary embedding; passes without FP8."""

from types import SimpleNamespace

import pytest
import torch

from megatron_wrap.platform import choose_platform
from megatron_wrap.platform.megatron_core.generation import left_padded, without_fp8


@pytest.fixture
def installed():
    choose_platform("cpu").install()


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.core_attention = torch.nn.Identity()
        self.config = SimpleNamespace(apply_rope_fusion=True)


def test_padded_rows_get_the_angles_of_unpadded_rows_and_the_model_is_restored(installed):
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    rotary, attention = RotaryEmbedding(8, 1.0, use_cpu_initialization=True), Attention()
    chunk = torch.nn.ModuleList([rotary, attention])
    unpadded, core = rotary(12), attention.core_attention
    padding = torch.tensor([3, 0])
    seen = []

    def masked(layer, is_padding):
        seen.append((layer, is_padding.tolist()))
        return torch.nn.Identity()

    with left_padded([chunk], padding, 12, masked):
        angles = rotary(12)
        assert angles.shape == (12, 2, 1, 8)
        assert torch.equal(angles[3:, 0], unpadded[:9, 0])
        assert torch.equal(angles[:, 1], unpadded[:, 0])
        assert attention.core_attention is not core
        assert not attention.config.apply_rope_fusion
    assert seen == [(attention, [[True] * 3 + [False] * 9, [False] * 12])]
    assert torch.equal(rotary(12), unpadded)
    assert attention.core_attention is core
    assert attention.config.apply_rope_fusion


def test_a_pass_without_fp8_leaves_no_trace():
    linear = torch.nn.Linear(1, 1)
    linear.config = SimpleNamespace(fp8="hybrid")
    linear.fp8_meta, linear.fp8, linear.fp8_initialized = {"fp8_checkpoint": True}, True, True
    with without_fp8([torch.nn.ModuleList([linear, torch.nn.Identity()])]):
        assert linear.config.fp8 is None
        linear.fp8_meta["fp8_checkpoint"] = linear.fp8 = linear.fp8_initialized = False  # as Transformer Engine does
    assert (linear.config.fp8, linear.fp8, linear.fp8_initialized) == ("hybrid", True, True)
    assert linear.fp8_meta == {"fp8_checkpoint": True}
