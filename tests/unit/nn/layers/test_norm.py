"""RMSNorm and LayerNorm against torch's modules and transformers' LlamaRMSNorm."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from megatron_wrap.errors import ConfigError
from megatron_wrap.nn.layers.norm import LayerNorm, RMSNorm, norm_class

pytestmark = pytest.mark.transformers


def config(**changes):
    settings = {"params_dtype": torch.float32, "sequence_parallel": False, "layernorm_zero_centered_gamma": False}
    return SimpleNamespace(**{**settings, **changes})


def value_and_gradients(norm, x):
    x = x.clone().requires_grad_()
    output = norm(x)
    (output.float() ** 3).sum().backward()
    return [output.detach(), x.grad, *(parameter.grad for parameter in norm.parameters())]


def test_rms_norm_equals_that_of_llama():
    torch.manual_seed(0)
    ours, theirs = RMSNorm(config(), hidden_size=48, eps=1e-6, persist_layer_norm=True), LlamaRMSNorm(48, eps=1e-6)
    gamma = torch.randn(48)
    for norm in (ours, theirs):
        norm.weight.data.copy_(gamma)
    x = torch.randn(5, 3, 48)
    for a, b in zip(value_and_gradients(ours, x), value_and_gradients(theirs, x), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("ours", "theirs"), [(RMSNorm, torch.nn.RMSNorm), (LayerNorm, torch.nn.LayerNorm)])
def test_half_precision_inputs_are_computed_in_fp32(ours, theirs):
    torch.manual_seed(1)
    norm, reference = ours(config(params_dtype=torch.bfloat16), 64), theirs(64, eps=1e-5)
    for mine, other in zip(norm.parameters(), reference.parameters(), strict=True):
        mine.data.normal_()
        other.data.copy_(mine)
    x = (100 * torch.randn(7, 64)).bfloat16()
    assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), reference(x.float()).bfloat16())
    # With an fp32 residual stream, the result has the parameters' dtype, which the next layer expects.
    assert torch.equal(norm(x.float()), norm(x))


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_zero_centered_gamma_is_stored_minus_one(kind):
    torch.manual_seed(2)
    plain, centered = kind(config(), 16), kind(config(layernorm_zero_centered_gamma=True), 16)
    x = torch.randn(4, 16)
    assert centered.weight.abs().sum() == 0
    torch.testing.assert_close(centered(x), plain(x), rtol=0, atol=0)
    plain.weight.data.normal_()
    centered.weight.data.copy_(plain.weight - 1)
    for a, b in zip(value_and_gradients(centered, x), value_and_gradients(plain, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_every_parameter_is_marked_for_sequence_parallelism(sequence_parallel):
    for kind in (RMSNorm, LayerNorm):
        norm = kind(config=config(sequence_parallel=sequence_parallel), hidden_size=8, eps=1e-5)
        marks = [parameter.sequence_parallel for parameter in norm.parameters()]
        assert marks == [sequence_parallel] * (1 if kind is RMSNorm else 2)


def test_norm_class_is_selected_by_name():
    assert norm_class("RMSNorm") is RMSNorm
    assert norm_class("LayerNorm") is LayerNorm
    with pytest.raises(ConfigError, match=r"'L2Norm' .*; choose RMSNorm or LayerNorm"):
        norm_class("L2Norm")
