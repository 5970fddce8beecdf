"""FP8 recipes on mocked machines, against the requirements that Transformer Engine's documentation lists."""

import sys
from types import SimpleNamespace

import pytest

from megatron_wrap.platform.gpu.fp8_scales import forget_scales
from megatron_wrap.platform.gpu.platform import missing_for

HOPPER, ADA, AMPERE = (9, 0), (8, 9), (8, 0)


@pytest.mark.parametrize(
    ("recipe", "capability", "transformer_engine", "cuda", "facts"),
    [
        ("delayed", HOPPER, (2, 20, 2), (13, 0), None),
        ("tensorwise", HOPPER, (2, 20, 2), (13, 0), None),
        ("blockwise", HOPPER, (2, 20, 2), (12, 9), None),
        ("delayed", ADA, (2, 11), (12, 8), None),
        ("delayed", AMPERE, (2, 20, 2), (13, 0), ("capability", "8.9", "8.0")),
        ("tensorwise", HOPPER, (2, 1), (12, 9), ("Transformer Engine", "2.2", "2.1")),
        ("blockwise", ADA, (2, 20, 2), (13, 0), ("capability", "9.0", "8.9")),
        ("blockwise", HOPPER, (2, 20, 2), (12, 8), ("CUDA", "12.9", "12.8")),
        ("mxfp8", HOPPER, (2, 20, 2), (13, 0), None),
    ],
)
def test_requirements(recipe, capability, transformer_engine, cuda, facts):
    result = missing_for(recipe, capability, transformer_engine, cuda)
    assert (result is None) == (facts is None)
    assert all(fact in (result or "") for fact in facts or ())


@pytest.mark.parametrize("name", ["quantization", "fp8"])
def test_the_scales_of_a_run_are_forgotten(name, monkeypatch):
    manager = SimpleNamespace(reset=lambda: calls.append(name))
    calls = []
    for other in ("quantization", "fp8"):
        monkeypatch.delitem(sys.modules, f"transformer_engine.pytorch.{other}", raising=False)
    forget_scales()  # Transformer Engine is not in use
    module = SimpleNamespace(FP8GlobalStateManager=manager)
    monkeypatch.setitem(sys.modules, f"transformer_engine.pytorch.{name}", module)
    forget_scales()
    assert calls == [name]
