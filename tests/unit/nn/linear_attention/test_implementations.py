"""Kernels that train, on machines whose flash-linear-attention, Triton and GPU are substituted; the short causal
convolution and the gated norm against those of transformers' Qwen3-Next."""

import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated, causal_conv1d_fn

from megatron_wrap.nn.linear_attention import implementations
from megatron_wrap.nn.linear_attention.implementations import causal_convolution, gated_rms_norm

pytestmark = pytest.mark.transformers

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
        implementations.why_fla_cannot_train.cache_clear()
        implementations._fla_trains.cache_clear()

    yield substitute
    implementations.why_fla_cannot_train.cache_clear()
    implementations._fla_trains.cache_clear()


@pytest.mark.parametrize(
    "facts",
    [{"triton": "3.7.1"}, {"triton": "3.3.1"}, {"hopper": False}, {"tilelang": True}],
    ids=str,
)
def test_the_package_trains(machine, facts):
    machine(**facts)
    assert implementations.why_fla_cannot_train() is None


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
    reason = implementations.why_fla_cannot_train()
    assert reason is not None
    assert "install a torch with Triton 3.7.1 or newer" in reason
    assert advice in reason


def test_training_takes_the_rule_in_torch_with_one_warning(machine, monkeypatch):
    machine()
    warnings = []
    monkeypatch.setattr(implementations.logger, "warning_rank_0", warnings.append)
    monkeypatch.setattr(implementations, "uses_fla", lambda tensor: True)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 5, 2, 4) for _ in range(3))
    decay, beta = -torch.rand(1, 5, 2), torch.rand(1, 5, 2)

    def output(trains):
        return implementations.recur(query, key, value, decay, beta, None, None, False, trains)[0]

    assert torch.equal(output(trains=False), 2 * value)
    assert warnings == []
    expected, _ = implementations.gated_delta_rule(query, key, value, decay, beta)
    assert torch.equal(output(trains=True), expected)
    assert torch.equal(output(trains=True), expected)
    assert len(warnings) == 1
    assert implementations.why_fla_cannot_train() in warnings[0]
    machine(tilelang=True)
    assert torch.equal(output(trains=True), 2 * value)
    assert len(warnings) == 1


def test_a_package_that_cannot_be_imported_leaves_all_to_torch_with_one_warning(tmp_path, monkeypatch):
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("raise ImportError('libtvm_ffi.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(implementations, "has_fla", lambda: True)
    warnings = []
    monkeypatch.setattr(implementations.logger, "warning_rank_0", warnings.append)
    implementations._imports_fla.cache_clear()
    assert not implementations._imports_fla()
    assert not implementations._imports_fla()
    implementations._imports_fla.cache_clear()
    assert len(warnings) == 1
    assert "cannot be imported (libtvm_ffi.so: cannot open" in warnings[0]


def test_the_convolution_is_that_of_transformers():
    torch.manual_seed(0)
    inputs, weight = torch.randn(2, 11, 6), torch.randn(6, 4)
    expected = causal_conv1d_fn(inputs.transpose(1, 2), weight, activation="silu").transpose(1, 2)
    torch.testing.assert_close(causal_convolution(inputs, weight), expected)


@pytest.mark.parametrize("kernel", [1, 4])
def test_sequences_of_a_row_do_not_see_each_other(kernel):
    torch.manual_seed(1)
    lengths = (5, 1, 2, 7)
    inputs, weight = torch.randn(1, sum(lengths), 6, requires_grad=True), torch.randn(6, kernel)
    packed = causal_convolution(inputs, weight, lengths=lengths)
    alone = torch.cat([causal_convolution(part, weight) for part in inputs.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone)
    gradients = [torch.autograd.grad(output.square().sum(), inputs)[0] for output in (packed, alone)]
    torch.testing.assert_close(*gradients)


def test_earlier_inputs_continue_a_row():
    torch.manual_seed(2)
    inputs, weight = torch.randn(3, 9, 6), torch.randn(6, 4)
    continued = causal_convolution(inputs[:, 7:], weight, before=inputs[:, 4:7])
    torch.testing.assert_close(continued, causal_convolution(inputs, weight)[:, 7:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gated_norm_is_that_of_transformers(dtype):
    torch.manual_seed(3)
    theirs = Qwen3NextRMSNormGated(12, eps=1e-5)
    theirs.weight.data.normal_()
    theirs = theirs.to(dtype)
    x, gate = torch.randn(2, 5, 3, 12).to(dtype), torch.randn(2, 5, 3, 12).to(dtype)
    tolerance = {} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}  # they round before they gate
    torch.testing.assert_close(gated_rms_norm(x, gate, theirs.weight, 1e-5), theirs(x, gate), **tolerance)
