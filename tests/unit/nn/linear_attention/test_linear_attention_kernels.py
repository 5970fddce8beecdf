"""Which kernels train, on machines whose flash-linear-attention, Triton and GPU are substituted."""

import importlib.util
import sys
from types import ModuleType

import pytest
import torch

from megatron_wrap.nn.linear_attention import kernels

FIND_SPEC = importlib.util.find_spec


@pytest.fixture
def machine(monkeypatch):
    """A function that substitutes the facts of the package flash-linear-attention 0.6."""

    def substitute(triton="3.6.0", hopper=True, tilelang=False, nvcc=True, enabled=True):
        def is_above(*version):
            return tuple(int(part) for part in triton.split(".")) >= version

        class CommonTileLangBackend:
            def is_available(self):
                return tilelang and nvcc

            def is_enabled(self):
                return enabled

        facts = {
            "triton": {"__version__": triton},
            **{name: {} for name in ("fla", "fla.ops", "fla.ops.common")},
            "fla.ops.common.chunk_o": {
                "IS_NVIDIA_HOPPER": hopper,
                "TRITON_ABOVE_3_4_0": is_above(3, 4, 0),
                "TRITON_ABOVE_3_7_1": is_above(3, 7, 1),
            },
            "fla.ops.common.backends": {"CommonTileLangBackend": CommonTileLangBackend},
            # doubles the values, so that a test sees who computed
            "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": lambda q, k, v, *rest, **options: (2 * v, None)},
        }
        for name, values in facts.items():
            module = ModuleType(name)
            vars(module).update(values)
            monkeypatch.setitem(sys.modules, name, module)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)

        def find_spec(name, *rest):
            return (object() if tilelang else None) if name == "tilelang" else FIND_SPEC(name, *rest)

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        kernels.why_fla_cannot_train.cache_clear()
        kernels._fla_trains.cache_clear()

    yield substitute
    kernels.why_fla_cannot_train.cache_clear()
    kernels._fla_trains.cache_clear()


@pytest.mark.parametrize(
    "facts",
    [{"triton": "3.7.1"}, {"triton": "3.3.1"}, {"hopper": False}, {"tilelang": True}],
    ids=str,
)
def test_the_package_trains(machine, facts):
    machine(**facts)
    assert kernels.why_fla_cannot_train() is None


@pytest.mark.parametrize(
    ("facts", "advice"),
    [
        ({}, "pip install 'megatron-wrap[linear-attention]'"),
        ({"triton": "3.4.0"}, "with Triton 3.4.0 on Hopper GPUs"),
        ({"tilelang": True, "nvcc": False}, "set CUDA_HOME"),
        ({"tilelang": True, "enabled": False}, "unset it"),
    ],
    ids=str,
)
def test_why_it_does_not_and_what_to_do(machine, facts, advice):
    machine(**facts)
    reason = kernels.why_fla_cannot_train()
    assert reason is not None
    assert "install a torch with Triton 3.7.1 or newer" in reason
    assert advice in reason


def test_training_takes_the_rule_in_torch_with_one_warning(machine, monkeypatch):
    machine()
    warnings = []
    monkeypatch.setattr(kernels.logger, "warning_rank_0", warnings.append)
    monkeypatch.setattr(kernels, "uses_fla", lambda tensor: True)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 5, 2, 4) for _ in range(3))
    decay, beta = -torch.rand(1, 5, 2), torch.rand(1, 5, 2)

    def output(trains):
        return kernels.recur(query, key, value, decay, beta, None, None, False, trains)[0]

    assert torch.equal(output(trains=False), 2 * value)
    assert warnings == []
    expected, _ = kernels.gated_delta_rule(query, key, value, decay, beta)
    assert torch.equal(output(trains=True), expected)
    assert torch.equal(output(trains=True), expected)
    assert len(warnings) == 1
    assert kernels.why_fla_cannot_train() in warnings[0]
    machine(tilelang=True)
    assert torch.equal(output(trains=True), 2 * value)
    assert len(warnings) == 1


def test_a_package_that_cannot_be_imported_leaves_all_to_torch_with_one_warning(tmp_path, monkeypatch):
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("raise ImportError('libtvm_ffi.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(kernels, "has_fla", lambda: True)
    warnings = []
    monkeypatch.setattr(kernels.logger, "warning_rank_0", warnings.append)
    kernels._imports_fla.cache_clear()
    assert not kernels._imports_fla()
    assert not kernels._imports_fla()
    kernels._imports_fla.cache_clear()
    assert len(warnings) == 1
    assert "cannot be imported (libtvm_ffi.so: cannot open" in warnings[0]
