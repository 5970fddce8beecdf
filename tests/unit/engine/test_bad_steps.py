"""Spikes of the loss, by robust statistics of the losses before."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from megatron_wrap.config.schema.run import BadStepsConfig
from megatron_wrap.engine.bad_steps import Spike, record_loss, spike

LOSSES = numpy.random.default_rng(4).normal(2.0, 0.1, 40).tolist()


def spike_after(losses: list[float], loss: float, **keys: Any) -> Spike | None:
    """The spike that a loss is after these losses, of which as many are kept as the settings say."""
    settings = BadStepsConfig(**{"spike_threshold": 6.0, "spike_window": 20, **keys})
    recent: list[float] = []
    for each in losses:
        record_loss(recent, each, settings.spike_window)
    assert recent == losses[-settings.spike_window :]
    return spike(settings, recent, loss)


def test_a_loss_is_compared_with_the_median_and_its_absolute_deviation():
    last = numpy.array(LOSSES[-20:])
    middle = numpy.median(last)
    spread = numpy.median(numpy.abs(last - middle)) / 0.6744897501960817  # the normal distribution's third quartile
    assert spike_after(LOSSES, middle + 5.9 * spread) is None
    refused = spike_after(LOSSES, middle + 6.1 * spread)
    assert refused is not None
    assert refused.median == pytest.approx(middle)
    assert refused.deviations == pytest.approx(6.1, rel=1e-4)


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 0.0, -1e9])
def test_no_spike_is_below_the_median_or_not_finite(loss: float):
    assert spike_after(LOSSES, loss) is None


def test_without_a_threshold_or_enough_losses_there_is_none():
    assert spike_after(LOSSES, 1e9, spike_window=41) is None
    assert spike_after(LOSSES, 1e9, spike_threshold=None) is None


def test_losses_that_hardly_differ_have_a_spread_of_a_thousandth_of_their_median():
    assert spike_after([2.0] * 20, 2.0119) is None
    assert spike_after([2.0] * 20, 2.0121) is not None
