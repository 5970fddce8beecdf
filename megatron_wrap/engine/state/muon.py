"""Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/; arXiv:2502.16982) on whole matrices of a sharded
model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.parallel.collectives import broadcast_on, gather_tensors
from megatron_wrap.parallel.state import Axis

_COEFFICIENTS, _EPS = (3.4445, -4.7750, 2.0315), 1e-7
"""Coefficients and epsilon of the Newton-Schulz iteration, as in Keller Jordan's Muon and in `torch.optim.Muon`."""
MOMENTUM = "muon_momentum"
"""Name of the momentum in the optimizer's state and in checkpoints."""


@dataclass(frozen=True)
class MatrixLayout:
    """The layout of a parameter, or of each entry of a stack of experts' parameters: its shard and its matrices."""

    tp: Axis
    """The tensor-parallel axis over which the parameter is sharded."""
    dim: int | None
    """Dimension of the matrix that is sharded; None: replicated."""
    replicas: Axis
    """The processes with the same shard, which share the work."""
    repeats: int = 1
    """Number of equal blocks of rows in the whole parameter, each with rows of every matrix."""
    rows: tuple[int, ...] | None = None
    """Number of rows of each matrix in a block: queries, keys and values of a group, or gate and up of a shard; None:
    the parameter is one matrix."""

    def whole(self, shard: Tensor) -> Tensor:
        """The parameter without sharding, [..., A, B]. Collective over `tp`."""
        if self.dim is None or self.tp.size == 1:
            return shard
        return torch.cat(gather_tensors(shard, self.tp.group), dim=self.dim - 2)

    def shard(self, whole: Tensor) -> Tensor:
        """This process's shard of a whole parameter, [..., a, b]; a view."""
        if self.dim is None or self.tp.size == 1:
            return whole
        return whole.chunk(self.tp.size, dim=self.dim - 2)[self.tp.rank]

    def matrices(self, whole: Tensor) -> Iterator[Tensor]:
        """Views [repeats, rows, B] of a whole parameter [A, B]; the matrix is the view's `flatten(0, 1)`."""
        blocks = whole.unflatten(0, (self.repeats, -1))
        yield from [blocks] if self.rows is None else blocks.split(self.rows, dim=1)


