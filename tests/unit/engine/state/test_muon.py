"""Muon: its step compared with `torch.optim.Muon` on the matrices of Hugging Face's model."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_wrap.engine.state.muon import MOMENTUM, MatrixLayout, Muon, orthogonalize
from megatron_wrap.parallel.state import Axis

ALONE = Axis(1, 0, None)  # type: ignore[arg-type]
GROUPS, QUERIES, HEAD, HIDDEN, INNER = 2, 8, 4, 24, 40


def _fused(matrices: list[Tensor], repeats: int) -> Tensor:
    """Megatron-Core's storage of several matrices: blocks with rows of each."""
    return torch.cat([matrix.unflatten(0, (repeats, -1)) for matrix in matrices], dim=1).flatten(0, 1).contiguous()


def _muon(
    parameters: list[Tensor], layouts: list[MatrixLayout], adjust: str, nesterov: bool, dtype: torch.dtype
) -> Muon:
    of_iteration = {"momentum": 0.9, "nesterov": nesterov, "ns_steps": 5, "adjust_lr_fn": adjust, "ns_dtype": dtype}
    return Muon(parameters, 0.02, 0.1, **of_iteration, layouts=dict(zip(parameters, layouts, strict=True)))


@pytest.mark.parametrize(("adjust", "nesterov"), [("original", True), ("match_rms_adamw", False)])
def test_a_step_is_that_of_torch_for_each_hugging_face_matrix(adjust: str, nesterov: bool) -> None:
    torch.manual_seed(0)
    sizes = [GROUPS * QUERIES, GROUPS * HEAD, GROUPS * HEAD, INNER, INNER, INNER]
    theirs = [torch.nn.Parameter(torch.randn(rows, HIDDEN)) for rows in sizes[:5]]
    experts = [torch.nn.Parameter(torch.randn(HIDDEN, INNER)) for _ in range(2)]
    groups = [theirs[:3], theirs[3:5]]
    fused = [
        _fused([matrix.detach() for matrix in group], repeats)
        for group, repeats in zip(groups, (GROUPS, 1), strict=True)
    ]
    ours = [torch.nn.Parameter(value) for value in (*fused, torch.stack([expert.detach() for expert in experts]))]
    layouts = [
        MatrixLayout(ALONE, 0, ALONE, GROUPS, (QUERIES, HEAD, HEAD)),
        MatrixLayout(ALONE, 0, ALONE, 1, (INNER, INNER)),
        MatrixLayout(ALONE, 1, ALONE),
    ]
    muon = _muon(ours, layouts, adjust, nesterov, torch.bfloat16)
    oracle = torch.optim.Muon(
        [*theirs, *experts], lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=nesterov, adjust_lr_fn=adjust
    )
    for _ in range(3):
        for parameter in (*theirs, *experts):
            parameter.grad = torch.randn_like(parameter)
        for parameter, group, repeats in zip(ours, groups, (GROUPS, 1), strict=False):
            parameter.grad = _fused([matrix.grad for matrix in group], repeats)
        ours[2].grad = torch.stack([expert.grad for expert in experts])
        oracle.step()
        muon.step()
    expected = [_fused(group, repeats) for group, repeats in zip(groups, (GROUPS, 1), strict=True)]
    for parameter, value in zip(ours, (*expected, torch.stack(experts)), strict=True):
        torch.testing.assert_close(parameter, value, rtol=1e-6, atol=1e-6)
    momentum = [oracle.state[matrix]["momentum_buffer"] for matrix in theirs[:3]]
    assert torch.equal(muon.state[ours[0]][MOMENTUM], _fused(momentum, GROUPS))


def test_the_iteration_in_fp32_follows_the_published_polynomial() -> None:
    torch.manual_seed(1)
    matrix = torch.randn(20, 12)
    left, singular, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = singular / singular.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    expected = left @ torch.diag(values) @ right
    actual = orthogonalize(matrix, 5, torch.float32)
    assert (actual.double() - expected).abs().max() < 1e-5
    in_bf16 = orthogonalize(matrix, 5, torch.bfloat16)
    assert (in_bf16.double() - expected).norm() / math.sqrt(12) < 0.03
