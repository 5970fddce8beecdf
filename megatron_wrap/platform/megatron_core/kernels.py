"""Replacement of functions of Megatron-Core's layers by kernels. Only this module knows which modules call them, and
the side effects of such a call."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_wrap.platform.megatron_core.undoable_changes import Replacements

_MLP_MODULES = ("megatron.core.transformer.mlp", "megatron.core.transformer.moe.shared_experts")
_ROTARY_MODULE = "megatron.core.models.common.embeddings.rope_utils"
_LINEAR_MODULE = "megatron.core.tensor_parallel.layers"


@dataclass(frozen=True)
class LayerKernels:
    """Kernels as functions of tensors on the device; None keeps Megatron-Core's function."""

    swiglu: Callable[[Any], Any] | None = None
    """SwiGLU, [..., 2F] -> [..., F]."""
    rotary: Callable[..., Any] | None = None
    """Rotary embedding, ([S, B, heads, D], angles [S, 1, 1, R], interleaved) -> [S, B, heads, D]."""
    weight_gradients: Any = None
    """An object with the functions of Apex's `fused_weight_gradient_mlp_cuda`."""
    embedding: Callable[[Any, Any], Any] | None = None
    """Lookup of embedding rows, (ids, weight [V, H]) -> [*ids.shape, H], for `torch.nn.functional.embedding`."""


def use(kernels: LayerKernels, replacements: Replacements) -> None:
    """Make Megatron-Core's layers call the kernels until `replacements.undo`."""
    if kernels.swiglu is not None:
        for name in _MLP_MODULES:
            module = importlib.import_module(name)
            replacements.set(module, "bias_swiglu_impl", _without_bias(kernels.swiglu, module.bias_swiglu_impl))
    if kernels.rotary is not None:
        replacements.set(importlib.import_module(_ROTARY_MODULE), "fused_apply_rotary_pos_emb", kernels.rotary)
    if kernels.weight_gradients is not None:
        module = importlib.import_module(_LINEAR_MODULE)
        replacements.set(module, "fused_weight_gradient_mlp_cuda", kernels.weight_gradients)
        replacements.set(module, "_grad_accum_fusion_available", True)
    if kernels.embedding is not None:
        module = importlib.import_module(_LINEAR_MODULE)
        replacements.set(module, "F", _Functional(module.F, kernels.embedding))


def weight_of(module: Any) -> Any:
    """A view of the weight of a module whose result a kernel computes, of the weight's shape; gradients reach the
    weight. The module is still called, since a hook of its calls waits for the gathered weight
    (`overlap_param_gather`)."""
    module.forward = lambda: module.weight.view_as(module.weight)
    try:
        return module()
    finally:
        del module.forward


class _Functional:
    """`torch.nn.functional` of a module with another lookup of embeddings, for calls without further arguments."""

    def __init__(self, original: Any, kernel: Callable[[Any, Any], Any]) -> None:
        self._original, self._kernel = original, kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def embedding(self, ids: Any, weight: Any, *arguments: Any, **named: Any) -> Any:
        """Look up embeddings as torch's function does."""
        if arguments or named:
            return self._original.embedding(ids, weight, *arguments, **named)
        return self._kernel(ids, weight)


def _without_bias(kernel: Callable[[Any], Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron-Core's `bias_swiglu_impl`, computed by the kernel where there is no bias and the input is saved
    unchanged."""

    def swiglu(gates: Any, bias: Any, fp8_input_store: bool = False, cpu_offload_input: bool = False) -> Any:
        if bias is None and gates.is_cuda and not fp8_input_store and not cpu_offload_input:
            return kernel(gates)
        return original(gates, bias, fp8_input_store, cpu_offload_input)

    return swiglu
