"""Adapters with all that they can train, on layouts: the gradient of each trained parameter is that of one rank; in
bf16; and `check-parity`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import _adapter_runs as runs
import _bridge_runs as bridge
import numpy
import pytest
from _covering import quick
from layout_runs import token_samples

from megatron_wrap.testing import check_parity

CONFIG = Path(__file__).parent / "layouts.yaml"
P = bridge.PARALLEL
TP2, PP2 = f"{P}tensor_model_parallel_size=2", f"{P}pipeline_model_parallel_size=2"
SP, CP2 = f"{P}sequence_parallel=true", f"{P}context_parallel_size=2"
PACKED = "megatron_wrap.flow.packing=true"
DISTRIBUTED = "megatron_lm.train.optimizer.use_distributed_optimizer=true"
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp2": (2, (TP2, f"{P}sequence_parallel=false")),
    "tp2-sp": (2, (TP2, SP)),
    "pp2": (2, (PP2,)),
    "pp2-vpp2": (2, (PP2, f"{P}virtual_pipeline_model_parallel_size=2")),
    "cp2": (2, (CP2,)),
    "cp2-packed": (2, (CP2, PACKED)),
    "packed": (1, (PACKED,)),
    "dp2-distributed": (2, (DISTRIBUTED,)),
    "tp2-sp-pp2": (4, (TP2, SP, PP2)),
}
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": (
        "llama-four-layers",
        {
            **{"r": 4, "lora_alpha": 8, "init_lora_weights": False, "modules_to_save": ["lm_head", "norm"]},
            "trainable_token_indices": {"embed_tokens": [3, 17, 39, 200]},
        },
    ),
    "tied": (
        "qwen2-tied",
        {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "trainable_token_indices": [39, 3, 200], "bias": "all"},
    ),
}
CASES = [f"{name}/{layout}" for name in ADAPTERS for layout in LAYOUTS if (name, layout) != ("tied", "pp2-vpp2")]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    return bridge.made_once(tmp_path_factory, lambda folder: None)


@pytest.fixture(scope="module")
def on_one_rank(folder_of, ranks, tmp_path_factory):
    """on_one_rank(name) -> folder, settings, and the gradients of a step on one rank; each run once."""

    @functools.cache
    def run(name: str) -> Any:
        family, adapter = ADAPTERS[name]
        folder, settings = str(folder_of(family)[0]), runs.overrides_of(adapter)
        outputs = str(tmp_path_factory.mktemp(name))
        return folder, settings, ranks(1).run(runs.gradients, folder, settings, outputs)[0]

    return run


@pytest.mark.parametrize("case", quick(CASES, ["untied/cp2-packed", "untied/pp2-vpp2", "tied/tp2-sp-pp2"]))
def test_the_gradient_of_each_trained_parameter_is_that_of_one_rank(case, on_one_rank, ranks, tmp_path):
    name, layout = case.split("/")
    folder, settings, expected = on_one_rank(name)
    world_size, overrides = LAYOUTS[layout]
    actual = ranks(world_size).run(runs.gradients, folder, (*settings, *overrides), str(tmp_path))[0]
    assert actual.keys() == expected.keys()
    kinds = {"lora_A", "lora_B", "token_rows", "norm" if name == "untied" else "bias"}
    assert all(any(kind in parameter for parameter in expected) for kind in kinds)
    for parameter, values in expected.items():
        if parameter.endswith("linear_qkv.bias"):  # a softmax is invariant to the keys': their gradient is rounding
            scale = max(numpy.linalg.norm(values) for values in expected.values())
        else:
            scale = numpy.linalg.norm(values)
        assert scale > 0, parameter
        assert numpy.linalg.norm(actual[parameter] - values) <= 1e-5 * scale, parameter


def test_in_bf16_the_base_is_unchanged_and_the_losses_are_those_of_fp32(on_one_rank, ranks, tmp_path):
    """With the distributed optimizer; also the logits without the adapter are the same bits after the steps."""
    folder, settings, _ = on_one_rank("untied")
    plain = ranks(1).run(runs.train, folder, settings, str(tmp_path / "fp32"))[0]
    half = (*settings, "megatron_lm.train.dtype.__select__=bf16", *LAYOUTS["dp2-distributed"][1])
    in_bf16 = ranks(2).run(runs.train, folder, half, str(tmp_path / "bf16"))[0]
    assert in_bf16[5]
    numpy.testing.assert_allclose([loss for loss, _ in in_bf16[0]], [loss for loss, _ in plain[0]], rtol=5e-3)


def test_check_parity_runs_with_an_adapter(ranks):
    """Of gate and up projections each has a factor of its own, whose shards are joined as such."""
    keys = ("__select__=lora", "r=4", "modules_to_save=[norm]", "trainable_token_indices=[5, 9, 33]")
    overrides = [f"megatron_wrap.adapter.{key}" for key in keys]
    layouts = ["tp2-sp", "cp2"]
    report = check_parity(CONFIG, overrides, samples=token_samples(16, 48), layouts=layouts, steps=2, ranks=ranks)
    assert [row.agrees for row in report.rows] == [True] * len(layouts), report.table()
