"""The engine on real ranks: loss normalization, metrics, evaluation and forward agree with plain torch."""

from __future__ import annotations

import math

import _engine_runs as runs
import numpy
import pytest
from _agreement import assert_same_gradients
from _covering import covering, quick
from _engine_runs import options

LAYOUTS = {
    "one-rank": (1, {"micro": 1}),
    "one-rank-whole-batch": (1, {"micro": 8}),
    "dp2": (2, {"micro": 2}),
    "dp2-distributed": (2, {"micro": 1, "distributed": True}),
    "cp2": (2, {"micro": 2, "cp": 2}),
    "tp2-sp": (2, {"micro": 4, "tp": 2, "sp": True}),
    "pp2": (2, {"micro": 2, "pp": 2}),
    "pp2-vpp2": (2, {"micro": 2, "pp": 2, "layers_per_chunk": 1}),
    "cp2-dp2": (4, {"micro": 2, "cp": 2}),
    "pp2-cp2": (4, {"micro": 4, "pp": 2, "cp": 2}),
}
NORMALIZATION_SAMPLES = {"TwoTerms": runs.weighted_samples, "Pairs": runs.pairs, "PairsTwoValues": runs.pairs}
NORMALIZATION_CASES = [(layout, flow) for flow in ("TwoTerms", "Pairs") for layout in LAYOUTS]
NORMALIZATION_CASES += [(layout, "PairsTwoValues") for layout in ("one-rank", "dp2", "cp2", "pp2")]


@pytest.fixture(scope="module")
def plain(ranks):
    """Flow -> loss, metrics and gradients from plain torch."""
    return {
        name: ranks(1).run(runs.plain_torch, name, samples(), options())[0]
        for name, samples in NORMALIZATION_SAMPLES.items()
    }


@pytest.mark.parametrize(("layout", "flow"), covering(NORMALIZATION_CASES))
def test_objective_gradient_and_metrics_agree_with_plain_torch(layout, flow, plain, ranks):
    world_size, settings = LAYOUTS[layout]
    of_ranks = ranks(world_size).run(runs.step, options(flow, **settings), NORMALIZATION_SAMPLES[flow]())
    for of_rank in of_ranks:  # also on the first pipeline stages
        for name, value in plain[flow]["metrics"].items():
            assert of_rank["metrics"][name] == pytest.approx(value, rel=1e-5), name
    assert_same_gradients(of_ranks[0]["gradients"], plain[flow]["gradients"], 1e-5)


def test_a_bare_scalar_is_weighted_by_the_weight_of_its_micro_batch(ranks):
    """The flow reports the rows of its micro-batch: 2, 2 and 1 for five samples in micro-batches of two."""
    samples = runs.weighted_samples(5)
    weights = [sum(s["loss_mask"][1:]) * s["weight"] for s in samples]
    expected = (2 * sum(weights[:4]) + 1 * weights[4]) / sum(weights)
    for world_size, settings in ((1, {}), (2, {}), (2, {"cp": 2})):
        for actual in ranks(world_size).run(runs.evaluation, options("TwoTerms", **settings), samples):
            assert actual["eval/set/rows"] == pytest.approx(expected, rel=1e-6)


# ---- micro-batches, ranks and batches without loss tokens ----


def without_mask(samples, indices=None):
    return [
        {**sample, "loss_mask": [0] * len(sample["loss_mask"])} if indices is None or index in indices else sample
        for index, sample in enumerate(samples)
    ]


@pytest.mark.parametrize("layout", quick(["one-rank", "dp2", "cp2", "pp2"], ["dp2", "pp2"]))
def test_a_batch_without_weight_is_a_skipped_step(layout, ranks):
    world_size, settings = LAYOUTS[layout]
    samples = runs.weighted_samples()
    for actual in ranks(world_size).run(runs.skip, options(**settings), without_mask(samples), samples):
        first, second = actual["first"], actual["second"]
        assert (first["iteration"], first["skipped_iterations"], first["consumed_samples"]) == (1, 1, 8)
        assert math.isnan(first["loss"])
        assert (actual["unchanged"], actual["changed"]) == (True, True)
        assert (second["iteration"], second["skipped_iterations"], second["consumed_samples"]) == (2, 1, 16)
        assert second["learning_rate"] == first["learning_rate"]  # the schedule does not advance either
        assert math.isfinite(second["loss"])
        assert second["consumed_tokens"] == 2 * first["consumed_tokens"]


@pytest.mark.parametrize("layout", quick(["one-rank", "dp2", "cp2", "pp2"], ["one-rank", "cp2"]))
def test_a_term_without_weight_does_not_affect_the_other(layout, ranks):
    world_size, settings = LAYOUTS[layout]
    samples = without_mask(runs.weighted_samples())
    of_ranks = ranks(world_size).run(runs.step, options("TwoTerms", **settings), samples)
    for of_rank in of_ranks:
        metrics = of_rank["metrics"]
        assert metrics["skipped_iterations"] == 0
        assert metrics["loss"] == pytest.approx(0.03 * metrics["z_mean"], rel=1e-6)
        assert metrics["grad_norm"] > 0


