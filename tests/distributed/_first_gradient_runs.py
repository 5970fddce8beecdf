"""Functions that the tests of first gradients run on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from _engine_runs import everything, started
from _started import gradients_of


def steps(overrides: Sequence[str], samples: Sequence[Any]) -> dict[str, Any]:
    """Three steps by `train`, one in two parts, and the gradients of a batch and of one without loss weight; with the
    experts' first gradients added to zeros, and written over nan."""
    from megatron_wrap.nn.experts.grouped import GroupedLinear
    from megatron_wrap.platform.megatron_core.first_gradients import replaces_first

    actual: dict[str, Any] = {}
    for kind in ("added", "written"):
        with started(overrides) as wrap:
            layers = [
                module for chunk in wrap.state.chunks for module in chunk.modules() if isinstance(module, GroupedLinear)
            ]
            for layer in layers:
                layer.accumulate = True  # as on a GPU
                if kind == "written":
                    replaces_first(layer.weight)
            actual[kind] = _steps(wrap, layers, samples)
    return actual


def _steps(wrap: Any, layers: Sequence[Any], samples: Sequence[Any]) -> dict[str, Any]:
    size = wrap.global_batch_size
    batches = [samples[start : start + size] for start in range(0, 5 * size, size)]
    metrics = [wrap.train(batches[0])]
    for layer in layers:
        layer.weight.main_grad.fill_(torch.nan)
    wrap.state.zero_gradients()
    are_zero = all((layer.weight.main_grad == 0).all() for layer in layers)
    metrics.append(wrap.train(batches[1]))
    evaluation = wrap.evaluate({"set": batches[2]})
    halves = [batches[2][: size // 2], batches[2][size // 2 :]]
    weights = wrap.count_weights(halves)
    for half in halves:
        wrap.forward_backward(half, step_weights=weights)
    metrics += [wrap.optimizer_step(), wrap.train(batches[3])]
    gradients = gradients_of(wrap, batches[4])
    without_weight = [{**sample, "loss_mask": [0] * len(sample["loss_mask"])} for sample in batches[4]]
    return {
        "are zero": are_zero,
        "layers": len(layers),
        "metrics": metrics,
        "evaluation": evaluation,
        "state": everything(wrap),
        "gradients": gradients,
        "without weight": gradients_of(wrap, without_weight),
    }


def gradients_of_ddp(overrides: Sequence[str]) -> dict[str, dict[str, torch.Tensor]]:
    """Gradients of two steps of three micro-batches, in buffers of Megatron-Core's DistributedDataParallel, compared
    with those of torch; and the buffers without those of the weights. The first step's gradients are ten times as
    large.

    `fused` adds its products itself, and is used twice; `returned` has its gradient from autograd; `late` is used in
    the last micro-batch alone, and `unused` in none of the second step. `other` does not replace its first gradient."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megatron_wrap.platform.megatron_core.first_gradients import replaces_first

    with started(overrides) as wrap:
        module = Weights()
        plain = Weights()
        plain.load_state_dict(module.state_dict())
        for name in ("fused", "returned", "late", "unused"):
            replaces_first(getattr(module, name))
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        wrapped = DistributedDataParallel(wrap.state.transformer_config, settings, module)
        generator = torch.Generator().manual_seed(3)
        for step in range(2):
            wrapped.zero_grad_buffer()
            plain.zero_grad()
            for micro_batch in range(3):
                rows = torch.randn(6, 4, generator=generator) * (10, 1)[step]
                used = {"late": micro_batch == 2, "unused": step == 0}
                with wrapped.no_sync():
                    module(rows, True, **used).backward()
                plain(rows, False, **used).backward()
            wrapped.start_grad_sync()
            wrapped.finish_grad_sync()
        actual = {name: parameter.main_grad.clone() for name, parameter in module.named_parameters()}
        for parameter in module.parameters():
            parameter.main_grad.zero_()
        return {
            "actual": actual,
            "expected": {
                name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
                for name, parameter in plain.named_parameters()
            },
            "outside": {str(number): buffer.grad_data for number, buffer in enumerate(wrapped.buffers)},
        }


class Weights(torch.nn.Module):
    """Two experts each, of 4 inputs and 4 outputs; the first one has no rows."""

    def __init__(self) -> None:
        super().__init__()
        for number, name in enumerate(("fused", "other", "returned", "late", "unused")):
            values = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(number))
            self.register_parameter(name, torch.nn.Parameter(values))

    def forward(self, rows: torch.Tensor, accumulate: bool, late: bool, unused: bool) -> torch.Tensor:
        from megatron_wrap.nn.experts.matmuls import grouped_linear

        ends = torch.tensor([0, 6], dtype=torch.int32)
        used = [("fused", accumulate), ("other", accumulate), ("fused", accumulate), ("returned", False)]
        used += [("late", accumulate)] * late + [("unused", accumulate)] * unused
        for name, adds in used:
            rows = grouped_linear(rows, getattr(self, name), ends, adds)
        return rows.square().mean()
