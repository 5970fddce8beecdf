"""Adapters of quantized frozen weights: the same training as with ordinary weights of the same values."""

from __future__ import annotations

from typing import Any

import _adapter_runs as runs
import _bridge_runs as bridge
import numpy
import pytest

TP2_PP2 = (
    "megatron_lm.model.parallel.tensor_model_parallel_size=2",
    "megatron_lm.model.parallel.sequence_parallel=true",
    "megatron_lm.model.parallel.pipeline_model_parallel_size=2",
)
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "nf4-tp2-sp-pp2": (4, ("megatron_wrap.adapter.base_weights=nf4", *TP2_PP2)),
    "fp8-recomputed": (1, ("megatron_wrap.adapter.base_weights=fp8", "megatron_lm.train.recompute.__select__=full")),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """folder_of(family) -> a random transformers model, made once."""
    return bridge.made_once(tmp_path_factory, lambda folder: None)


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_beside_ordinary_weights_of_the_same_values(name, folder_of, ranks, tmp_path):
    count, overrides = CASES[name]
    adapter = runs.overrides_of({"r": 4, "lora_alpha": 8, "init_lora_weights": False})
    results: list[Any] = ranks(count).run(
        runs.train_quantized, str(folder_of("llama-biases")[0]), (*adapter, *overrides), str(tmp_path)
    )
    for steps, expected_steps, factors, expected, error, memory in results:
        assert steps == expected_steps
        for factor, values in factors.items():
            numpy.testing.assert_array_equal(values, expected[factor], err_msg=factor)
        assert 0.02 < error < 0.1 if "nf4" in name else 0.005 < error < 0.04  # of the norm of all weights
        assert memory < (0.2 if "nf4" in name else 0.3)  # of that of the fp32 weights; 4.13 and 8.25 of 32 bits


def test_the_checkpoint_is_of_the_adapter_and_resumes_and_a_merge_is_refused(folder_of, ranks, tmp_path):
    overrides = (*runs.overrides_of({"lora_alpha": 8}), "megatron_wrap.adapter.base_weights=nf4")
    folder = str(folder_of("llama")[0])
    whole, names = ranks(1).run(runs.train_and_resume, folder, overrides, str(tmp_path), 4, None)[0]
    assert names
    assert all("lora_" in name for name in names if not name.startswith("optimizer") and "weight" in name)
    resumed, _ = ranks(1).run(runs.train_and_resume, folder, overrides, str(tmp_path), 4, 2)[0]
    assert resumed == whole[2:]
    refused = ranks(1).run(runs.merge_refusal, folder, overrides, str(tmp_path / "other"))[0]
    assert "an adapter cannot be merged into a base in nf4" in refused
