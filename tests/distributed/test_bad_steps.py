"""Bad steps: the error names micro-batch, sample and module, with the same text on every rank; the policies skip and
rollback; spikes of the loss."""

from __future__ import annotations

import json
from pathlib import Path

import _bad_step_runs as bad
import pytest
from _checkpoint_runs import BF16, DISTRIBUTED, DROPOUT, EXPERTS, OVERLAP
from _covering import quick
from _engine_runs import options

RECOMPUTE = (
    "megatron_lm.train.recompute.recompute_granularity=full",
    "megatron_lm.train.recompute.recompute_method=uniform",
    "megatron_lm.train.recompute.recompute_num_layers=1",
)
LINEAR_CROSS_ENTROPY = ("megatron_wrap.model_provider.linear_cross_entropy=true",)
RUNS = {
    "one-recomputed": (1, RECOMPUTE),
    "dp2": (2, (*DISTRIBUTED, *OVERLAP, "megatron_lm.train.optimizer.fused_clipping=true")),
    "tp2-sp": (2, options(tp=2, sp=True)),
    "pp2": (2, options(pp=2)),
    "pp2-vpp2": (2, options(pp=2, layers_per_chunk=1)),
    "cp2": (2, options(cp=2)),
    "one-linear-cross-entropy": (1, LINEAR_CROSS_ENTROPY),
    "cp2-linear-cross-entropy": (2, (*options(cp=2), *LINEAR_CROSS_ENTROPY)),
}
KINDS = ("loss", "gradient", "activation", "backward", "once")
FIRST = {
    "loss": "the loss (",
    "gradient": "the gradient of the loss with respect to the output of the model;",
    "activation": f"the output of {bad.MODULE};",
    "backward": f"the gradient from the backward pass of {bad.MODULE};",
}


@pytest.mark.parametrize("name", quick(RUNS, ["one-recomputed", "pp2-vpp2", "cp2-linear-cross-entropy"]))
def test_the_error_names_micro_batch_sample_and_module(name: str, ranks) -> None:
    world_size, overrides = RUNS[name]
    results = ranks(world_size).run(bad.refused, overrides, (*KINDS, "weight"))
    assert all(result["errors"] == results[0]["errors"] for result in results)
    by_kind = dict(zip((*KINDS, "weight"), results[0]["errors"], strict=True))
    # sample 5 is in the third micro-batch of two, or in the second of replica 0
    micro_batch = "micro-batch 1 of 2 of replica 0" if "dp2" in name else "micro-batch 2 of 4"
    for kind, first in FIRST.items():
        expected = f"in {micro_batch}, sample {bad.BAD} of a batch of 8, the first such value is {first}"
        assert expected in by_kind[kind], by_kind[kind]
    assert "cannot be reproduced" in by_kind["once"], by_kind["once"]
    assert f"before the step, {bad.PARAMETER} had nan" in by_kind["weight"], by_kind["weight"]
    assert all(result["unchanged"][: len(KINDS)] == [True] * len(KINDS) for result in results)


def test_the_error_of_a_step_in_parts_counts_micro_batches_and_samples_over_all_parts(ranks) -> None:
    results = ranks(2).run(bad.refused_in_parts, options(tp=2, sp=True))
    assert f"in micro-batch 2 of 4, sample {bad.BAD} of a batch of 8, the first such value is the loss" in results[0]
    assert results[0] == results[1]


SKIPPED = {
    "one-experts": (1, EXPERTS),
    "dp2": (2, (*DISTRIBUTED, *OVERLAP, *BF16)),
    "pp2": (2, options(pp=2)),
}


@pytest.mark.parametrize("name", quick(SKIPPED, ["one-experts"]))
def test_a_skipped_step_changes_counters_alone(name: str, ranks) -> None:
    world_size, overrides = SKIPPED[name]
    for result in ranks(world_size).run(bad.skipped, overrides, ("loss", "gradient")):
        assert result["equal"]
        assert [step["bad_steps"] for step in result["metrics"]] == [0, 1, 2, 2]
        assert [step["skipped_iterations"] for step in result["metrics"]] == [0, 1, 2, 2]
        assert [step["consumed_samples"] for step in result["metrics"]] == [8, 16, 24, 32]


