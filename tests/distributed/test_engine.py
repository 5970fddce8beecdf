"""The engine on real ranks: the law of the loss, metrics, evaluation and forward are those of one rank, and of torch."""

from __future__ import annotations

import _engine_runs as runs
import numpy
import pytest
from _engine_runs import options

LAYOUTS = {
    "one-rank": (1, {}),
    "dp2": (2, {}),
    "dp2-distributed": (2, {"distributed": True}),
    "cp2": (2, {"cp": 2}),
    "tp2-sp": (2, {"tp": 2, "sp": True}),
    "pp2": (2, {"pp": 2}),
    "pp2-vpp2": (2, {"pp": 2, "layers_per_chunk": 1}),
    "cp2-dp2": (4, {"cp": 2}),
    "tp2-cp2": (4, {"tp": 2, "cp": 2}),
    "pp2-cp2": (4, {"pp": 2, "cp": 2}),
}
LAW_SAMPLES = {"TwoTerms": runs.weighted_samples, "Pairs": runs.pairs}


@pytest.fixture(scope="module")
def plain(ranks):
    """Objective -> loss, metrics and gradients by plain torch."""
    return {
        name: ranks(1).run(runs.plain_torch, name, samples(), options())[0] for name, samples in LAW_SAMPLES.items()
    }


def assert_same_gradients(found, expected, relative=1e-5):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        norm = numpy.linalg.norm(gradient)
        assert norm > 0
        assert numpy.linalg.norm(found[name] - gradient) <= relative * norm, name


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("flow", LAW_SAMPLES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_objective_gradient_and_metrics_are_those_of_plain_torch(layout, flow, micro, plain, ranks):
    world_size, settings = LAYOUTS[layout]
    of_ranks = ranks(world_size).run(runs.step, options(flow, micro=micro, **settings), LAW_SAMPLES[flow]())
    for of_rank in of_ranks:  # the first pipeline stages know the metrics too
        for name, value in plain[flow]["metrics"].items():
            assert of_rank["metrics"][name] == pytest.approx(value, rel=1e-5), name
    assert_same_gradients(of_ranks[0]["gradients"], plain[flow]["gradients"])
