"""Gradients that are written over those of the step before, instead of being added to a buffer that was set to zero.

Megatron-Core's DistributedDataParallel sets its gradient buffers to zero before each step, and each micro-batch reads
them and adds to them. For a weight that `replaces_first`, its part of the buffer is only marked: the first gradient
matmul of the step is written over it, which saves two passes over the memory. Anything else that comes first sets the
part to zero: a gradient that autograd returns, or the reduction over ranks if the weight had no gradient.

Transformer Engine's layers do the same for weights with `overwrite_main_grad`, but read it in the forward pass: with
several forward passes before the first backward pass, as in pipelines, each gradient would overwrite the previous one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from megatron_wrap.platform.megatron_core.undoable_changes import Replacements

_REPLACES, _STALE = "_replaces_first_gradient", "_has_gradient_of_last_step"


def replaces_first(weight: Any) -> None:
    """Make the first gradient of a step replace the weight's `main_grad`; to be called before DistributedDataParallel
    is built, unless the weight's layer adds all of its gradients itself. Code that adds to `main_grad`, other than
    DistributedDataParallel, must first call `takes_first` or `zero_if_stale`.

    Not for a weight whose gradient is computed in a CUDA graph, which would write or add in each of its replays.
    """
    setattr(weight, _REPLACES, True)


def takes_first(main_grad: Tensor) -> bool:
    """Whether the caller, which has a gradient, must write it over `main_grad` instead of adding it. Further gradients
    in this step are added."""
    is_stale: bool = getattr(main_grad, _STALE, False)
    if is_stale:
        setattr(main_grad, _STALE, False)
    return is_stale


def zero_if_stale(main_grad: Tensor) -> None:
    """Set a `main_grad` to zero that still contains gradients of an earlier step."""
    if takes_first(main_grad):
        main_grad.zero_()


def zero_stale(parameters: Iterable[Any]) -> None:
    """Call `zero_if_stale` for all parameters; the gradients of parameters without one in this step become 0."""
    for parameter in parameters:
        if getattr(parameter, _REPLACES, False) and hasattr(parameter, "main_grad"):
            zero_if_stale(parameter.main_grad)


def use_in_megatron(replacements: Replacements) -> None:
    """Make the gradient buffers of DistributedDataParallel mark the parts of weights with `replaces_first`, instead of
    setting them to zero."""
    module = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")
    wrapper = importlib.import_module("megatron.core.distributed.distributed_data_parallel").DistributedDataParallel
    buffer, group = module._ParamAndGradBuffer, module._ParamAndGradBucketGroup
    reset, reduce, make_hook = buffer.reset, group.start_grad_sync, wrapper._make_backward_post_hook

    @functools.wraps(reset)
    def reset_others(self: Any) -> None:
        parts = list(_replaced_parts(self))
        if not parts:
            reset(self)
            return
        for other in _others(self.grad_data, parts):
            other.zero_()
        for part in parts:
            setattr(part, _STALE, True)

    @functools.wraps(reduce)
    def reduce_complete(self: Any, *arguments: Any, **named: Any) -> Any:
        zero_stale(self.params)
        return reduce(self, *arguments, **named)

    @functools.wraps(make_hook)
    def make_hook_of_complete(self: Any, parameter: Any) -> Any:
        hook = make_hook(self, parameter)
        if not getattr(parameter, _REPLACES, False):
            return hook

        def add_to_complete(*arguments: Any) -> None:
            zero_stale((parameter,))
            hook(*arguments)

        return add_to_complete

    replacements.set(buffer, "reset", reset_others)
    replacements.set(group, "start_grad_sync", reduce_complete)
    replacements.set(wrapper, "_make_backward_post_hook", make_hook_of_complete)


def _replaced_parts(buffer: Any) -> Iterator[Tensor]:
    """The parts of a buffer over which the first gradient is written; none if 0.19 has gradients outside of the buffer,
    which only its own function sets to zero."""
    if getattr(buffer, "extra_main_grads", None):
        return
    memory = buffer.grad_data.untyped_storage().data_ptr()
    for parameter in buffer.params:
        if getattr(parameter, _REPLACES, False) and parameter.main_grad.untyped_storage().data_ptr() == memory:
            yield parameter.main_grad


def _others(whole: Tensor, parts: list[Tensor]) -> Iterator[Tensor]:
    """The parts of a flat tensor between the given contiguous parts."""
    end = 0
    for part in sorted(parts, key=lambda part: part.storage_offset()):
        begin = int(part.storage_offset() - whole.storage_offset())
        if begin > end:
            yield whole[end:begin]
        end = begin + part.numel()
    if end < whole.numel():
        yield whole[end:]
