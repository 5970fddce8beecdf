"""Every layout trains like one rank from initial weights: losses, token counts, gradient norms and gradients."""

from __future__ import annotations

import layout_runs
import numpy
import pytest
from _covering import covering
from layout_runs import LAYOUTS, Layout

STEPS = 3


@pytest.fixture(scope="module")
def one_rank(ranks):
    return ranks(1).run(layout_runs.train, (), STEPS)[0]


@pytest.mark.parametrize(
    ("layout", "micro_batch_size"), covering((layout, size) for layout in LAYOUTS for size in (1, 2))
)
def test_a_layout_trains_like_one_rank(layout: Layout, micro_batch_size: int, one_rank, ranks):
    overrides = (*layout.overrides, f"megatron_lm.train.common.micro_batch_size={micro_batch_size}")
    of_ranks = ranks(layout.processes).run(layout_runs.train, overrides, STEPS)
    actual = of_ranks[0]
    for other in of_ranks[1:]:  # the metrics are the same on every rank
        assert [other[name] for name in ("losses", "tokens", "grad_norms")] == [
            actual[name] for name in ("losses", "tokens", "grad_norms")
        ]
    assert actual["tokens"] == one_rank["tokens"]
    numpy.testing.assert_allclose(actual["losses"], one_rank["losses"], rtol=1e-5)
    numpy.testing.assert_allclose(actual["grad_norms"], one_rank["grad_norms"], rtol=1e-5)
    assert actual["gradients"].keys() == one_rank["gradients"].keys()
    for name, expected in one_rank["gradients"].items():
        difference = numpy.linalg.norm(actual["gradients"][name] - expected)
        assert difference <= 1e-4 * numpy.linalg.norm(expected), name


def test_no_gradient_is_too_small_to_compare(one_rank):
    """Otherwise any value would be within the tolerance."""
    assert all(numpy.linalg.norm(gradient) > 1e-4 for gradient in one_rank["gradients"].values())
    assert len(one_rank["gradients"]) == 3 + 4 * 6  # embedding, output layer, final norm; six per layer


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_messages_that_overlap_with_computation_change_no_bit(stages, ranks):
    layout = (
        "megatron_lm.model.arch.num_layers=8",
        f"megatron_lm.model.parallel.pipeline_model_parallel_size={stages}",
        "megatron_lm.model.parallel.virtual_pipeline_model_parallel_size=2",
        "megatron_lm.train.common.micro_batch_size=1",
    )
    overlapped, waiting = (
        ranks(stages).run(layout_runs.train, layout, 2, overlaps_stages=overlaps) for overlaps in (True, False)
    )
    for ours, theirs in zip(overlapped, waiting, strict=True):
        assert (ours["losses"], ours["grad_norms"]) == (theirs["losses"], theirs["grad_norms"])
        assert ours["gradients"].keys() == theirs["gradients"].keys()
        assert all(numpy.array_equal(theirs["gradients"][name], value) for name, value in ours["gradients"].items())


SHIPPED = tuple(
    f"megatron_lm.model.arch.{size}" for size in ("hidden_size=256", "ffn_hidden_size=704", "vocab_size=4096")
)


@pytest.fixture(scope="module")
def shipped_on_one_rank(ranks):
    return ranks(1).run(layout_runs.train, SHIPPED, STEPS, False)[0]


@pytest.mark.parametrize(
    "layout",
    covering(
        (layout for layout in LAYOUTS if layout.name in ("tp2-sp", "dp2", "pp2")),
        lambda layout: {layout.name} & {"tp2-sp"},  # where a norm sees a part of the sequence
    ),
)
def test_the_shipped_tiny_llama_trains_like_one_rank(layout: Layout, shipped_on_one_rank, ranks):
    """At its full size, where gradients are large enough to show rounding errors of a norm."""
    steps = ranks(layout.processes).run(layout_runs.train, (*SHIPPED, *layout.overrides), STEPS, False)[0]
    numpy.testing.assert_allclose(steps["losses"], shipped_on_one_rank["losses"], rtol=1e-5)
    numpy.testing.assert_allclose(steps["grad_norms"], shipped_on_one_rank["grad_norms"], rtol=1e-5)
