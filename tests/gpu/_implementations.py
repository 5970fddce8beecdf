"""The layer implementations and layouts on GPUs, for parametrized tests."""

import importlib.util

import pytest

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
IMPLEMENTATIONS = [
    "torch",
    pytest.param("transformer_engine", marks=pytest.mark.skipif(not HAS_TE, reason="not installed")),
]


def by_gpus(cases, layouts):
    """Parameters (family, layout), those of several processes marked with the GPUs that they need.

    Args:
        layouts: name -> (processes, overrides).
    """
    parameters = []
    for family, layout in cases:
        processes = layouts[layout][0]
        marks = pytest.mark.gpus(processes) if processes > 1 else ()
        parameters.append(pytest.param(family, layout, id=f"{family}-{layout}", marks=marks))
    return parameters


def on_gpu(overrides, implementation):
    """A layout's overrides for the CUDA platform and an implementation."""
    return (
        *overrides,
        "megatron_wrap.init.platform=cuda",
        f"megatron_lm.model.arch.transformer_impl={implementation}",
    )
