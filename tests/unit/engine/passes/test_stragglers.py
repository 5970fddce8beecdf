"""Which process is named as slow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_wrap.engine.passes import stragglers
from megatron_wrap.engine.passes.stragglers import Stragglers


class Size:
    def __init__(self, size: int, rank: int = 0) -> None:
        self.size, self.rank = size, rank


class Layout:
    def __init__(self, size: int) -> None:
        self.world, self.tp, self.cp, self.pp = Size(size, rank=1), Size(1), Size(1), Size(2)


def test_the_slowest_of_a_stage_is_named_beyond_the_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = [stragglers._Process(f"host-{rank}", stage=rank // 3) for rank in range(6)]
    monkeypatch.setattr(stragglers, "gather_objects", lambda _: processes)
    warnings: list[str] = []
    monkeypatch.setattr(stragglers.logger, "warning_rank_0", warnings.append)
    layout: Any = Layout(6)
    watch = Stragglers(layout, torch.device("cpu"), interval=4, factor=1.5)
    even = {0: 1.0, 1: 1.1, 2: 1.0, 3: 3.0, 4: 3.1, 5: 2.9}  # the last stage has the logits
    assert watch.slowest(even) is None
    assert watch.slowest({**even, 1: 1.6, 5: 5.0}) == (5, 3.05)
    assert watch.slowest({0: 2.0, 3: 1.0}) is None  # nothing to compare with
    due = []
    for step in range(12):
        watch.clock._of_step = 1.0 if step >= 2 else 100.0  # the first steps compile
        summands = watch.summands()
        if summands:
            due.append(step)
            assert [value.item() for value in summands.values()] == [0.0, 4.0, *[0.0] * 4]
        sums = {name: 4.0 * (3 if name.endswith("/5") else 1) for name in summands}
        watch.compare({**sums, "other": 1.0})
    assert due == [6, 10]
    assert len(warnings) == 2
    assert "rank 5 on host-5 is slow: its forward passes took 3.00 times as long" in warnings[0]
    assert "3 and 1 s in each of the last 4 steps" in warnings[0]
