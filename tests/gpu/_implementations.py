"""The implementations of a layer that a GPU has, for a test to take each."""

import importlib.util

import pytest

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
IMPLEMENTATIONS = ["torch", pytest.param("transformer_engine", marks=pytest.mark.skipif(not HAS_TE, reason="not here"))]


def on_gpu(overrides, implementation):
    """A layout's overrides, on the CUDA platform with this implementation."""
    return (
        *overrides,
        "megatron_wrap.init.platform=cuda",
        f"megatron_lm.model.arch.transformer_impl={implementation}",
    )
