"""Layers with experts of which a part is captured as a CUDA graph, without a GPU: what follows the part needs nothing
but its tensors, and computes what Megatron-Core's layers do. tests/gpu/test_layer_graphs_gpu.py captures it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import _engine_runs
import pytest
from _covering import quick
from _engine_runs import everything, options, started


def steps(overrides: Sequence[str], samples: Sequence[Any]) -> dict[str, Any]:
    """Two steps with an evaluation between them, by Megatron-Core's layers, and by layers whose part before the
    exchange leaves nothing but its tensors, as the replay of a CUDA graph does."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_wrap.nn.experts.layer import GroupedMoELayer, PartlyCapturedLayer

    results: dict[str, Any] = {}
    for kind in ("whole", "parts"):
        with started(overrides) as wrap:
            modules = [module for chunk in wrap.state.chunks for module in chunk.modules()]
            layers: list[Any] = [module for module in modules if isinstance(module, TransformerLayer)]
            layers = [layer for layer in layers if isinstance(layer.mlp, GroupedMoELayer)]
            for layer in layers if kind == "parts" else ():
                layer.__class__ = PartlyCapturedLayer
                layer.use_partial_cudagraphs = False
                layer.before_exchange = _replayed(layer)
            size = wrap.global_batch_size
            first = wrap.train(samples[:size])
            evaluated = wrap.evaluate({"some": samples[:3]})
            second = wrap.train(samples[size : 2 * size])
            losses = [first["loss"], evaluated["eval/some/loss"], second["loss"]]
            results[kind] = {"layers": len(layers), "losses": losses, "state": everything(wrap)}
    return results


def _replayed(layer: Any) -> Callable[..., Any]:
    part = layer.before_exchange

    def call(*arguments: Any, **named: Any) -> Any:
        owners = [*layer.modules(), layer.mlp.token_dispatcher]
        attributes = [dict(vars(owner)) for owner in owners]
        tensors = part(*arguments, **named)
        for owner, before in zip(owners, attributes, strict=True):
            vars(owner).clear()
            vars(owner).update(before)
        return tensors

    return call


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
    for actual in ranks(size).run(steps, options(**settings, **EXPERTS), _engine_runs.weighted_samples(40)):
        whole, parts = actual["whole"], actual["parts"]
        assert parts == whole
        assert whole["layers"] > 0
