"""Which kernels run, on machines whose GPU and Triton are substituted."""

import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_wrap.nn.kernels import available
from megatron_wrap.nn.kernels.available import can_load_tiles, fills_expert_tiles


@pytest.fixture
def substitute(monkeypatch):
    def substitute(triton="3.6.0", capability=(9, 0)):
        monkeypatch.setattr(available, "has_triton", lambda: triton is not None)
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=triton))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        available._loads_tiles.cache_clear()

    yield substitute
    available._loads_tiles.cache_clear()


@pytest.mark.parametrize(
    ("machine", "loads"),
    [
        ({}, True),
        ({"triton": "3.10.1+git1234"}, True),
        ({"triton": "3.5.1"}, False),
        ({"triton": None}, False),
        ({"capability": (8, 0)}, False),
        ({"capability": (10, 0)}, False),
    ],
)
def test_tiles_are_loaded_on_hopper_by_a_new_triton(substitute, machine, loads):
    substitute(**machine)
    assert can_load_tiles(torch.zeros(3, 16, dtype=torch.bfloat16)) == loads


def test_rows_of_tiles_are_aligned(substitute):
    substitute()
    assert can_load_tiles(torch.zeros(3, 8, dtype=torch.bfloat16))
    assert not can_load_tiles(torch.zeros(3, 12, dtype=torch.bfloat16))
    assert not can_load_tiles(torch.zeros(0, 8, dtype=torch.bfloat16))
    assert not can_load_tiles(torch.zeros(1 + 3 * 8, dtype=torch.bfloat16)[1:].view(3, 8))


@pytest.mark.parametrize(
    ("rows", "matrices", "dtype", "fills"),
    [
        (256, (2, 256, 512), torch.bfloat16, True),
        (255, (2, 256, 512), torch.bfloat16, False),  # fewer than 128 for each expert
        (256, (2, 256, 16), torch.bfloat16, False),  # an adapter's factor
        (256, (2, 256, 512), torch.float32, False),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_experts_whose_tiles_are_full(monkeypatch, substitute, rows, matrices, dtype, fills, transposed):
    substitute()
    experts, inputs, outputs = matrices
    stored = (
        torch.zeros(experts, outputs, inputs, dtype=dtype).transpose(1, 2)
        if transposed
        else torch.zeros(matrices, dtype=dtype)
    )
    assert not fills_expert_tiles(torch.zeros(rows, inputs, dtype=dtype), stored)  # on a CPU
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert fills_expert_tiles(torch.zeros(rows, inputs, dtype=dtype), stored) == fills
