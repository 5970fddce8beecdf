"""Functions that the tests of the fused optimizer run on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from _engine_runs import everything, started


def trained(overrides: Sequence[str], samples: Sequence[Any]) -> list[Any]:
    """A hash of the state and the losses after three steps, with separate passes and with fused clipping."""
    results = []
    for fused in ("false", "true"):
        with started((*overrides, f"megatron_lm.train.optimizer.fused_clipping={fused}")) as wrap:
            size = wrap.global_batch_size
            losses = [wrap.train(samples[start : start + size])["loss"] for start in (0, size, 2 * size)]
            copies = [getattr(part.optimizer, "copies", None) for part in wrap.state.optimizer.chained_optimizers]
            assert all(map(bool, copies)) == (fused == "true")
            results.append((everything(wrap), losses))
    return results
