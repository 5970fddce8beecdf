"""Weights for rollout engines: those of `save_pretrained`, and updates of engines that follow vLLM's and SGLang's
documentation."""

from __future__ import annotations

import _bridge_runs
import _rollout_runs as runs
import pytest
from _covering import axes, covering

CASES = [
    ("llama3.2-tied", "tp2"),
    ("llama3.2-tied", "pp2"),
    ("mixtral", "ep2"),
    ("deepseek-v3", "tp2"),
    ("deepseek-v3", "ep2"),
    ("deepseek-v3", "ep2-tp2"),
    ("glm4-moe", "pp2"),
    ("olmo2", "tp2"),
    ("minimax-m2", "ep2"),
    ("gemma3", "tp2-pp2"),
    ("gpt2", "tp2-pp2"),
]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """original(family) -> its folder; each is created once."""
    created = _bridge_runs.made_once(tmp_path_factory, lambda folder: None)
    return lambda name: str(created(name)[0])


@pytest.mark.parametrize(("family", "layout"), covering(CASES, lambda case: axes(case[1])))
def test_each_pass_has_the_names_order_and_bytes_of_save_pretrained(family, layout, ranks, original, tmp_path):
    world_size, overrides = _bridge_runs.LAYOUTS[layout]
    has_bias = family in ("deepseek-v3", "glm4-moe", "minimax-m2")
    dtype = "bfloat16" if has_bias else None
    of_ranks = ranks(world_size).run(runs.passes, original(family), overrides, str(tmp_path), dtype)
    first = of_ranks[0]
    for answer in of_ranks:
        assert answer["equal"] == [True, True]
        assert answer["changed"]
        assert answer["metadata"] == answer["iterated"] == first["metadata"]
        assert answer["buckets"] == first["buckets"]
    dtypes = {name: dtype for name, dtype, _ in first["metadata"]}
    assert ("lm_head.weight" in dtypes) == (family in ("mixtral", "olmo2") or has_bias)
    # the router's bias stays in fp32
    assert set(dtypes.values()) == ({"bfloat16", "float32"} if has_bias else {"float32"})
    listed = [name for bucket in first["buckets"] for name, _ in bucket]
    assert listed == list(dtypes)
    assert len(first["buckets"]) > 2
    sizes = [[size for _, size in bucket] for bucket in first["buckets"]]
    assert all(sum(bucket) <= 50_000 or len(bucket) == 1 for bucket in sizes)
    assert sum(map(sum, sizes)) == first["nbytes"]


def test_vllm_receives_packed_weights_in_its_four_calls(ranks, original, tmp_path):
    overrides = _bridge_runs.LAYOUTS["tp2"][1]
    sender, other = ranks(2).run(runs.to_vllm, original("llama3.2-tied"), overrides, str(tmp_path))
    assert sender["equal"] == other["equal"] == [True, True]
    assert sender["calls"] == ["init", "start", "update", "finish", "start", "update", "finish"]
    assert sender["version"] == "step 1"
    assert other["calls"] == []


@pytest.mark.parametrize("call", ["init", pytest.param("start", marks=pytest.mark.matrix), "update"])
def test_a_failure_of_vllm_is_one_error_on_all_ranks(call, ranks, original, tmp_path):
    overrides = _bridge_runs.LAYOUTS["tp2"][1]
    for answer in ranks(2).run(runs.to_vllm, original("llama3.2-tied"), overrides, str(tmp_path), call):
        assert f"the engine fails in {call}" in answer["error"]


def test_the_source_is_one_of_vllm(ranks, original, tmp_path):
    overrides = _bridge_runs.LAYOUTS["tp2"][1]
    for answer in ranks(2).run(runs.vllm_source_and_sender, original("llama3.2-tied"), overrides, str(tmp_path)):
        assert answer["agree"] == [True, True]
        assert answer["names"][0] == "model.embed_tokens.weight"


def test_sglang_receives_flattened_buckets_and_folders(ranks, original, tmp_path):
    overrides = _bridge_runs.LAYOUTS["pp2"][1]
    sender, other = ranks(2).run(runs.to_sglang, original("llama3.2-tied"), overrides, str(tmp_path))
    assert sender["equal"] == other["equal"] == [True, True]
    endpoints = [endpoint for endpoint, _ in sender["requests"]]
    buckets = [body for endpoint, body in sender["requests"] if endpoint == "update_weights_from_distributed"]
    assert endpoints == [
        "init_weights_update_group",
        "pause_generation",
        *["update_weights_from_distributed"] * len(buckets),
        "continue_generation",
        "pause_generation",
        "update_weights_from_disk",
        "continue_generation",
    ]
    assert sender["requests"][0][1] == {
        "master_address": "127.0.0.1",
        "master_port": 29501,
        "rank_offset": 2,  # the sender is rank 0, and the first server has one process
        "world_size": 4,
        "group_name": "weight_update_group",
        "backend": "nccl",
    }
    assert [body["flush_cache"] for body in buckets] == [False] * (len(buckets) - 1) + [True]
    assert {body["weight_version"] for body in buckets} == {"step 0"}


@pytest.mark.parametrize("endpoint", ["update_weights_from_disk"])
def test_a_failure_of_sglang_is_one_error_on_all_ranks(endpoint, ranks, original, tmp_path):
    overrides = _bridge_runs.LAYOUTS["pp2"][1]
    for answer in ranks(2).run(runs.to_sglang, original("llama3.2-tied"), overrides, str(tmp_path), endpoint):
        assert f"the server fails in {endpoint}" in answer["error"]
        assert answer["equal"] == [True]
