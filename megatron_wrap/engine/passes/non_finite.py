"""Finds the first value that is nan or infinite in the pass of one micro-batch, with hooks on all modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_wrap.model.chunks import bare_model
from megatron_wrap.model.initial_weights import global_module_names, global_names
from megatron_wrap.ops.deferred_logits import DeferredLogits, chunks_of
from megatron_wrap.platform.megatron_core.first_gradients import zero_if_stale

_FORWARD, _LOSS, _BACKWARD, _WEIGHTS = range(4)
"""Parts of the pass, in their order."""


@dataclass(frozen=True)
class NonFinite:
    """The first value of one part of a micro-batch's pass, on this rank, that is nan or infinite."""

    part: int
    """Part of the pass: forward pass, loss, backward pass, or gradients of the weights."""
    stage: int
    """Position of this process's model chunk in the order of the part."""
    sequence: int
    """Position of the value within the chunk."""
    name: str
    """Name of the module or the parameter; for a gradient, the module whose output or input it belongs to; empty: the
    loss."""
    returned_by: str = ""
    """For a gradient, the module whose backward pass returned it; empty: the loss, or a later stage."""

    def __str__(self) -> str:
        """A description of the value."""
        if self.part == _FORWARD:
            return f"the output of {self.name}"
        if self.part == _LOSS:
            return "the loss (the outputs of all modules are finite)"
        if self.part == _WEIGHTS:
            return f"the gradient of {self.name} (the gradients of all modules are finite)"
        if self.returned_by:
            return f"the gradient from the backward pass of {self.returned_by}"
        return f"the gradient of the loss with respect to the output of {self.name}"


def is_finite(tensor: Tensor) -> bool:
    """Whether all elements are finite, without a temporary of the tensor's size; waits for the device."""
    if isinstance(tensor, DeferredLogits):
        return all(map(is_finite, chunks_of(tensor)))
    tensor = tensor.detach()
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return True
    if tensor.element_size() == 1:  # FP8
        tensor = tensor.float()
    smallest, largest = torch.aminmax(tensor)  # both nan if any element is
    return bool(torch.isfinite(smallest) & torch.isfinite(largest))


def non_finite_parameters(chunks: Sequence[nn.Module], tied: bool) -> list[str]:
    """Global names of this process's parameters that contain nan or infinite values, in the order of the model."""
    return [
        named.name
        for chunk in chunks
        for named in global_names(bare_model(chunk), tied)
        if not is_finite(named.of(named.tensor))
    ]


