"""Splits over pipeline stages against all splits of small models, and against Megatron-Core's reading of them."""

import dataclasses
import itertools
import random
from pathlib import Path

import pytest
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_wrap.bridge.adapters.trained_parameters import trained_shape
from megatron_wrap.config.reading.pipeline_layout import PipelineLayout, even_layout, parse_layout
from megatron_wrap.core.config import load_run_config
from megatron_wrap.plan.model_parts import model_shape
from megatron_wrap.plan.pipeline_split import (
    ModelCosts,
    faster_split,
    model_costs,
    split_by_cost,
    split_choice,
    stage_costs,
    waste,
    with_split,
)

ROOT = Path(__file__).resolve().parents[3]
LLAMA = ROOT / "scripts" / "benchmark" / "llama-1b.yaml"
PARALLEL = "megatron_lm.model.parallel"
H200 = "NVIDIA H200"


def all_splits(num_layers: int, num_stages: int, chunks: int) -> list[PipelineLayout]:
    cuts = itertools.combinations(range(1, num_layers), num_stages * chunks - 1)
    return [
        PipelineLayout(tuple(end - begin for begin, end in itertools.pairwise((0, *cut, num_layers))), num_stages)
        for cut in cuts
    ]


def slowest(costs: ModelCosts, layout: PipelineLayout) -> float:
    return max(stage_costs(costs, layout))


@pytest.mark.parametrize(("chunks", "dense_layers"), [(1, 0), (1, 3), (2, 0), (2, 2)])
def test_no_split_of_a_small_model_is_faster(chunks: int, dense_layers: int):
    numbers = random.Random(4)
    for _ in range(60):
        stages = numbers.choice((2, 3))
        layers = numbers.randint(max(stages * chunks, dense_layers), 10)
        cost_of_experts = numbers.uniform(1, 3)
        costs = ModelCosts(
            layers=(1.0,) * dense_layers + (cost_of_experts,) * (layers - dense_layers),
            embedding=numbers.uniform(0, 0.3),
            output=numbers.uniform(0, 5),
        )
        chosen = split_by_cost(costs, stages, chunks)
        assert sum(chosen.layers) == layers
        assert min(chosen.layers) >= 1
        best = min(slowest(costs, layout) for layout in all_splits(layers, stages, chunks))
        if chunks == 1 or dense_layers == 0:
            assert slowest(costs, chosen) == pytest.approx(best)
        even = even_layout(layers, stages, chunks)
        assert even is None or slowest(costs, chosen) <= slowest(costs, even) * (1 + 1e-9)


def test_equal_costs_are_split_evenly():
    assert split_by_cost(ModelCosts((1.0,) * 8, 0.0, 0.0), 2, 2).layers == (2, 2, 2, 2)
    assert split_by_cost(ModelCosts((1.0,) * 7, 0.0, 0.0), 3).layers in ((2, 2, 3), (2, 3, 2), (3, 2, 2))


def test_megatron_core_reads_a_layout_as_we_do():
    for layout in (PipelineLayout((10, 6), 2), PipelineLayout((1, 3, 2, 1), 2), PipelineLayout((1, 1, 1, 12), 4)):
        theirs = PipelineParallelLayerLayout(str(layout), layout.num_stages)
        theirs.validate_layer_layout(sum(layout.layers), None)
        stages, chunks = range(layout.num_stages), range(layout.chunks_per_stage)
        kinds = [[[kind.name for kind in theirs.layout[stage][chunk]] for chunk in chunks] for stage in stages]
        assert [sum(part.count("decoder") for part in parts) for parts in kinds] == list(layout.layers_per_stage)
        assert parse_layout(str(layout), sum(layout.layers), layout.num_stages) == layout


