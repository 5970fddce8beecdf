"""Frozen weights in NF4 and FP8: values against torchao and bitsandbytes, and what a layer keeps of them."""

import gc
from pathlib import Path

import numpy
import pytest
import torch

from megatron_wrap.nn.layers.quantized_weights import QuantizedWeight, keep_quantized, quantized_of

OF_BITSANDBYTES = Path(__file__).with_name("nf4_of_bitsandbytes_0_50_2.npz")
"""quantize_4bit(matrix, blocksize=64, compress_statistics=True, quant_type="nf4") on a CPU: `packed`, and `scales`, the
blocks' largest values after their own quantization, dequantize_blockwise(state.absmax, state.state2) + state.offset."""


def quantized(kind: str, values: torch.Tensor) -> torch.Tensor:
    """The values after quantization."""
    weight = QuantizedWeight(kind, values.shape, values.dtype)  # type: ignore[arg-type]
    weight.write(values)
    return weight.values()


def test_nf4_is_torchao_s_and_bitsandbytes_up_to_the_rounding_of_scales() -> None:
    from torchao.quantization import NF4Tensor

    generator = numpy.random.default_rng(5)
    matrix = torch.from_numpy(generator.standard_normal((64, 512)).astype(numpy.float32) * 0.02)
    ours = quantized("nf4", matrix)
    theirs = NF4Tensor.from_tensor(matrix, 64, 256)
    assert torch.equal(ours, theirs.get_original_weight())

    stored = numpy.load(OF_BITSANDBYTES)
    bytes_, scales = torch.from_numpy(stored["packed"]).int(), torch.from_numpy(stored["scales"])
    levels = theirs.nf4[torch.stack([bytes_ >> 4, bytes_ & 15], dim=1)].view(-1, 64)
    expected = (levels * scales[:, None]).view(64, 512)
    largest = matrix.view(-1, 64).abs().amax(1)
    rounding = (scales - largest).abs().amax() / largest.amin()
    differing = (ours - expected).abs() > 2 * rounding * largest.repeat_interleave(64).view(64, 512)
    assert differing.float().mean() < 5e-4  # values in the middle of two levels
    assert (ours - expected).norm() < 0.01 * matrix.norm()
    assert (ours - matrix).norm() < 1.01 * (expected - matrix).norm()


@pytest.mark.parametrize("kind", ["nf4", "fp8"])
@pytest.mark.parametrize("shape", [(3, 7), (256, 96), (130, 64)])
def test_any_shape_and_zeros_are_quantized(kind: str, shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    matrix.view(-1)[-128:] = 0
    values = quantized(kind, matrix)
    assert (values.shape, values.dtype) == (matrix.shape, torch.bfloat16)
    assert not values.view(-1)[-64:].any()
    assert (values - matrix).float().norm() <= (0.11 if kind == "nf4" else 0.04) * matrix.float().norm()


def test_fp8_is_within_half_a_step_of_its_block() -> None:
    matrix = torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    error = (quantized("fp8", matrix) - matrix).abs().view(-1, 128)
    largest = matrix.view(-1, 128).abs().amax(1, keepdim=True)
    bound = torch.maximum(matrix.view(-1, 128).abs() / 16, largest / 448 * 2**-10)  # 3 bits of mantissa; subnormals
    assert (error <= bound * 1.0001).all()


@pytest.mark.parametrize("kind", ["nf4", "fp8"])
def test_a_layer_keeps_nothing_of_its_values_and_has_their_gradients(kind: str) -> None:
    layer, ordinary = torch.nn.Linear(96, 160), torch.nn.Linear(96, 160)
    keep_quantized(layer, kind)  # type: ignore[arg-type]
    weight = quantized_of(layer.weight)
    assert weight is not None
    weight.write(ordinary.weight)
    ordinary.weight.data, ordinary.bias.data = weight.values(), layer.bias.data
    inputs = [torch.randn(5, 96, generator=torch.Generator().manual_seed(3)).requires_grad_() for _ in range(2)]
    inputs[1].data = inputs[0].data
    results = [layer(inputs[0]), ordinary(inputs[1])]
    assert torch.equal(*results)
    gc.collect()
    whole = 96 * 160 * 4
    alive = [
        value for value in gc.get_objects() if type(value) is torch.Tensor and value.untyped_storage().nbytes() == whole
    ]
    assert [value for value in alive if value.data_ptr() != ordinary.weight.data_ptr()] == []
    assert layer.weight.untyped_storage().nbytes() == 4
    assert weight.nbytes < whole * (0.14 if kind == "nf4" else 0.27)
    for result in results:
        result.square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]
    assert torch.equal(layer.bias.grad, ordinary.bias.grad)  # type: ignore[arg-type]
    assert layer.weight.grad is None


def test_a_failed_forward_pass_leaves_the_layer_as_it_was() -> None:
    layer = torch.nn.Linear(64, 64)
    keep_quantized(layer, "fp8")
    quantized_of(layer.weight).write(torch.ones(64, 64))  # type: ignore[union-attr]
    with pytest.raises(RuntimeError):
        layer(torch.ones(2, 3))
    assert layer.weight.untyped_storage().nbytes() == 4
    assert torch.allclose(layer(torch.ones(1, 64)), 64 + layer.bias)