def test_bad_steps_in_a_row_end_the_run_and_a_good_one_begins_the_count_again(ranks) -> None:
    keys = ("megatron_wrap.bad_steps.on_bad_step=skip", "megatron_wrap.bad_steps.max_in_a_row=2")
    [results] = ranks(1).run(bad.in_a_row, keys, ("loss", "", "gradient", "loss", "loss", "", "loss"))
    assert results[:3] == ["1 of 1", "1 of 2", "2 of 3"]
    for refused in results[3:5]:
        assert "the last of 2 such steps in a row" in refused, refused
        assert f"sample {bad.BAD} of a batch of 8" in refused
    assert results[5:] == ["2 of 4", "3 of 5"]


SPIKES = {
    "one": (1, ()),
    "cp2": (2, options(cp=2)),
    "dp2": (2, DISTRIBUTED),
    "pp2-vpp2": (2, options(pp=2, layers_per_chunk=1)),
}


@pytest.mark.parametrize("name", quick(SPIKES, ["dp2"]))
def test_a_spike_of_the_loss_is_a_bad_step_that_names_its_sample(name: str, ranks) -> None:
    world_size, overrides = SPIKES[name]
    spikes = ("megatron_wrap.bad_steps.spike_threshold=20", "megatron_wrap.bad_steps.spike_window=10")
    more = ("megatron_lm.train.common.train_iters=30", *overrides)
    results = ranks(world_size).run(bad.in_a_row, (*spikes, *more), ("",) * 9 + ("spike", "spike", "", ""))
    # the first has nine losses before it, and becomes the tenth
    assert results[0][9] == "0 of 10"
    refused = results[0][10]
    assert "of iteration 11 is a spike: " in refused, refused
    micro_batch = "micro-batch 1 of 2 of replica 0" if "dp2" in name else "micro-batch 2 of 4"
    assert f"the largest loss is in {micro_batch}, sample {bad.BAD} of a batch of 8; nothing was updated" in refused
    assert results[0][11:] == ["0 of 11", "0 of 12"]
    assert all(of_rank == results[0] for of_rank in results)


def test_a_skipped_spike_is_no_part_of_what_later_losses_are_compared_with(ranks) -> None:
    keys = ("spike_threshold=20", "spike_window=10", "on_bad_step=skip", "max_in_a_row=20")
    overrides = ("megatron_lm.train.common.train_iters=40", *(f"megatron_wrap.bad_steps.{key}" for key in keys))
    [results] = ranks(1).run(bad.in_a_row, overrides, ("",) * 10 + ("spike",) * 12 + ("",))
    assert results[9:] == ["0 of 10", *(f"{count} of {count + 10}" for count in range(1, 13)), "12 of 23"]


ROLLBACKS = {
    "one": (1, ("megatron_wrap.data.num_workers=0", *DROPOUT)),
    "one-asynchronous": (1, ("megatron_wrap.checkpoint.async_save=true", *DROPOUT)),
    "dp2-distributed": (2, (*DISTRIBUTED, *OVERLAP, *BF16)),
    "pp2": (2, options(pp=2)),
}


@pytest.mark.parametrize("name", quick(ROLLBACKS, ["dp2-distributed"]))
def test_a_rolled_back_run_equals_one_that_never_had_the_samples(name: str, ranks, tmp_path) -> None:
    world_size, overrides = ROLLBACKS[name]
    names = ("whole", "without", "resumed") if world_size == 1 else ("resumed", "without")
    for result in ranks(world_size).run(bad.rolled_back, overrides, str(tmp_path), names):
        assert result["without"]["counts"] == (0, 0, [])
        for name in {*names} - {"without"}:
            assert result[name]["steps"] == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8]
            assert result[name]["counts"] == (1, 1, list(range(40, 48)))
            assert result[name]["end"] == result["without"]["end"]
    records = [_records(tmp_path / name / "records") for name in names]
    assert all(of_run == records[0] for of_run in records)
    assert [step for step, _, _ in records[0]] == list(range(1, 9))


def _records(folder: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["iteration"], line["loss"], line["grad_norm"]) for line in lines]


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ((), bad.PARAMETER),
        pytest.param(options(tp=2, sp=True), "decoder.final_layernorm.weight", marks=pytest.mark.matrix),
        ((*EXPERTS, *options(tp=2, sp=True)), "decoder.layers.1.mlp.router.weight"),
    ],
)
def test_copies_that_differ_are_one_error_that_names_parameter_and_rank(overrides, name, ranks) -> None:
    results = ranks(2).run(bad.differing_copies, overrides, name)
    assert results[0] == results[1]
    loss, error = results[0]
    assert loss > 0
    assert f"TrainingError: after iteration 2 copies of {name} differ: rank" in error, error
