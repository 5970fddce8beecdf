"""A step in parts is the step of the whole batch: bit for bit on one rank, within rounding on layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import _dpo_runs
import _engine_runs
import _grpo_runs
import numpy
import pytest
from _checkpoint_runs import BF16
from _covering import quick
from _engine_runs import everything, options, started
from _started import refusal_of, weights_of, without_measured


def parts_of(samples: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """The samples in parts of these sizes."""
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [list(samples[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def whole_and_parts(overrides: Sequence[str], samples: Sequence[Any], sizes: Sequence[int]) -> dict[str, Any]:
    """Two steps by `train`, and the same in parts; of each run the metrics, a hash of the state and the weights."""
    actual: dict[str, Any] = {}
    for kind in ("whole", "parts"):
        with started(overrides) as wrap:
            metrics, size = [], wrap.global_batch_size
            for start in (0, size):
                batch = samples[start : start + size]
                if kind == "whole":
                    metrics.append(wrap.train(batch))
                    continue
                parts = parts_of(batch, sizes)
                step_weights = wrap.count_weights(parts)
                for part in parts:
                    wrap.forward_backward(part, step_weights=step_weights)
                metrics.append(wrap.optimizer_step())
            actual[kind] = {"metrics": metrics, "state": everything(wrap), "weights": weights_of(wrap)}
    return actual


def wrong_calls(overrides: Sequence[str], samples: Sequence[Any]) -> dict[str, Any]:
    """The messages of calls in a wrong order or with wrong arguments, whether they left the state unchanged, and
    whether the step that begins again is that of `train`."""
    size = len(samples) // 2
    halves = [samples[:size], samples[size:]]
    messages: dict[str, str] = {}

    def refused(name: str, call: Any) -> None:
        messages[name] = refusal_of(call)

    with started(overrides) as wrap:
        before = everything(wrap)
        refused("nothing", wrap.optimizer_step)
        refused("size", lambda: wrap.count_weights([halves[0]]))
        refused("unit", lambda: wrap.count_weights([samples[:1], samples[1:]]))
        refused("weights", lambda: wrap.forward_backward(halves[0], step_weights={"": 1.0}))
        counted = wrap.count_weights(halves)
        refused("part", lambda: wrap.forward_backward(samples, step_weights=counted))
        wrap.forward_backward(halves[0], step_weights=counted)
        refused("train", lambda: wrap.train(samples))
        refused("missing", wrap.optimizer_step)
        refused("another", lambda: wrap.forward_backward(halves[1], step_weights=wrap.count_weights(halves)))
        unchanged = everything(wrap) == before
        for half in halves:
            wrap.forward_backward(half, step_weights=counted)
        last = wrap.optimizer_step()
        refused("late", lambda: wrap.forward_backward(halves[0], step_weights=counted))
    with started(overrides) as wrap:
        expected = wrap.train(samples)
    same = all(last[name] == expected[name] for name in ("loss", "grad_norm"))
    return {"messages": messages, "unchanged": unchanged, "same": same}


SIZES = (2, 4, 2)
OVERLAP = ("megatron_lm.misc.ddp.overlap_grad_reduce", "megatron_lm.misc.ddp.overlap_param_gather")
ARCH = "megatron_lm.model.arch"
EXPERTS = {
    f"{ARCH}.num_experts": 4,
    f"{ARCH}.moe_router_topk": 2,
    f"{ARCH}.moe_ffn_hidden_size": 48,
    f"{ARCH}.moe_router_load_balancing_type": "aux_loss",
    f"{ARCH}.moe_aux_loss_coeff": 0.1,
    f"{ARCH}.moe_z_loss_coeff": 0.05,
}
LAYOUTS = {
    "tp2": (2, {"micro": 2, "tp": 2, "sp": True}),
    "pp2": (2, {"micro": 2, "pp": 2, "tied": True}),
    "cp2": (2, {"micro": 2, "cp": 2}),
    "dp2": (2, {"micro": 1}),
    "dp2-distributed": (2, {"micro": 1, "distributed": True}),
    "dp2-overlap": (2, {"micro": 1, "distributed": True, OVERLAP[0]: True, OVERLAP[1]: True}),
    "pp2-vpp2": (2, {"micro": 1, "pp": 2, "layers_per_chunk": 1}),
}


def samples():
    return _engine_runs.weighted_samples(16)


@pytest.mark.parametrize(
    ("flow", "settings", "sizes"),
    [
        ("TwoTerms", {}, (2, 3, 3)),
        ("TwoTerms", EXPERTS, (5, 2, 1)),
        ("RelativeLengthFlow", {}, (2, 3, 3)),
    ],
    ids=["two terms", "losses of routers", "statistics of the step"],
)
def test_three_parts_are_one_step_bit_for_bit(flow, settings, sizes, ranks):
    (actual,) = ranks(1).run(whole_and_parts, options(flow, micro=1, **settings), samples(), sizes)
    assert_equal_bit_for_bit(actual)


POLICY = (*_grpo_runs.GRPO, *options(micro=1))
KL = (*_dpo_runs.COPY, "megatron_wrap.flow.beta=0.1")
ENTROPIES = ("megatron_wrap.flow.top_entropy_quantile=0.5", "megatron_wrap.flow.entropy_coefficient=0.01")
"""The quantile is a statistic of the model's outputs."""


