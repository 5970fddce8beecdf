"""Kernels instead of Megatron-Core's functions."""

import pytest
import torch

from megatron_wrap.platform import choose_platform
from megatron_wrap.platform.megatron_core.kernels import LayerKernels, use
from megatron_wrap.platform.megatron_core.undoable_changes import Replacements


class _OnGPU:
    """A tensor as far as the choice of the kernel goes."""

    is_cuda = True


@pytest.fixture
def platform():
    platform = choose_platform("cpu")
    platform.install()
    return platform


def test_kernels_are_called_and_undone(platform):
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import mlp
    from megatron.core.transformer.moe import shared_experts

    replaced = [
        (mlp, "bias_swiglu_impl"),
        (shared_experts, "bias_swiglu_impl"),
        (layers, "_grad_accum_fusion_available"),
        (layers, "F"),
    ]
    before = [getattr(module, name) for module, name in replaced] + [rope_utils.fused_apply_rotary_pos_emb]
    replacements, products = Replacements(), object()
    kernels = LayerKernels(lambda gates: ("kernel", gates), len, products, lambda ids, weight: ("kernel", ids, weight))
    use(kernels, replacements)
    try:
        gates = _OnGPU()
        assert mlp.bias_swiglu_impl(gates, None) == ("kernel", gates)
        assert shared_experts.bias_swiglu_impl(gates, None, False) == ("kernel", gates)
        assert rope_utils.fused_apply_rotary_pos_emb is len
        assert layers.fused_weight_gradient_mlp_cuda is products
        assert layers._grad_accum_fusion_available
        assert layers.F.embedding(1, 2) == ("kernel", 1, 2)
    finally:
        replacements.close()
    assert [getattr(module, name) for module, name in replaced] + [rope_utils.fused_apply_rotary_pos_emb] == before


def test_a_later_call_adds_the_kernels_that_the_first_one_left_out(platform):
    """A model that is only evaluated leaves out those of the backward pass, and the same object may train then."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.tensor_parallel import layers

    before, products = (rope_utils.fused_apply_rotary_pos_emb, layers._grad_accum_fusion_available), object()
    try:
        platform.use_kernels(LayerKernels(rotary=len))
        assert layers._grad_accum_fusion_available == before[1]
        platform.use_kernels(LayerKernels(rotary=abs, weight_gradients=products))
        assert rope_utils.fused_apply_rotary_pos_emb is len
        platform.use_kernels(LayerKernels(rotary=len))
        assert layers.fused_weight_gradient_mlp_cuda is products
        assert layers._grad_accum_fusion_available
    finally:
        platform.uninstall()
    assert (rope_utils.fused_apply_rotary_pos_emb, layers._grad_accum_fusion_available) == before


@pytest.mark.parametrize("case", ["cpu", "bias"])
def test_megatron_core_computes_what_the_kernel_does_not(platform, case):
    from megatron.core.transformer import mlp

    replacements = Replacements()
    use(LayerKernels(swiglu=lambda gates: pytest.fail("called")), replacements)
    try:
        gates, bias = torch.randn(3, 2, 8), torch.randn(8) if case == "bias" else None
        gate, linear = (gates if bias is None else gates + bias).chunk(2, dim=-1)
        expected = torch.nn.functional.silu(gate) * linear
        torch.testing.assert_close(mlp.bias_swiglu_impl(gates, bias), expected)
    finally:
        replacements.close()


def test_a_lookup_with_further_arguments_is_torch_s(platform):
    from megatron.core.tensor_parallel import layers

    with Replacements() as replacements:
        use(LayerKernels(embedding=lambda ids, weight: pytest.fail("called")), replacements)
        ids, weight = torch.tensor([1, 0]), torch.randn(2, 3)
        assert torch.equal(layers.F.embedding(ids, weight, scale_grad_by_freq=True), weight[ids])
        assert layers.F.relu is torch.nn.functional.relu


def test_a_cpu_has_no_kernels():
    from megatron_wrap.nn.kernels.available import layer_kernels

    assert layer_kernels(torch.device("cpu")) == LayerKernels()
