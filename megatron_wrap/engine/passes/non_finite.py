"""Finds the first value of a pass that is nan or infinite: hooks on all modules, for a step that is repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_wrap.engine.batches.micro_batch import MicroBatch
from megatron_wrap.engine.passes.loss import ModelOutput
from megatron_wrap.model.chunks import bare_model
from megatron_wrap.model.initial_weights import global_module_names, global_names
from megatron_wrap.ops.deferred_logits import DeferredLogits, chunks_of
from megatron_wrap.platform.megatron_core.first_gradients import zero_if_stale

_FORWARD, _LOSS, _BACKWARD, _WEIGHTS = range(4)
"""Parts of a micro-batch's pass, in their order."""


@dataclass(frozen=True)
class NonFinite:
    """The first value of one part of a micro-batch's pass, on this rank, that is nan or infinite."""

    micro_batch: int
    """Its index among the micro-batches of this process's replica."""
    part: int
    """Forward pass, loss, backward pass, or gradients of the weights."""
    stage: int
    """Order of this process's model chunk in the part."""
    sequence: int
    """Order in the chunk."""
    name: str
    """The module or the parameter; of a gradient, the module whose output or input it belongs to; empty: the loss."""
    returned_by: str = ""
    """Of a gradient, the module whose backward pass returned it; empty: the loss, or a later stage."""

    def __str__(self) -> str:
        """What it is."""
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
    """Records the first non-finite value of each part of each micro-batch's pass, while it is `attached`. Each value
    that is checked waits for the device. No communication.

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
        """The hooks are on the modules within the context."""
        with ExitStack() as hooks:
            for chunk in self._chunks:
                for handle in chunk.hooks():
                    hooks.enter_context(handle)
            yield
        for chunk in self._chunks:
            chunk.ends()

    def watched(
        self, loss: Callable[[MicroBatch, ModelOutput], Tensor], local: Sequence[MicroBatch]
    ) -> Callable[[MicroBatch, ModelOutput], Tensor]:
        """The loss function of the pass, checked.

        Args:
            local: the micro-batches of the pass.
        """

        def checked(micro_batch: MicroBatch, output: ModelOutput) -> Tensor:
            value = loss(micro_batch, output)
            index = next(index for index, other in enumerate(local) if other is micro_batch)
            outputs = output if isinstance(output, tuple) else (output,)
            if any(isinstance(logits, DeferredLogits) for logits in outputs) and value.requires_grad:
                # before the loss adds to the gradient of the output weight
                _on_gradient(value, lambda _: self._chunks[-1].backward_begins(index))
            if not is_finite(value):
                self._losses.append(NonFinite(index, _LOSS, 0, 0, ""))
            return value

        return checked

    @property
    def values(self) -> list[NonFinite]:
        """All that was recorded, in no order."""
        return [*self._losses, *(value for chunk in self._chunks for value in chunk.first.values())]


class _ChunkWatch:
    """The watch on one model chunk."""

    def __init__(self, model: nn.Module, tied: bool, forward_stage: int, backward_stage: int) -> None:
        self._model, self._tied = model, tied
        self._stages = {_FORWARD: forward_stage, _BACKWARD: backward_stage, _WEIGHTS: backward_stage}
        self.first: dict[tuple[int, int], NonFinite] = {}
        """(part, micro-batch) -> its first value."""
        self._checked: Counter[tuple[int, int]] = Counter()
        self._started = 0
        """Forward passes that have begun: micro-batch n is the n-th of them."""
        self._current = 0
        """The micro-batch in whose forward or backward pass a module is called, or called again by recomputation."""
        self._in_backward: int | None = None
        """The micro-batch whose gradients are being added to those of the weights."""
        self._last: Tensor | None = None
        """The gradient that was recorded last, until the modules that take its tensor have been named."""

    def hooks(self) -> list[Any]:
        handles: list[Any] = [self._model.register_forward_pre_hook(self._begins)]
        for module, name in global_module_names(self._model).items():
            handles.append(module.register_forward_pre_hook(self._input_hook(name), with_kwargs=True))
            handles.append(module.register_forward_hook(self._output_hook(module, name)))
        return handles

    def ends(self) -> None:
        """The last backward pass is complete."""
        if self._in_backward is not None:
            self._check_weights(self._in_backward)
            self._in_backward = None

    def _begins(self, module: nn.Module, arguments: Any) -> None:
        self._current = self._started
        self._started += 1

    def _input_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, keywords: Any) -> None:
            micro_batch = self._current
            for tensor in _tensors((arguments, keywords)):
                if tensor.requires_grad and torch.is_grad_enabled():
                    _on_gradient(tensor, lambda gradient: self._returned(micro_batch, name, gradient))

        return hook

    def _output_hook(self, module: nn.Module, name: str) -> Callable[..., None]:
        is_whole = module is self._model

        def hook(module: nn.Module, arguments: Any, outputs: Any) -> None:
            micro_batch = self._current
            for tensor in _tensors(outputs):
                self._check(_FORWARD, micro_batch, name, tensor)
                if tensor.requires_grad and torch.is_grad_enabled():
                    arrived = partial(self._arrived, micro_batch, name)
                    if isinstance(tensor, DeferredLogits):
                        if not is_whole:  # both are outputs of the same hidden states
                            continue
                        tensor = tensor.hidden  # the loss does not reach the logits
                        arrived = partial(arrived, is_deferred=True)
                    if is_whole:
                        _on_gradient(tensor, lambda gradient: self.backward_begins(micro_batch))
                    _on_gradient(tensor, arrived)

        return hook

    def backward_begins(self, micro_batch: int) -> None:
        """Of a micro-batch; that of the one before is complete."""
        if self._in_backward != micro_batch:
            self.ends()
        self._current = self._in_backward = micro_batch

    def _arrived(self, micro_batch: int, name: str, gradient: Tensor, is_deferred: bool = False) -> None:
        """The gradient of a module's output; of deferred logits, that of their hidden states, which the output layer
        passes on as it is."""
        first = self.first.get((_BACKWARD, micro_batch))
        if first is None:
            self._check(_BACKWARD, micro_batch, name, gradient)
            if not is_deferred:
                self._remember(micro_batch, gradient)
        elif first.returned_by or not self._is_remembered(gradient):
            self._last = None

    def _returned(self, micro_batch: int, name: str, gradient: Tensor) -> None:
        """The gradient of a module's input. Hooks of a tensor run in the order in which they were registered: first
        those of the module whose output it is, then those of the modules that take it, the innermost last."""
        key = _BACKWARD, micro_batch
        if key not in self.first:
            self._check(_BACKWARD, micro_batch, name, gradient)
            self._remember(micro_batch, gradient)
        if key in self.first and self._is_remembered(gradient):
            self.first[key] = replace(self.first[key], returned_by=name)

    def _remember(self, micro_batch: int, gradient: Tensor) -> None:
        self._last = gradient if (_BACKWARD, micro_batch) in self.first else None

    def _is_remembered(self, gradient: Tensor) -> bool:
        return self._last is not None and self._last.data_ptr() == gradient.data_ptr()

    def _check_weights(self, micro_batch: int) -> None:
        for named in global_names(self._model, self._tied):
            gradient = getattr(named.tensor, "main_grad", None)
            if gradient is not None:
                zero_if_stale(gradient)
                self._check(_WEIGHTS, micro_batch, named.name, named.of(gradient))

    def _check(self, part: int, micro_batch: int, name: str, value: Tensor) -> None:
        key = part, micro_batch
        self._checked[key] += 1
        if key not in self.first and not is_finite(value):
            self.first[key] = NonFinite(micro_batch, part, self._stages[part], self._checked[key], name)


def _on_gradient(tensor: Tensor, hook: Callable[[Tensor], Any]) -> None:
    """Call `hook` with the gradient of a tensor. Its function is read first: torch makes that of a view whose memory
    was written when it is read, and crashes where a registration is what reads it (2.13)."""
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
