"""A process whose forward passes are slow is named, without a further collective in the steps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _engine_runs import BATCH, options, started, weighted_samples

STEPS = 8


def warnings_with_a_slow_rank(folder: Path, slow: int, layout: tuple[str, ...]) -> list[str]:
    """What rank 0 logs while one rank sleeps in the loss."""
    from megatron_wrap.utils.dist_logger import logger

    warnings: list[str] = []
    patch = pytest.MonkeyPatch()
    patch.setattr(type(logger), "warning_rank_0", lambda _, text, *more: warnings.append(text))
    overrides = (*layout, "megatron_wrap.logger.straggler_interval=4", "megatron_wrap.logger.straggler_factor=2")
    try:
        with started(overrides, folder) as wrap:
            calculate_loss = wrap.state.calculate_loss

            def slowly(*arguments: Any) -> Any:
                time.sleep(0.3 * (int(os.environ["RANK"]) == slow))
                return calculate_loss(*arguments)

            wrap.state.calculate_loss = slowly
            for _ in range(STEPS):
                wrap.train(weighted_samples(BATCH))
    finally:
        patch.undo()
    return [text for text in warnings if "is slow" in text]


def test_the_slow_rank_is_named(tmp_path: Path, ranks: Callable[[int], Any]) -> None:
    [first, *_] = ranks(2).run(warnings_with_a_slow_rank, tmp_path, 1, options(micro=4))
    assert len(first) == 1
    assert first[0].startswith("rank 1 on ")
    assert first[0].endswith(" s in each of the last 4 steps")
