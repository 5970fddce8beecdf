"""Which kernels run, on machines whose GPU and Triton are substituted."""

import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_wrap.nn.kernels import available
from megatron_wrap.nn.kernels.available import can_load_tiles


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