class NonFiniteWatch:
    """Records the first non-finite value of each part of the pass of one micro-batch, while it is `attached`. Each
    value that is checked waits for the device. No communication.

    Args:
        chunks: this process's model chunks, in Megatron-Core's wrappers.
        tied: embedding and output layer share their weights.
        stages: number of pipeline stages, and this process's stage.
    """

    def __init__(self, chunks: Sequence[nn.Module], tied: bool, stages: tuple[int, int]) -> None:
        size, rank = stages
        models = [bare_model(chunk) for chunk in chunks]
        last = size * len(models) - 1
        self._chunks = [
            _ChunkWatch(model, tied, number * size + rank, last - number * size - rank)
            for number, model in enumerate(models)
        ]
        self._losses: list[NonFinite] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The hooks are on the modules within the context, which ends after the backward pass."""
        with ExitStack() as hooks:
            for chunk in self._chunks:
                for handle in chunk.hooks():
                    hooks.enter_context(handle)
            yield
        for chunk in self._chunks:
            chunk.check_weights()

    def check_loss(self, loss: Tensor) -> None:
        """Record the loss if it is not finite."""
        if not is_finite(loss):
            self._losses.append(NonFinite(_LOSS, 0, 0, ""))

    @property
    def values(self) -> list[NonFinite]:
        """All recorded values, in no order."""
        return [*self._losses, *(value for chunk in self._chunks for value in chunk.first.values())]


class _ChunkWatch:
    """The watch on one model chunk."""

    def __init__(self, model: nn.Module, tied: bool, forward_stage: int, backward_stage: int) -> None:
        self._model, self._tied = model, tied
        self._stages = {_FORWARD: forward_stage, _BACKWARD: backward_stage, _WEIGHTS: backward_stage}
        self.first: dict[int, NonFinite] = {}
        """Part of the pass -> its first value that is not finite."""
        self._checked: Counter[int] = Counter()
        self._last: Tensor | None = None
        """The gradient that was recorded last, until the modules that take its tensor have been named."""

    def hooks(self) -> list[Any]:
        handles: list[Any] = []
        for module, name in global_module_names(self._model).items():
            handles.append(module.register_forward_pre_hook(self._input_hook(name), with_kwargs=True))
            handles.append(module.register_forward_hook(self._output_hook(module, name)))
        return handles

    def check_weights(self) -> None:
        """Record the gradients of weights that are not finite; to be called after the backward pass."""
        for named in global_names(self._model, self._tied):
            gradient = getattr(named.tensor, "main_grad", None)
            if gradient is not None:
                zero_if_stale(gradient)
                self._check(_WEIGHTS, named.name, named.of(gradient))

    def _input_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, keywords: Any) -> None:
            for tensor in _tensors((arguments, keywords)):
                if tensor.requires_grad and torch.is_grad_enabled():
                    _on_gradient(tensor, partial(self._returned, name))

        return hook

    def _output_hook(self, module: nn.Module, name: str) -> Callable[..., None]:
        is_whole = module is self._model

        def hook(module: nn.Module, arguments: Any, outputs: Any) -> None:
            for tensor in _tensors(outputs):
                self._check(_FORWARD, name, tensor)
                if not tensor.requires_grad or not torch.is_grad_enabled():
                    continue
                is_deferred = isinstance(tensor, DeferredLogits)
                if is_deferred and not is_whole:  # both are outputs of the same hidden states
                    continue
                # the loss does not reach deferred logits
                reached = tensor.hidden if isinstance(tensor, DeferredLogits) else tensor
                _on_gradient(reached, partial(self._arrived, name, is_deferred=is_deferred))

        return hook

    def _arrived(self, name: str, gradient: Tensor, is_deferred: bool) -> None:
        """Check the gradient of a module's output. For deferred logits it is that of their hidden states, which the
        output layer passes on unchanged."""
        first = self.first.get(_BACKWARD)
        if first is None:
            self._check(_BACKWARD, name, gradient)
            if not is_deferred:
                self._remember(gradient)
        elif first.returned_by or not self._is_remembered(gradient):
            self._last = None

    def _returned(self, name: str, gradient: Tensor) -> None:
        """Check the gradient of a module's input. Hooks of a tensor run in the order in which they were registered:
        first those of the module whose output it is, then those of the modules that take it, the innermost last."""
        if _BACKWARD not in self.first:
            self._check(_BACKWARD, name, gradient)
            self._remember(gradient)
        if _BACKWARD in self.first and self._is_remembered(gradient):
            self.first[_BACKWARD] = replace(self.first[_BACKWARD], returned_by=name)

    def _remember(self, gradient: Tensor) -> None:
        self._last = gradient if _BACKWARD in self.first else None

    def _is_remembered(self, gradient: Tensor) -> bool:
        return self._last is not None and self._last.data_ptr() == gradient.data_ptr()

    def _check(self, part: int, name: str, value: Tensor) -> None:
        self._checked[part] += 1
        if part not in self.first and not is_finite(value):
            self.first[part] = NonFinite(part, self._stages[part], self._checked[part], name)


def _on_gradient(tensor: Tensor, hook: Callable[[Tensor], Any]) -> None:
    """Call `hook` with the gradient of a tensor. The tensor's `grad_fn` is read first: for a view whose memory was
    written, torch creates it on the first read, and crashes if that is within the registration (2.13)."""
    _ = tensor.grad_fn
    tensor.register_hook(hook)


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors of floating-point numbers in nested tuples, lists and mappings."""
    if isinstance(values, Tensor):
        if values.is_floating_point():
            yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
