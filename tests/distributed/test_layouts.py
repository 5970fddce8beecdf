"""Every layout trains like one rank from initial weights: losses, token counts, gradient norms and gradients."""

from __future__ import annotations

import layout_runs
import numpy
import pytest
from _agreement import assert_same_gradients
from _covering import covering, quick
from _layouts import layout

STEPS = 3
SWITCHES = {f"mbs{size}": (f"megatron_lm.train.common.micro_batch_size={size}",) for size in (1, 2)}
LAYOUTS = [
    *("dp2-mbs1", "dp2-dopt-mbs2", "tp2-nosp-mbs2", "tp2-mbs1", "pp2-mbs2", "pp2-vpp2-mbs1", "cp2-mbs2"),
    *("tp2-pp2-mbs1", "tp2-cp2-mbs2", "tp2-dp2-mbs1", "pp2-dp2-mbs2", "cp2-dp2-mbs1", "pp2-cp2-mbs2"),
    *("dp2-mbs2", "pp2-mbs1", "cp2-mbs1"),
]


@pytest.fixture(scope="module")
def one_rank(on_one_rank):
    return on_one_rank(layout_runs.train, (), STEPS)


@pytest.mark.parametrize("name", covering(LAYOUTS))
def test_a_layout_trains_like_one_rank(name: str, one_rank, ranks):
    processes, overrides = layout(name, SWITCHES)
    of_ranks = ranks(processes).run(layout_runs.train, overrides, STEPS)
    actual = of_ranks[0]
    for other in of_ranks[1:]:  # the metrics are the same on every rank
        assert {**other, "gradients": {}} == {**actual, "gradients": {}}
    assert actual["tokens"] == one_rank["tokens"]
    numpy.testing.assert_allclose(actual["losses"], one_rank["losses"], rtol=1e-5)
    numpy.testing.assert_allclose(actual["grad_norms"], one_rank["grad_norms"], rtol=1e-5)
    assert_same_gradients(actual["gradients"], one_rank["gradients"], 1e-4)


def test_no_gradient_is_too_small_to_compare(one_rank):
    """Otherwise any value would be within the tolerance."""
    assert all(numpy.linalg.norm(gradient) > 1e-4 for gradient in one_rank["gradients"].values())
    assert len(one_rank["gradients"]) == 3 + 4 * 6  # embedding, output layer, final norm; six per layer


@pytest.mark.parametrize("stages", quick(["2", "4"], ["2"]))
def test_messages_that_overlap_with_computation_change_no_bit(stages, ranks):
    processes, overrides = layout(f"pp{stages}-vpp2-mbs1", SWITCHES)
    overrides = ("megatron_lm.model.arch.num_layers=8", *overrides)
    overlapped, waiting = (
        ranks(processes).run(layout_runs.train, overrides, 2, overlaps_stages=overlaps) for overlaps in (True, False)
    )
    for ours, theirs in zip(overlapped, waiting, strict=True):
        assert (ours["losses"], ours["grad_norms"]) == (theirs["losses"], theirs["grad_norms"])
        assert_same_gradients(ours["gradients"], theirs["gradients"], 0.0)


SHIPPED = tuple(
    f"megatron_lm.model.arch.{size}" for size in ("hidden_size=256", "ffn_hidden_size=704", "vocab_size=4096")
)


@pytest.mark.parametrize("name", quick(["tp2", "dp2", "pp2"], ["tp2"]))  # where a norm sees a part of the sequence
def test_the_shipped_tiny_llama_trains_like_one_rank(name: str, on_one_rank, ranks):
    """At its full size, where gradients are large enough to show rounding errors of a norm."""
    processes, overrides = layout(name)
    steps = ranks(processes).run(layout_runs.train, (*SHIPPED, *overrides), STEPS, False)[0]
    expected = on_one_rank(layout_runs.train, SHIPPED, STEPS, False)
    numpy.testing.assert_allclose(steps["losses"], expected["losses"], rtol=1e-5)
    numpy.testing.assert_allclose(steps["grad_norms"], expected["grad_norms"], rtol=1e-5)
