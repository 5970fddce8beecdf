"""The short causal convolution and the gated norm against those of transformers' Qwen3-Next."""

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated, causal_conv1d_fn

from megatron_wrap.nn.linear_attention.convolution import causal_convolution
from megatron_wrap.nn.linear_attention.kernels import gated_rms_norm

pytestmark = pytest.mark.transformers


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
