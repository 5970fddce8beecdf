"""`GroupedExperts` against Megatron-Core's experts one after the other, and the keys that select them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from megatron_wrap.core import MegatronWrap

pytestmark = [pytest.mark.transformers, pytest.mark.process_group]

CONFIG = Path(__file__).parents[2] / "model" / "model.yaml"
ARCH = "megatron_lm.model.arch"
EXPERTS, WIDTH = 4, 20
LINEAR = ("linear_fc1", "linear_fc2")
COUNTS = [5, 0, 7, 1]


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """As in gpt-oss."""
    return x * torch.sigmoid(1.702 * x)


GPT_OSS = {
    "activation_func": quick_gelu,
    "activation_func_clamp_value": 0.7,
    "glu_linear_offset": 1.0,
    "add_bias_linear": True,
}
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "gelu": {"gated_linear_unit": False, "activation_func": functional.gelu, "bias_activation_fusion": False},
}


def overrides(*further: str) -> list[str]:
    return [f"{ARCH}.num_experts={EXPERTS}", f"{ARCH}.moe_ffn_hidden_size={WIDTH}", *further]


@pytest.fixture
def with_run(tmp_path):
    """with_run(test): calls `test(wrap)` of a run with sequential experts."""

    def call(test: Callable[[MegatronWrap], None]) -> None:
        settings = overrides(f"{ARCH}.experts_impl=sequential", f"megatron_wrap.logger.output_dir={tmp_path}")
        with MegatronWrap(CONFIG, settings) as wrap:
            wrap.initialize()
            wrap.setup_model_and_optimizer()
            test(wrap)

    return call


def grouped_experts(wrap: MegatronWrap, settings: dict[str, Any]) -> tuple[Any, Any]:
    """`GroupedExperts` with random parameters, and its configuration: the run's with changed settings."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from megatron_wrap.nn.experts.grouped import GroupedExperts

    config = dataclasses.replace(wrap.state.transformer_config)
    for name, value in settings.items():
        setattr(config, name, value)
    grouped = GroupedExperts(EXPERTS, config, get_default_pg_collection())
    torch.manual_seed(3)
    for parameter in grouped.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return grouped, config


def results(experts: Callable[..., torch.Tensor], hidden_size: int) -> tuple[torch.Tensor | None, ...]:
    """Outputs, and the gradients of rows and their weights; parameters collect theirs."""
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(sum(COUNTS), hidden_size, generator=generator).requires_grad_()
    weights = torch.rand(sum(COUNTS), generator=generator).requires_grad_()
    output = experts(rows, weights)
    output.backward(torch.randn(output.shape, generator=generator))
    return output, rows.grad, weights.grad


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_outputs_and_every_gradient_equal_sequential_experts(activation, with_run):
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    def compare(wrap: MegatronWrap) -> None:
        grouped, config = grouped_experts(wrap, ACTIVATIONS[activation])
        layer = wrap.state.chunks[0].module.decoder.layers[0].mlp
        submodules = MLPSubmodules(**{name: type(getattr(layer.experts.local_experts[0], name)) for name in LINEAR})
        reference: Any = SequentialMLP(EXPERTS, config, submodules, pg_collection=get_default_pg_collection())
        for name, parameter in grouped.named_parameters():
            for expert, values in zip(reference.local_experts, parameter.detach(), strict=True):
                expert.get_parameter(name).data.copy_(values)
        counts = torch.tensor(COUNTS)
        actual = results(lambda rows, weights: grouped(rows, counts, weights)[0], config.hidden_size)
        expected = results(lambda rows, weights: reference(rows, counts, weights)[0], config.hidden_size)
        for value, other in zip(actual, expected, strict=True):
            assert torch.allclose(value, other, rtol=1e-6, atol=1e-6)
        for name, parameter in grouped.named_parameters():
            for expert, of_expert in zip(reference.local_experts, parameter.grad, strict=True):
                gradient = expert.get_parameter(name).grad
                other = torch.zeros_like(of_expert) if gradient is None else gradient
                assert torch.allclose(of_expert, other, rtol=1e-6, atol=1e-6), name

    with_run(compare)


def test_biases_clamp_and_offset_equal_transformers_gpt_oss(with_run):
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    def compare(wrap: MegatronWrap) -> None:
        grouped, config = grouped_experts(wrap, GPT_OSS)
        sizes = {"num_local_experts": EXPERTS, "hidden_size": config.hidden_size, "intermediate_size": WIDTH}
        settings: Any = GptOssConfig(**sizes)
        settings.swiglu_alpha, settings.swiglu_limit = 1.702, GPT_OSS["activation_func_clamp_value"]
        reference: Any = GptOssExperts(settings)

        def theirs(tensor: torch.Tensor) -> torch.Tensor:
            """[E, 2F, ...], gates then ups, as theirs, which alternate."""
            return torch.stack(tensor.chunk(2, dim=1), dim=2).flatten(1, 2)

        pairs = {
            reference.gate_up_proj: lambda read: theirs(read(grouped.linear_fc1.weight)).transpose(1, 2),
            reference.gate_up_proj_bias: lambda read: theirs(read(grouped.linear_fc1.bias)),
            reference.down_proj: lambda read: read(grouped.linear_fc2.weight).transpose(1, 2),
            reference.down_proj_bias: lambda read: read(grouped.linear_fc2.bias),
        }
        for parameter, convert in pairs.items():
            parameter.data.copy_(convert(lambda tensor: tensor.detach()))
        counts = torch.tensor(COUNTS)
        chosen = torch.arange(EXPERTS).repeat_interleave(counts)[:, None]
        actual = results(lambda rows, weights: grouped(rows, counts, weights)[0], config.hidden_size)
        expected = results(lambda rows, weights: reference(rows, chosen, weights[:, None]), config.hidden_size)
        for value, other in zip(actual, expected, strict=True):
            assert torch.allclose(value, other, rtol=1e-5, atol=1e-5)
        for parameter, convert in pairs.items():
            assert torch.allclose(convert(lambda tensor: tensor.grad), parameter.grad, rtol=1e-5, atol=1e-5)

    with_run(compare)


def test_automatic_choice_is_grouped(tmp_path: Path):
    from megatron_wrap.nn.experts.grouped import GroupedExperts
    from megatron_wrap.nn.experts.layer import GroupedMoELayer

    with MegatronWrap(CONFIG, overrides(f"megatron_wrap.logger.output_dir={tmp_path}")) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        layer = wrap.state.chunks[0].module.decoder.layers[0].mlp
        assert isinstance(layer, GroupedMoELayer)
        assert isinstance(layer.experts, GroupedExperts)
        assert tuple(layer.experts.linear_fc1.weight.shape) == (EXPERTS, 2 * WIDTH, wrap.config.arch.hidden_size)
