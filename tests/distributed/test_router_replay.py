"""Recorded routing is replayed on every layout: in the forward pass, in recomputation, and with other weights."""

from __future__ import annotations

from typing import Any

import _grpo_runs
import _replay_runs
import numpy
import pytest
from _dpo_runs import CONFIG
from test_expert_layouts import MODELS, arch, layout

from megatron_wrap.testing import check_parity
from megatron_wrap.testing.ranks import RankError

MODEL = (*arch(MODELS["deepseek-v3-router"]), "megatron_wrap.logger.add_expert_load_to_metrics=true")
LAYERS, EXPERTS, TOPK = 3, 8, 3
RECOMPUTED = ("megatron_lm.train.recompute.__select__=full",)
PACKED = ("megatron_wrap.flow.packing=true", "megatron_lm.train.common.micro_batch_size=2")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "recomputed": ("dp1", RECOMPUTED),
    "sequential": ("dp1", ("megatron_lm.model.arch.experts_impl=sequential",)),
    "dp2-ep2-packed": ("dp2-ep2", PACKED),
    "tp2-ep2": ("tp2-ep2-etp1", ()),
    "pp2-recomputed": ("pp2", RECOMPUTED),
    "cp2-packed": ("cp2", PACKED),
    "dp2-pp2-vpp2-ep2-recomputed": ("dp2-pp2-vpp2-ep2", RECOMPUTED),
}
QUICK = ("recomputed", "dp2-ep2-packed", "tp2-ep2", "pp2-recomputed")


@pytest.fixture(scope="module")
def routings() -> list[Any]:
    return _replay_runs.random_routing(4, LAYERS, EXPERTS, TOPK)


@pytest.fixture(scope="module")
def expected(ranks, routings):
    (result,) = ranks(1).run(_replay_runs.train, MODEL, routings)
    return result


def test_first_pass_replays_to_the_same_bits(ranks) -> None:
    (recorded,) = ranks(1).run(_replay_runs.record, MODEL)
    assert {routing.shape[1:] for routing in recorded} == {(LAYERS, TOPK)}
    (plain,) = ranks(1).run(_replay_runs.step, MODEL, None)
    (replayed,) = ranks(1).run(_replay_runs.step, MODEL, recorded)
    assert replayed == plain


def test_changed_weights_select_the_recorded_experts(expected, routings) -> None:
    for replayed, unrecorded, routing in zip(expected["replayed"], expected["unrecorded"], routings, strict=True):
        recorded = routing[: len(replayed)].numpy()
        kept = [token for token in range(len(recorded)) if token != 3]
        assert (replayed.numpy()[kept] == recorded[kept]).all()
        assert (unrecorded.numpy()[kept] != recorded[kept]).any()


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.matrix) for case in CASES]
)
def test_layouts_replay_like_one_rank(ranks, expected, routings, case: str) -> None:
    name, overrides = CASES[case]
    count, of_layout = layout(name)
    results = ranks(count).run(_replay_runs.train, (*MODEL, *of_layout, *overrides), routings)
    actual = results[0]
    assert all(other["losses"] == actual["losses"] for other in results)
    numpy.testing.assert_allclose(actual["losses"], expected["losses"], rtol=1e-4)
    assert actual["load"] == pytest.approx(expected["load"], rel=1e-5)
    for parameter, gradient in expected["gradients"].items():
        difference = numpy.linalg.norm(actual["gradients"][parameter] - gradient)
        assert difference <= 1e-4 * numpy.linalg.norm(gradient), parameter
    for other in results:
        for expected_experts, experts in zip(expected["replayed"], other["replayed"], strict=True):
            assert expected_experts.dtype == experts.dtype
            assert (expected_experts == experts).all()


MIXTRAL = (
    *(f"megatron_lm.model.arch.{text}" for text in ("num_experts=4", "moe_ffn_hidden_size=48", "moe_router_topk=2")),
    "megatron_wrap.flow.__select__=gpt_grpo",
)


def test_grpo_replays_its_first_pass_in_several_updates(ranks) -> None:
    """The routing of the first pass, which is that of the first update, is also that of the second one."""
    (results,) = ranks(1).run(_replay_runs.several_updates, MIXTRAL, _grpo_runs.rollouts(_grpo_runs.BATCH))
    assert results["losses"][0] == results["plain_loss"]
    assert results["losses"][1] != results["losses"][0]
    assert all((first == last).all() for first, last in zip(results["first"], results["last"], strict=True))


def test_layouts_agree_on_a_routing_that_check_parity_records(ranks) -> None:
    report = check_parity(
        CONFIG,
        [*MIXTRAL, "megatron_lm.train.common.router_replay=R3"],
        samples=_grpo_runs.rollouts(_grpo_runs.BATCH),
        layouts=["dp2-ep2"],
        steps=2,
        ranks=ranks,
    )
    assert [row.layout for row in report.rows if row.agrees is not True] == [], report.table()


def test_all_gather_of_unequal_numbers_of_tokens_is_refused(ranks) -> None:
    """On all processes, and lengths that are equal train as with the all-to-all exchange."""
    overrides = (*MODEL, *layout("dp2-ep2")[1], "megatron_lm.model.arch.moe_token_dispatcher_type=allgather")
    with pytest.raises(RankError, match=r"tokens with padding .*moe_token_dispatcher_type: alltoall") as refused:
        ranks(2).run(_replay_runs.step, overrides, None)
    assert "2 of 2 ranks" in str(refused.value)
    equal = "megatron_wrap.flow.collate_type=fixed_length"
    of_layout = ranks(2).run(_replay_runs.step, (*overrides, equal), None)
    (of_one,) = ranks(1).run(_replay_runs.step, (*MODEL, equal), None)
    assert of_layout[0] == pytest.approx(of_one, rel=1e-4)


def test_grouped_experts_train_like_sequential_ones_with_their_routing(ranks) -> None:
    """In fp32, on one process."""
    steps, kind = 8, "megatron_lm.model.arch.experts_impl="
    (sequential,) = ranks(1).run(_replay_runs.losses, (*MODEL, f"{kind}sequential"), None, steps)
    (grouped,) = ranks(1).run(_replay_runs.losses, (*MODEL, f"{kind}grouped_mm"), sequential["routings"], steps)
    assert sequential["losses"][-1] < sequential["losses"][0]
    numpy.testing.assert_allclose(grouped["losses"], sequential["losses"], rtol=0, atol=1e-4)