@pytest.mark.parametrize(
    ("overrides", "make_samples", "sizes"),
    [
        pytest.param((*POLICY, *ENTROPIES, *KL, *BF16), lambda: _grpo_runs.rollouts(16), (3, 5), id="all of them"),
        pytest.param((*options("TwoTerms", micro=1), *BF16), samples, (2, 3, 3), id="bf16", marks=pytest.mark.matrix),
        pytest.param(
            (*_dpo_runs.DPO, *_dpo_runs.COPY, *options(micro=1)),
            lambda: _dpo_runs.pairs(8),
            (1, 3),
            id="reference",
            marks=pytest.mark.matrix,
        ),
        pytest.param(POLICY, lambda: _grpo_runs.rollouts(16), (3, 3, 2), id="groups", marks=pytest.mark.matrix),
        pytest.param(
            (*POLICY, *ENTROPIES),
            lambda: _grpo_runs.rollouts(16),
            (5, 2, 1),
            id="values of outputs",
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_parts_are_one_step_with_half_precision_reference_and_values_of_outputs(overrides, make_samples, sizes, ranks):
    (actual,) = ranks(1).run(whole_and_parts, overrides, make_samples(), sizes)
    assert_equal_bit_for_bit(actual)


def assert_equal_bit_for_bit(actual):
    whole, parts = actual["whole"], actual["parts"]
    assert parts["state"] == whole["state"]
    for of_parts, expected in zip(parts["metrics"], whole["metrics"], strict=True):
        assert of_parts.keys() == expected.keys()
        assert without_measured(of_parts) == without_measured(expected)
    assert whole["metrics"][0]["grad_norm"] > 0


@pytest.mark.parametrize("layout", quick(LAYOUTS, ["tp2", "cp2", "dp2-overlap", "pp2-vpp2"]))
def test_three_parts_are_one_step_on_layouts(layout, ranks):
    world_size, settings = LAYOUTS[layout]
    sizes = (4, 4) if layout in ("cp2", "tp2") else SIZES
    for actual in ranks(world_size).run(whole_and_parts, options("TwoTerms", **settings), samples(), sizes):
        whole, parts = actual["whole"], actual["parts"]
        for of_parts, expected in zip(parts["metrics"], whole["metrics"], strict=True):
            assert of_parts.keys() == expected.keys()
            for name in ("loss", "grad_norm", "z_mean", "learning_rate", "consumed_samples", "consumed_tokens"):
                assert of_parts[name] == pytest.approx(expected[name], rel=1e-6), name
        for name, weight in whole["weights"].items():
            # Adam divides by the gradient's size, so where that is rounding error, so is the update
            assert numpy.abs(parts["weights"][name] - weight).max() <= 1e-6, name


def test_wrong_calls_are_clear_errors_and_change_nothing(ranks):
    for actual in ranks(2).run(wrong_calls, options("TwoTerms", micro=2), _engine_runs.weighted_samples(8)):
        messages = actual["messages"]
        assert "call wrap.forward_backward first" in messages["nothing"]
        assert "global_batch_size = 8 samples, got 4" in messages["size"]
        assert "part 1 has 1 sample, which" in messages["unit"]
        assert "not a multiple of 4" in messages["unit"]
        assert "step_weights is dict" in messages["weights"]
        assert "part 1 of the step has 8 samples" in messages["part"]
        assert "[4, 4]" in messages["part"]
        assert "call wrap.optimizer_step first" in messages["train"]
        assert "1 part of 2 missing in the step" in messages["missing"]
        assert "of another step" in messages["another"]
        assert "of another step than iteration 2" in messages["late"]
        assert actual["unchanged"]
        assert actual["same"]
