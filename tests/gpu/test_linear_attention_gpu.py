"""Linear attention on a GPU: flash-linear-attention, where it is installed, against the rule and the norm in torch in
fp32, and our convolution against torch in float64; skipped without a GPU."""

import importlib.util

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from types import SimpleNamespace

from megatron_wrap.nn.linear_attention import implementations

by_package = pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="no flash-linear-attention")
LENGTHS = {"one": (1000,), "packed": (513, 1, 64, 422)}


def packed(lengths):
    borders = torch.tensor([0, *lengths], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)
    return None if len(lengths) == 1 else SimpleNamespace(lengths=lengths, cu_seqlens_q=borders)


def agrees(function, tensors, bound):
    """Values and gradients in bf16 against those of the same inputs in fp32, relative to the largest value."""
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [tensor.bfloat16().to(dtype).detach().requires_grad_() for tensor in tensors]
        output = function(*inputs)
        weight = torch.linspace(-1, 1, output.numel(), device="cuda").reshape(output.shape)
        results.append([output, *torch.autograd.grad((output.float() * weight).sum(), inputs)])
    for actual, expected in zip(*results, strict=True):
        assert (actual.float() - expected).abs().max() <= bound * expected.abs().max()


def inputs_of_the_rule(lengths):
    torch.manual_seed(0)
    tokens = sum(lengths)
    heads = [torch.randn(1, tokens, count, width, device="cuda") for count, width in ((4, 128), (4, 128), (8, 128))]
    return [*heads, -torch.rand(1, tokens, 8, device="cuda"), torch.rand(1, tokens, 8, device="cuda")]


def rule(lengths, trains):
    def output(query, key, value, log_decay, strength):
        # decays stay fp32, as in the layer
        return implementations.recur(
            query, key, value, log_decay.float(), strength, packed(lengths), None, False, trains
        )[0]

    return output


@by_package
@pytest.mark.parametrize("name", LENGTHS)
def test_the_rule_that_trains(name):
    """The package's, or where it refuses the backward pass that of torch."""
    agrees(rule(LENGTHS[name], trains=True), inputs_of_the_rule(LENGTHS[name]), 3e-2)


@by_package
@pytest.mark.parametrize("name", LENGTHS)
def test_the_rule_of_generation_and_evaluation(name):
    """The package's on every GPU."""
    tensors = inputs_of_the_rule(LENGTHS[name])
    with torch.no_grad():
        actual = rule(LENGTHS[name], trains=False)(*(tensor.bfloat16() for tensor in tensors))
        expected = rule(LENGTHS[name], trains=False)(*(tensor.bfloat16().float() for tensor in tensors))
    assert (actual.float() - expected).abs().max() <= 3e-2 * expected.abs().max()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("name", [*LENGTHS, "two rows"])
def test_the_convolution(name, dtype, bound):
    """Values and gradients of each part against torch's convolution in float64 on the CPU."""
    torch.manual_seed(1)
    lengths, widths = LENGTHS.get(name, (300,)), (128, 128, 256, 2, 2, 256)
    rows = torch.randn(sum(lengths), 2 if name == "two rows" else 1, 3, sum(widths)).to(dtype)
    weight, results = torch.randn(3 * sum(widths[:3]), 4).to(dtype), []
    for device, chosen in (("cuda", dtype), ("cpu", torch.float64)):
        inputs = [tensor.to(device, chosen).requires_grad_() for tensor in (rows, weight)]
        parts = implementations.convolved_heads(*inputs, widths, packed(lengths))
        factors = [torch.linspace(-1, 1, part.numel()).view(part.shape).to(dtype).to(device, chosen) for part in parts]
        total = sum((part * factor).float().sum() for part, factor in zip(parts, factors, strict=True))
        results.append([*parts, *torch.autograd.grad(total, inputs)])
    for actual, expected in zip(*results, strict=True):
        assert (actual.cpu().double() - expected).norm() <= bound * expected.norm()


@by_package
def test_the_gated_norm():
    torch.manual_seed(2)
    x, gate = (torch.randn(2, 500, 8, 128, device="cuda") for _ in range(2))
    weight = torch.rand(128, device="cuda")
    agrees(lambda *tensors: implementations.gated_rms_norm(*tensors, 1e-6), [x, gate, weight], 2e-2)