def test_the_split_of_the_measured_model_is_the_fastest_one():
    """Two H200s trained the 1.5B Llama with 51,363 tokens/s for each GPU in stages of 8 and 8 layers, and with 57,332
    in stages of 10 and 6, both with 8 micro-batches, which leave both pipelines the same bubble."""
    config = load_run_config(LLAMA, (f"{PARALLEL}.pipeline_model_parallel_size=2",))
    costs = model_costs(config, model_shape(config, 128256), H200)
    assert split_by_cost(costs, 2).layers == (10, 6)
    even, chosen = PipelineLayout((8, 8), 2), PipelineLayout((10, 6), 2)
    assert slowest(costs, even) / slowest(costs, chosen) == pytest.approx(57_332 / 51_363, rel=0.01)
    choice = split_choice(config, model_shape(config, 128256), H200)
    assert choice is not None
    assert choice.value == "Et*10|t*6L"
    assert f"10+6; stages wait {waste(costs, chosen):.1%}" in choice.reason
    assert f"8+8: stages wait {waste(costs, even):.1%}" in choice.reason


def test_a_slower_split_is_noticed():
    two_stages = f"{PARALLEL}.pipeline_model_parallel_size=2"
    shape = model_shape(load_run_config(LLAMA), 128256)
    for override in (f"{PARALLEL}.pipeline_split=even", f"{PARALLEL}.decoder_last_pipeline_num_layers=8"):
        better = faster_split(load_run_config(LLAMA, (two_stages, override)), shape, H200)
        assert better is not None
        assert better[0].layers == (10, 6)
        assert better[1] == pytest.approx(1 - 51_363 / 57_332, abs=0.01)
    chosen = with_split(load_run_config(LLAMA, (two_stages,)), shape, H200)
    assert chosen.parallel.pipeline_model_parallel_layout == "Et*10|t*6L"
    assert faster_split(chosen, shape, H200) is None


@pytest.mark.parametrize(
    "override",
    [
        f"{PARALLEL}.pipeline_split=even",
        f"{PARALLEL}.decoder_first_pipeline_num_layers=9",
        f"{PARALLEL}.num_layers_per_virtual_pipeline_stage=4",
        f"{PARALLEL}.pipeline_model_parallel_layout=Et*9|t*7L",
        f"{PARALLEL}.pipeline_model_parallel_size=1",
        "megatron_lm.model.arch.account_for_loss_in_pipeline_split=true",
    ],
)
def test_numbers_of_layers_leave_nothing_to_choose(override: str):
    config = load_run_config(LLAMA, (f"{PARALLEL}.pipeline_model_parallel_size=2", override))
    assert split_choice(config, model_shape(config, 128256), H200) is None


def test_what_changes_the_costs():
    config = load_run_config(LLAMA)
    shape = model_shape(config, 128256)
    plain = model_costs(config, shape, H200)
    long = model_costs(load_run_config(LLAMA, ("megatron_lm.train.common.seq_length=32768",)), shape, H200)
    assert long.layers[0] > 2 * plain.layers[0]
    assert long.output == plain.output
    recomputed = dataclasses.replace(config.recompute, recompute_granularity="full")
    full = model_costs(dataclasses.replace(config, recompute=recomputed), shape, H200)
    assert full.layers[0] == pytest.approx(plain.layers[0] * 4 / 3)
    assert full.output == plain.output
    unknown = model_costs(config, shape, "")
    assert unknown.output / unknown.layers[0] == pytest.approx(plain.output / plain.layers[0], rel=0.15)


def test_frozen_weights_cost_two_thirds_of_their_matmuls():
    freeze = "megatron_lm.train.common.freeze=['*.layers.0.*', '*.layers.1.*', lm_head]"
    config = load_run_config(LLAMA, (freeze,))
    trained, frozen = (model_costs(config, shape(config, 128256), "") for shape in (model_shape, trained_shape))
    without_attention = dataclasses.replace(config, train=dataclasses.replace(config.train, seq_length=0))
    matmuls = model_costs(without_attention, model_shape(config, 128256), "").layers[0]
    assert trained.layers[0] - frozen.layers[0] == pytest.approx(matmuls / 3)
    assert frozen.layers[1:3] == (frozen.layers[0], trained.layers[2])
    assert frozen.output == pytest.approx(trained.output * 2 / 3, rel=0.01)
