"""Auxiliary losses of MoE routers with padding, against transformers and formulas; logits against float64."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _documented_router import documented_kernels
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from megatron_wrap.core import MegatronWrap
from megatron_wrap.nn.kernels import available
from megatron_wrap.nn.kernels.available import Selection, can_route
from megatron_wrap.platform import choose_platform

choose_platform("cpu").install()

from megatron_wrap.nn.experts.router import gate  # noqa: E402

pytestmark = [pytest.mark.transformers, pytest.mark.process_group]

EXPERTS, TOPK, COEFFICIENT = 6, 2, 0.25
LENGTHS = (33, 9, 20, 26)


def samples() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(0, 301, (length + 1,), generator=generator).tolist() for length in LENGTHS]
    return [{"input_ids": ids, "loss_mask": [1] * len(ids)} for ids in drawn]


def step(
    tmp_path: Path, extra_padding: int = 0, logger: str = "", rows: int = 4, dtype: str = "fp32", **arch: Any
) -> tuple[dict[str, float], torch.Tensor, list[Any]]:
    """Train a one-layer model for one step with `rows` of the four samples in a micro-batch. Returns the metrics, the
    router's logits [B, S, experts] of the first one, the gradient of the router's weight and its expert bias."""
    overrides = {
        "model.arch.num_layers": 1,
        "model.arch.num_experts": EXPERTS,
        "model.arch.moe_router_topk": TOPK,
        "train.common.micro_batch_size": rows,
        "train.dtype.bf16": str(dtype == "bf16").lower(),
        **{f"model.arch.{key}": value for key, value in arch.items()},
    }
    texts = [f"megatron_lm.{key}={value}" for key, value in overrides.items()]
    texts += [
        f"megatron_wrap.logger.output_dir={tmp_path}",
        *([f"megatron_wrap.logger.{logger}=true"] if logger else []),
    ]
    with MegatronWrap(Path(__file__).parents[2] / "model" / "model.yaml", texts) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        state = wrap.state
        state.extra_padding = extra_padding
        from megatron_wrap.nn.experts.router import Router

        (router,) = (module for module in state.chunks[0].modules() if isinstance(module, Router))
        seen: list[torch.Tensor] = []
        router.register_forward_hook(lambda module, inputs, outputs: seen.append(module.gating(inputs[0]).detach()))
        metrics = wrap.train(samples())
        gradients = [router.weight.main_grad.clone(), router.expert_bias]
        assert all(buffer.dtype == torch.float32 for buffer in router.buffers())
    return metrics, seen[0].transpose(0, 1), gradients


def mask(width: int) -> torch.Tensor:
    return torch.arange(width)[None] < torch.tensor(LENGTHS)[:, None]


@pytest.mark.parametrize(
    ("kind", "name"), [("aux_loss", "load_balancing_loss"), ("global_aux_loss", "global_load_balancing_loss")]
)
def test_losses_over_a_batch_equal_transformers_and_the_formula(tmp_path: Path, kind: str, name: str):
    """Of one micro-batch; the z-loss is the mean square of the logsumexp."""
    losses = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": COEFFICIENT}
    metrics, logits, _ = step(tmp_path, moe_z_loss_coeff=COEFFICIENT, **losses)
    assert logits.shape[:2] == (4, max(LENGTHS))
    expected = load_balancing_loss_func((logits.flatten(0, 1),), EXPERTS, TOPK, mask(logits.shape[1]).long())
    # transformers averages over tokens, Megatron-LM over tokens and their top-k experts
    assert metrics[name] == pytest.approx(expected.item() / TOPK, rel=1e-5)
    squares = logits.logsumexp(dim=-1).square()
    assert metrics["z_loss"] == pytest.approx(squares[mask(logits.shape[1])].mean().item(), rel=1e-5)


def test_sequence_loss_is_the_mean_over_sequences(tmp_path: Path):
    metrics, logits, _ = step(tmp_path, moe_aux_loss_coeff=COEFFICIENT, moe_router_load_balancing_type="seq_aux_loss")
    by_sequence = [
        load_balancing_loss_func((row[:length],), EXPERTS, TOPK) / TOPK
        for row, length in zip(logits, LENGTHS, strict=True)
    ]
    assert metrics["seq_load_balancing_loss"] == pytest.approx(sum(by_sequence).item() / 4, rel=1e-5)


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_padding_changes_no_loss_and_no_gradient(tmp_path: Path, kind: str):
    losses = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": COEFFICIENT, "moe_z_loss_coeff": 0.1}
    bias = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": "true"}
    tight, _, gradients = step(tmp_path, **losses, **bias)
    padded, logits, padded_gradients = step(tmp_path, extra_padding=17, **losses, **bias)
    assert logits.shape[1] == max(LENGTHS) + 17
    for name in tight:
        if name.endswith("loss") or name == "grad_norm":
            assert padded[name] == pytest.approx(tight[name], rel=1e-5), name
    torch.testing.assert_close(padded_gradients, gradients, rtol=1e-4, atol=1e-7)


def test_counts_of_tokens_are_not_rounded_in_half_precision(tmp_path: Path):
    """`step` looks at the buffers that contain them."""
    losses = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": COEFFICIENT}
    bias = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": "true"}
    metrics, _, (gradient, expert_bias) = step(tmp_path, dtype="bf16", **losses, **bias)
    assert metrics["global_load_balancing_loss"] > 0
    assert gradient.abs().sum() > 0
    assert expert_bias.abs().sum() > 0


def test_losses_without_coefficient_are_not_reported(tmp_path: Path):
    metrics, _, _ = step(tmp_path)
    assert not [name for name in metrics if "balancing" in name or name == "z_loss"]


def test_load_of_the_experts_without_padding(tmp_path: Path):
    metrics, logits, _ = step(tmp_path, logger="add_expert_load_to_metrics", moe_router_pre_softmax="true")
    real = logits[mask(logits.shape[1])]
    counts = real.topk(TOPK).indices.flatten().bincount(minlength=EXPERTS)
    assert metrics["experts/layer_0/busiest"] == pytest.approx(float(counts.max() / counts.float().mean()))
    entropies = torch.distributions.Categorical(logits=real.float()).entropy()
    assert metrics["experts/layer_0/entropy"] == pytest.approx(float(entropies.mean()), rel=1e-5)
    assert metrics["experts/layer_0/dropped"] == 0


def test_dropped_choices_are_counted(tmp_path: Path):
    metrics, _, _ = step(tmp_path, logger="add_expert_load_to_metrics", moe_expert_capacity_factor=0.5)
    assert 0 < metrics["experts/layer_0/dropped"] < TOPK * sum(LENGTHS)


SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": "true"}
GROUPS = {"moe_router_num_groups": 3, "moe_router_group_topk": 2}


@pytest.mark.parametrize(
    "arch",
    [
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": COEFFICIENT, "moe_z_loss_coeff": 0.1},
        {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": COEFFICIENT, **SIGMOID, **GROUPS},
        {
            "moe_router_load_balancing_type": "[seq_aux_loss,global_aux_loss,aux_loss]",
            "moe_aux_loss_coeff": "[0.25,0.125,0.5]",
            **SIGMOID,
        },
        {"moe_router_pre_softmax": "true", "moe_router_topk_scaling_factor": 2.5},
    ],
)
def test_the_kernel_gets_the_configuration_and_the_padding(tmp_path: Path, arch: dict[str, Any]):
    rows = 2 if "global" in str(arch) else 4  # the global loss adds up the loads of micro-batches
    expected, _, gradients = step(tmp_path, extra_padding=5, rows=rows, **arch)
    with documented_kernels() as calls:
        metrics, _, by_kernel = step(tmp_path, extra_padding=5, rows=rows, **arch)
    assert len(calls) == 4 // rows
    for name in expected:
        if name.endswith("loss") or name == "grad_norm":
            assert metrics[name] == pytest.approx(expected[name], rel=1e-6), name
    torch.testing.assert_close(by_kernel, gradients, rtol=1e-5, atol=1e-8)


def test_what_the_kernel_supports(monkeypatch):
    monkeypatch.setattr(available, "has_triton", lambda: True)

    def supported(experts: int, selection: Selection, **logits: Any) -> bool:
        return can_route(
            SimpleNamespace(**{"is_cuda": True, "dtype": torch.float32, "shape": (4, 2, experts)} | logits), selection
        )

    plain, grouped = Selection(2, False, False), Selection(2, True, False, groups=8, group_topk=4)
    assert supported(60, plain)
    assert supported(64, grouped)
    assert not supported(48, grouped)
    assert not supported(2048, plain)
    assert not supported(60, plain, dtype=torch.float64)
    assert not supported(60, plain, is_cuda=False)


def test_logits_and_gradients_are_those_of_fp32():
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(6, 5, 32, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(12, 32, generator=generator).bfloat16().requires_grad_()
    outer = torch.randn(6, 5, 12, generator=generator) * torch.logspace(-6, 3, 12)
    logits = gate(hidden, weight)
    assert logits.dtype == torch.float32
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = exact[0] @ exact[1].t()
    torch.testing.assert_close(logits.double(), expected, rtol=1e-6, atol=1e-6)
    actual = torch.autograd.grad(logits, (hidden, weight), outer)
    of_exact = torch.autograd.grad(expected, exact, outer.double())
    assert torch.equal(actual[1], of_exact[1].bfloat16())
    torch.testing.assert_close(actual[0].double(), of_exact[0], rtol=2**-8, atol=0.0)