@pytest.mark.parametrize("flow", [pytest.param("", marks=pytest.mark.matrix), "Shortcut"])
def test_ranks_without_loss_tokens_take_part(flow, ranks):
    """Loss tokens only in the middle half, so context-parallel rank 0 has none, with and without a graph; or only in
    the samples of one data-parallel replica."""
    whole = [{"input_ids": list(range(index, index + 49)), "loss_mask": [1] * 49} for index in range(8)]
    middle = [{**sample, "loss_mask": [int(13 <= index < 37) for index in range(49)]} for sample in whole]
    one_replica = without_mask(whole, indices=(0, 1, 4, 5))
    for samples, settings in ((middle, {"cp": 2}), (one_replica, {}), (middle, {"pp": 2})):
        expected = ranks(1).run(runs.step, options(), samples)[0]
        actual = ranks(2).run(runs.step, options(flow, **settings), samples)
        assert actual[1]["metrics"]["loss"] == pytest.approx(expected["metrics"]["loss"], rel=1e-6)
        assert_same_gradients(actual[0]["gradients"], expected["gradients"], 1e-5)


# ---- which ranks pass the samples ----


@pytest.mark.parametrize(
    "settings",
    [{}, {"pp": 2}, *(pytest.param(sizes, marks=pytest.mark.matrix) for sizes in ({"tp": 2}, {"cp": 2}))],
    ids=str,
)
def test_samples_may_be_passed_on_rank_0_only(settings, ranks):
    samples = runs.weighted_samples()
    on_all = ranks(2).run(runs.step, options(**settings), samples)[0]["metrics"]
    for rank, actual in enumerate(ranks(2).run(runs.pass_on_rank_0, options(**settings), samples)):
        for name in ("loss", "grad_norm", "consumed_tokens", "truncated_samples"):
            assert actual["metrics"][name] == on_all[name]
        missing, size, changed = actual["messages"]
        assert "[0] pass None" in missing
        assert "global_batch_size = 8 " in size
        assert "got 7" in size
        assert f"rank {rank} passes {'samples' if rank else 'None'}" in changed
        assert actual["iteration"] == 2


# ---- evaluation and forward ----

SIZES = (1, 3, 8, 11, 13)
EVALUATION_LAYOUTS = ("one-rank", "dp2", "tp2-sp", "pp2", "pp2-vpp2", "cp2", "cp2-dp2")


@pytest.fixture(scope="module")
def plain_log_probs(ranks):
    return ranks(1).run(runs.plain_log_probs, runs.weighted_samples(max(SIZES)))[0]


@pytest.mark.parametrize("layout", covering(EVALUATION_LAYOUTS))
def test_evaluation_and_outputs_agree_with_plain_torch_for_any_number_of_samples(layout, plain_log_probs, ranks):
    world_size, settings = LAYOUTS[layout]
    samples = runs.weighted_samples(max(SIZES))
    masks = [numpy.array(sample["loss_mask"][1:]) * sample["weight"] for sample in samples]
    overrides = options(**{**settings, "micro": 2})
    for of_rank in ranks(world_size).run(runs.evaluate_and_forward, overrides, samples, SIZES):
        for size, actual in zip(SIZES, of_rank["evaluations"], strict=True):
            total = sum(float(-(row * mask).sum()) for row, mask in zip(plain_log_probs[:size], masks, strict=False))
            mean = total / sum(float(mask.sum()) for mask in masks[:size])
            assert actual.keys() == {"eval/set/loss", "eval/set/truncated_samples"}
            assert actual["eval/set/loss"] == pytest.approx(mean, rel=1e-6)
        assert len(of_rank["outputs"]) == len(samples)
        for actual, log_probs, mask in zip(of_rank["outputs"], plain_log_probs, masks, strict=True):
            numpy.testing.assert_allclose(actual["log_probs"], log_probs, rtol=1e-5)
            numpy.testing.assert_allclose(actual["loss_mask"], mask, rtol=1e-6)
        assert of_rank["unchanged"]


@pytest.mark.parametrize("layout", quick(["one-rank", "dp2", "pp2-vpp2", "cp2"], ["pp2-vpp2", "cp2"]))
def test_an_evaluation_has_the_objective_of_a_step_over_the_same_samples(layout, plain, ranks):
    world_size, settings = LAYOUTS[layout]
    actual = ranks(world_size).run(runs.evaluation, options("TwoTerms", **settings), runs.weighted_samples())
    for of_rank in actual:
        for name, value in plain["TwoTerms"]["metrics"].items():
            assert of_rank[f"eval/set/{name}"] == pytest.approx(value, rel=1e-5)


# ---- norms and zeros ----

UNTIED = ("one-rank", "tp2-sp", "pp2", "dp2-distributed", "cp2")
TIED = ("one-rank", "tp2-sp", "pp2", "pp2-vpp2")


@pytest.mark.parametrize(
    ("layout", "tied"),
    covering(
        [*((layout, False) for layout in UNTIED), *((layout, True) for layout in TIED)],
        lambda case: {case[0], f"tied is {case[1]}"},
    ),
)
def test_params_norm_and_zeros_agree_with_the_gathered_parameters(layout, tied, ranks):
    world_size, settings = LAYOUTS[layout]
    samples = runs.weighted_samples()
    one_rank = ranks(1).run(runs.norms, options(tied=tied), samples)[0]
    padding = (512 - runs.VOCAB) * 64 * (1 if tied else 2)  # rows past the vocabulary have no gradient
    for actual in ranks(world_size).run(runs.norms, options(tied=tied, **settings), samples):
        metrics = actual["metrics"]
        assert metrics["params_norm"] == pytest.approx(actual["norm"], rel=1e-6)
        assert metrics["params_norm"] == pytest.approx(one_rank["norm"], rel=1e-6)
        assert metrics["num_zeros_in_grad"] == actual["zeros"] + padding == one_rank["zeros"] + padding
        assert (actual["zeros"] > 0) == (not tied)  # rows of unused tokens; in a tied model the output layer uses all