class Muon(torch.optim.Optimizer):
    """The update of `torch.optim.Muon` for every matrix of Hugging Face's model that a parameter contains.

    The momentum of a shard is kept on every process that has the shard. For the update a parameter is gathered over its
    tensor-parallel axis and its matrices are orthogonalized. One of the processes with the same shard computes this and
    sends the result to the others, so the work of a step is divided by their number.

    Args:
        params: parameter groups.
        lr, weight_decay: as in `torch.optim.Muon`; decay is decoupled.
        momentum, nesterov, ns_steps: as in `torch.optim.Muon`.
        adjust_lr_fn: "original" or "match_rms_adamw", as in `torch.optim.Muon`.
        ns_dtype: dtype of the Newton-Schulz iteration; `torch.optim.Muon` uses bf16.
        layouts: parameter -> its layout; read in the first step, so it may be filled later.

    State: `muon_momentum` per parameter, with its shape and dtype: the running mean of the gradient.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        weight_decay: float,
        momentum: float,
        nesterov: bool,
        ns_steps: int,
        adjust_lr_fn: str,
        ns_dtype: torch.dtype,
        layouts: Mapping[Tensor, MatrixLayout],
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._momentum, self._nesterov, self._ns_steps = momentum, nesterov, ns_steps
        self._adjust_lr_fn, self._ns_dtype, self._layouts = adjust_lr_fn, ns_dtype, layouts

    def allocate_state(self) -> None:
        """Allocate the momentum of every parameter that has none, zeros."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if MOMENTUM not in self.state[parameter]:
                    self.state[parameter][MOMENTUM] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter. Collective over all axes of the layouts."""
        self.allocate_state()
        pairs = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        parameters = [parameter for parameter, _ in pairs if parameter.grad is not None]
        owners = self._owners(parameters)
        updates = {}
        for parameter in parameters:
            direction = self._direction(parameter)
            if owners[parameter] == self._layouts[parameter].replicas.rank:
                updates[parameter] = self._orthogonalized(direction, self._layouts[parameter])
        for parameter, group in pairs:
            if parameter.grad is None:
                continue
            layout = self._layouts[parameter]
            update = updates.pop(parameter, None)
            if update is None:
                update = torch.empty_like(parameter, dtype=self._ns_dtype)
            if layout.replicas.size > 1:
                broadcast_on(update, owners[parameter], layout.replicas.group)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.sub_(update * (self._ratios(parameter, layout) * group["lr"]))

    def _direction(self, parameter: Tensor) -> Tensor:
        """The direction of the update as a shard: the momentum after this gradient, with Nesterov's correction. Updates
        the state."""
        assert parameter.grad is not None
        gradient, average = parameter.grad, self.state[parameter][MOMENTUM]
        average.lerp_(gradient, 1 - self._momentum)
        return gradient.lerp(average, self._momentum) if self._nesterov else average

    def _orthogonalized(self, direction: Tensor, layout: MatrixLayout) -> Tensor:
        """This process's shard of the update before its factor, contiguous, in the dtype of the iteration."""
        whole = layout.whole(direction)
        update = torch.empty_like(whole, dtype=self._ns_dtype)
        for entry, result in zip(_entries(whole), _entries(update), strict=True):
            for matrix, target in zip(layout.matrices(entry), layout.matrices(result), strict=True):
                values = orthogonalize(matrix.flatten(0, 1), self._ns_steps, self._ns_dtype)
                target.copy_(values.view(target.shape))
        return layout.shard(update).contiguous()

    def _ratios(self, parameter: Tensor, layout: MatrixLayout) -> Tensor:
        """Factor of the learning rate for each row of the shard, fp32 [a, 1]."""
        size = layout.tp.size if layout.dim is not None else 1
        rows = parameter.shape[-2] * (size if layout.dim == 0 else 1)
        columns = parameter.shape[-1] * (size if layout.dim == 1 else 1)
        ratios = torch.empty(rows, 1)
        for view in layout.matrices(ratios):
            view.fill_(learning_rate_ratio(view.shape[0] * view.shape[1], columns, self._adjust_lr_fn))
        return (layout.shard(ratios) if layout.dim == 0 else ratios).to(parameter.device, non_blocking=True)

    def _owners(self, parameters: Sequence[Tensor]) -> dict[Tensor, int]:
        """Parameter -> the rank among its replicas that computes its update: the largest first, each for the rank with
        the least work so far. The same on all replicas."""
        loads: dict[Any, list[float]] = {}
        owners = {}
        for parameter in sorted(parameters, key=_work, reverse=True):
            replicas = self._layouts[parameter].replicas
            load = loads.setdefault(replicas.group, [0.0] * replicas.size)
            owners[parameter] = load.index(min(load))
            load[owners[parameter]] += _work(parameter)
        return owners


def orthogonalize(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Newton-Schulz iteration towards the orthogonal factor of a matrix [A, B], with the operations of
    `torch.optim.Muon` in this dtype. The result is contiguous, or the transpose of a contiguous matrix."""
    values = matrix.to(dtype, copy=True)
    if matrix.size(0) > matrix.size(1):
        values = values.T
    values.div_(values.norm().clamp(min=_EPS))  # singular values of at most 1
    linear, cubic, quintic = _COEFFICIENTS
    for _ in range(steps):
        gram = values @ values.T
        product = torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic)
        values = torch.addmm(values, product, values, beta=linear)
    return (values.T if matrix.size(0) > matrix.size(1) else values).contiguous()


def learning_rate_ratio(rows: int, columns: int, adjust_lr_fn: str) -> float:
    """Factor of the learning rate for a matrix [rows, columns], as in `torch.optim.Muon`."""
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def _entries(parameter: Tensor) -> Sequence[Tensor]:
    """The matrices [A, B] of a parameter [A, B], or of a stack [E, A, B]; views."""
    return [parameter] if parameter.dim() == 2 else parameter.unbind(0)


def _work(parameter: Tensor) -> float:
    """Number of multiplications of an iteration, up to a factor."""
    return float(parameter.numel() * min(parameter.shape[-2:]))
