"""Functions that the tests of `tp_comm_overlap` run on each rank."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import torch

CONFIG = Path(__file__).parents[2] / "scripts/benchmark/overhead.yaml"
SMALL = ("megatron_lm.model.arch.num_layers=2", "megatron_lm.train.common.seq_length=32")
"""On CPUs, whose products in bf16 are slow."""
SIZES = {"tokens": 12, "rows": 3, "inputs": 12}
"""Global."""


def compare_layers(platform: str, dtype: str, accumulates: bool = False, outputs: int = 16) -> dict[str, float]:
    """Largest differences from Megatron-Core's own layers, relative to the largest value: outputs, gradients of inputs,
    weights and biases, of a column-parallel layer followed by a row-parallel one.

    Args:
        accumulates: weight gradients are added to fp32 `main_grad`.
        outputs: of the first layer, over all ranks.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, layers

    from megatron_wrap.platform import choose_platform

    here = choose_platform(platform)
    here.install()
    try:
        from megatron_wrap.nn.kernels.weight_gradients import WeightGradients
        from megatron_wrap.nn.layers.overlapped_communication import (
            GatheringColumnParallelLinear,
            ScatteringRowParallelLinear,
        )

        parallel_state.initialize_model_parallel(dist.get_world_size())
        classes: tuple[Any, Any] = (ColumnParallelLinear, RowParallelLinear)
        fused = {"_grad_accum_fusion_available": True, "fused_weight_gradient_mlp_cuda": WeightGradients}
        with mock.patch.multiple(layers, create=True, **fused):  # also on CPUs
            of_theirs = _results(classes, here.device, getattr(torch, dtype), accumulates, outputs)
        classes = (GatheringColumnParallelLinear, ScatteringRowParallelLinear)
        with mock.patch.multiple(layers, create=True, **fused):
            of_ours = _results(classes, here.device, getattr(torch, dtype), accumulates, outputs)
        assert list(of_ours) == list(of_theirs)
        return {
            name: float((of_ours[name] - value).abs().max() / value.abs().max()) for name, value in of_theirs.items()
        }
    finally:
        parallel_state.destroy_model_parallel()
        here.uninstall()


def train(implementation: str, overlap: bool, steps: int, platform: str = "cuda") -> list[float]:
    """Losses of steps in bf16 with samples of one length, under tensor and sequence parallelism over all processes."""
    import torch.distributed as dist
    from _started import started

    from megatron_wrap.nn.layers.overlapped_communication import GatheringColumnParallelLinear

    parallel = "megatron_lm.model.parallel"
    overrides = (
        f"{parallel}.tensor_model_parallel_size={dist.get_world_size()}",
        f"{parallel}.tp_comm_overlap={str(overlap).lower()}",
        f"megatron_lm.model.arch.transformer_impl={implementation}",
        *("megatron_lm.train.dtype.__select__=bf16", f"megatron_wrap.init.platform={platform}"),
        *(SMALL if platform == "cpu" else ()),
    )
    with started(CONFIG, overrides) as wrap:
        hidden = [isinstance(module, GatheringColumnParallelLinear) for module in wrap.state.chunks[0].modules()]
        assert any(hidden) == (overlap and implementation == "torch")
        length = wrap.config.train.seq_length
        tokens = torch.randint(
            0, 4096, (wrap.global_batch_size, length + 1), generator=torch.Generator().manual_seed(3)
        )
        samples = [{"input_ids": row, "loss_mask": [1] * (length + 1)} for row in tokens.tolist()]
        return [wrap.train(samples)["loss"] for _ in range(steps)]


def _results(
    classes: tuple[Any, Any], device: torch.device, dtype: torch.dtype, accumulates: bool, outputs: int
) -> dict[str, torch.Tensor]:
    """Name -> value, in fp32, of both passes through the two layers."""
    import torch.distributed as dist
    from megatron.core import ModelParallelConfig

    size, rank = dist.get_world_size(), dist.get_rank()
    config = ModelParallelConfig(
        tensor_model_parallel_size=size,
        sequence_parallel=True,
        params_dtype=dtype,
        gradient_accumulation_fusion=accumulates,
        perform_initialization=False,
    )
    generator = torch.Generator().manual_seed(5)
    fill = functools.partial(torch.nn.init.normal_, generator=torch.Generator().manual_seed(7 + rank))
    shared = {"config": config, "init_method": lambda weight: weight, "skip_bias_add": False, "bias": True}
    column = classes[0](SIZES["inputs"], outputs, gather_output=False, **shared)
    row = classes[1](outputs, SIZES["inputs"], input_is_parallel=True, **shared)
    parameters = dict(torch.nn.ModuleList([column, row]).to(device).named_parameters())
    for parameter in parameters.values():
        parameter.data.copy_(fill(torch.empty(parameter.shape)))
        if accumulates and parameter.dim() == 2:
            parameter.main_grad = torch.full(parameter.shape, 0.5, device=device)
            parameter.grad_added_to_main_grad = False
    whole = torch.randn(SIZES["tokens"], SIZES["rows"], SIZES["inputs"], generator=generator)
    share = whole.chunk(size)[rank].to(device, dtype).requires_grad_()
    output, _ = row(column(share)[0])
    output.backward(torch.randn(whole.shape, generator=generator).chunk(size)[rank].to(device, dtype))
    gradients = {}
    for name, parameter in parameters.items():
        accumulated = getattr(parameter, "main_grad", None)
        assert accumulated is None or parameter.grad_added_to_main_grad
        gradients[name] = parameter.grad if accumulated is None else accumulated
    results = {"output": output.detach(), "input": share.grad, **gradients}
    return {name: value.float() for name, value in results.items()}
