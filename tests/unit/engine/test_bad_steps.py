"""Spikes of the loss, by robust statistics of the losses before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from megatron_wrap.config.schema.run import BadStepsConfig
from megatron_wrap.engine.bad_steps import record_good_step, spike
from megatron_wrap.engine.state.state import Progress

LOSSES = numpy.random.default_rng(4).normal(2.0, 0.1, 40).tolist()


def state(**keys: Any) -> Any:
    settings = BadStepsConfig(**{"spike_threshold": 6.0, "spike_window": 20, **keys})
    made = SimpleNamespace(config=SimpleNamespace(bad_steps=settings), progress=Progress(), bad_steps_in_a_row=0)
    for loss in LOSSES:
        record_good_step(made, loss)
    return made


def test_a_loss_is_compared_with_the_median_and_its_absolute_deviation():
    last = numpy.array(LOSSES[-20:])
    middle = numpy.median(last)
    spread = numpy.median(numpy.abs(last - middle)) / 0.6744897501960817  # the normal distribution's third quartile
    assert spike(state(), middle + 5.9 * spread) is None
    refused = spike(state(), middle + 6.1 * spread)
    assert refused is not None
    assert refused.median == pytest.approx(middle)
    assert refused.deviations == pytest.approx(6.1, rel=1e-4)


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 0.0, -1e9])
def test_no_spike_is_below_the_median_or_not_finite(loss: float):
    assert spike(state(), loss) is None


def test_without_a_threshold_or_enough_losses_there_is_none_and_nothing_is_kept():
    assert spike(state(spike_window=41), 1e9) is None
    without = state(spike_threshold=None)
    assert spike(without, 1e9) is None
    assert without.progress.recent_losses == []


def test_losses_that_hardly_differ_have_a_spread_of_a_thousandth_of_their_median():
    made = state()
    made.progress.recent_losses[:] = [2.0] * 20
    assert spike(made, 2.0119) is None
    assert spike(made, 2.0121) is not None
