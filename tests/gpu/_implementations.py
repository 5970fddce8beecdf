"""The layer implementations on GPUs, for parametrized tests."""

import importlib.util

import pytest

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
IMPLEMENTATIONS = [
    "torch",
    pytest.param("transformer_engine", marks=pytest.mark.skipif(not HAS_TE, reason="not installed")),
]


def on_gpu(overrides, implementation):
    """A layout's overrides for the CUDA platform and an implementation."""
    return (
        *overrides,
        "megatron_wrap.init.platform=cuda",
        f"megatron_lm.model.arch.transformer_impl={implementation}",
    )
