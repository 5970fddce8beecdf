"""Functions that the tests of layers with a captured part run on each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from _engine_runs import everything, started


def steps(overrides: Sequence[str], samples: Sequence[Any]) -> dict[str, Any]:
    """Two steps with an evaluation between them, by Megatron-Core's layers, and by layers whose part before the
    exchange leaves nothing but its tensors, as the replay of a CUDA graph does."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_wrap.nn.experts.captured_layer import PartlyCapturedLayer
    from megatron_wrap.nn.experts.layer import GroupedMoELayer

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
