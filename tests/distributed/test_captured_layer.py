"""Layers with experts of which a part is captured as a CUDA graph, without a GPU: what follows the part needs nothing
but its tensors, and computes what Megatron-Core's layers do. tests/gpu/test_layer_graphs_gpu.py captures it."""

from __future__ import annotations

from typing import Any

import _captured_runs as runs
import _engine_runs
import pytest
from _covering import quick
from _engine_runs import options

ARCH, PARALLEL = "megatron_lm.model.arch", "megatron_lm.model.parallel"
EXPERTS = {
    f"{ARCH}.num_experts": 8,
    f"{ARCH}.moe_router_topk": 3,
    f"{ARCH}.moe_ffn_hidden_size": 16,
    f"{ARCH}.moe_aux_loss_coeff": 0.1,
}
EP2 = {f"{PARALLEL}.expert_model_parallel_size": 2, f"{ARCH}.moe_shared_expert_intermediate_size": 24}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"micro": 2}),
    "ep2": (2, {"micro": 1, "distributed": True, **EP2}),
    "tp2-ep2": (4, {"micro": 1, "tp": 2, f"{PARALLEL}.expert_tensor_parallel_size": 2, **EP2}),
}


@pytest.mark.parametrize("case", quick(CASES, ["one rank", "ep2"]))
def test_what_follows_a_captured_part_needs_its_tensors_alone(case, ranks):
    size, settings = CASES[case]
    for actual in ranks(size).run(runs.steps, options(**settings, **EXPERTS), _engine_runs.weighted_samples(40)):
        whole, parts = actual["whole"], actual["parts"]
        assert parts == whole
        assert whole["layers"] > 0
