"""Megatron-Core's CUDA graphs of layers (`cuda_graph_impl: local`, transformer/cuda_graphs.py): conditions of their
use, state that their capture must not change, and their deletion."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.platform.megatron_core.undoable_changes import Replacements

_MODULE = "megatron.core.transformer.cuda_graphs"
_GRAPHS = ("fwd_graph", "bwd_graph")


def repair(replacements: Replacements) -> None:
    """Repair the cases in which the graphs would compute something else than the layers themselves."""
    graphs = importlib.import_module(_MODULE)
    _replay_in_training_alone(graphs, replacements)
    _keep_random_states(graphs, replacements)
    _keep_saved_inputs(graphs, replacements)
    _keep_memory_of_parts(graphs, replacements)
    _compare_arguments_fast(graphs, replacements)


def _replay_in_training_alone(graphs: Any, replacements: Replacements) -> None:
    """Run the layers themselves in passes without gradients. Once captured, Megatron-Core would replay the graphs of
    training in an evaluation too, with their dropout, and raise an error for another number of rows or tokens. Before
    the capture, it would end the recording with the first pass without gradients, and no training pass would have a
    graph.

    Layers with hooks on their modules also run without a graph, because a graph calls no hooks."""
    from megatron.core.tensor_parallel.random import is_checkpointing
    from megatron.core.transformer.module import MegatronModule

    manager = graphs.CudaGraphManager
    captured_or_replayed = manager.__call__

    @functools.wraps(captured_or_replayed)
    def call(self: Any, layer: Any, args: Any, kwargs: Any, *more: Any, **named: Any) -> Any:
        has_gradient = torch.is_grad_enabled() or is_checkpointing()
        if layer.training and has_gradient and not layer._forward_hooks:
            return captured_or_replayed(self, layer, args, kwargs, *more, **named)
        itself = super(MegatronModule, layer).__call__ if self.func is None else self.func
        return itself(*args, **kwargs)

    replacements.set(manager, "__call__", call)


def _keep_random_states(graphs: Any, replacements: Replacements) -> None:
    """Keep the random generators in the state in which the step has left them. Each layer runs a few times before its
    capture, in which dropout draws random numbers: a resumed run, which captures at another step, would continue with
    other numbers."""
    schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    create = schedules.create_cudagraphs

    @functools.wraps(create)
    def create_with_states_kept() -> Any:
        if not graphs._CudagraphGlobalRecord.cudagraph_record:
            return create()
        device, tracked = torch.cuda.get_rng_state(), tracked_states()
        try:
            return create()
        finally:
            torch.cuda.set_rng_state(device)
            set_tracked_states(tracked)

    replacements.set(schedules, "create_cudagraphs", create_with_states_kept)


def _keep_saved_inputs(graphs: Any, replacements: Replacements) -> None:
    """Keep a layer's inputs and outputs until its backward pass is captured. 0.19 gives their memory to the next
    captures earlier, except for tensors that a Python function saves; torch's own operations save tensors too."""
    runner = graphs._CudaGraphRunner
    release = getattr(runner, "_weakref_forward_buffers", None)
    if release is None:
        return

    @functools.wraps(release)
    def release_after_backward(self: Any, preserve_forward_to_backward_lifetimes: bool) -> None:
        if not preserve_forward_to_backward_lifetimes:
            release(self, preserve_forward_to_backward_lifetimes)

    replacements.set(runner, "_weakref_forward_buffers", release_after_backward)


def _keep_memory_of_parts(graphs: Any, replacements: Replacements) -> None:
    """Keep the memory of a graph that is a part of a layer (`is_captured_in_parts`). Megatron-Core reuses it in graphs
    that are captured later, including the gradients that the graph returns. Here operations without a graph read these
    gradients, while the gradients of these operations are copied into a later graph's memory, which may overlap."""
    runner = graphs._CudaGraphRunner
    create = runner.create_bwd_graph

    @functools.wraps(create)
    def create_and_keep(self: Any) -> None:
        with Replacements() as kept:
            if getattr(self.base_module, "is_captured_in_parts", False):
                kept.set(graphs, "make_weakref", lambda tensor, inplace=True: tensor)
            create(self)

    replacements.set(runner, "create_bwd_graph", create_and_keep)


def _compare_arguments_fast(graphs: Any, replacements: Replacements) -> None:
    """Compare a call's arguments with those of the capture in microseconds. Megatron-Core does it twice per call, which
    takes a fraction of a millisecond per layer and uses up a part of what the graphs save."""
    runner = graphs._CudaGraphRunner
    errors = runner.get_mismatch_errors

    @functools.wraps(errors)
    def errors_of_different(self: Any, args: Any, kwargs: Any) -> list[str]:
        positional, named = self.fwd_graph_input_arg_metas, self.fwd_graph_input_kwarg_metas
        equal = len(args) == len(positional) and kwargs.keys() == named.keys()
        equal = equal and all(map(_is_like, args, positional))
        if equal and all(_is_like(value, named[name]) for name, value in kwargs.items()):
            return []
        return errors(self, args, kwargs)  # arguments of other types, or different ones

    replacements.set(runner, "get_mismatch_errors", errors_of_different)


def _is_like(value: Any, captured: Any) -> bool:
    """Whether an argument is of the kind that was captured, which Megatron-Core's `ArgMetadata` describes; False for
    types that a program rarely passes."""
    if type(value) is not captured.type:
        return False
    if captured.type is Tensor:
        return (value.shape, value.dtype, value.device) == (captured.shape, captured.dtype, captured.device)
    return captured.type in _PLAIN and value == captured.value


_PLAIN = (type(None), bool, int, float, str)


def tracked_states() -> dict[str, Tensor]:
    """States of Megatron-Core's random generators by name. With CUDA graphs Megatron-Core returns the generators
    themselves, which change with each draw; these states have the same form as without graphs."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states = get_cuda_rng_tracker().get_states()
    return {name: value.get_state() if isinstance(value, torch.Generator) else value for name, value in states.items()}


def set_tracked_states(states: dict[str, Tensor]) -> None:
    """Set Megatron-Core's random generators to states from `tracked_states`, with CUDA graphs or without."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    kept = {}
    for name, generator in tracker.get_states().items():
        if isinstance(generator, torch.Generator) and name in states:
            generator.set_state(states[name])  # captured graphs draw from this very object
            kept[name] = generator
    tracker.set_states({**states, **kept})


def delete_graphs(chunks: Sequence[torch.nn.Module]) -> None:
    """Delete the captured graphs of these model chunks, and Megatron-Core's records of them. Before NCCL ends a process
    group, it waits for all graphs that contain its operations, forever if they are only dropped afterwards. Also, a
    later model of this process could not capture its own graphs."""
    graphs: Any = sys.modules.get(_MODULE)
    if graphs is None:
        return
    managers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, graphs.CudaGraphManager)]
    if not managers:
        return
    for manager in managers:
        for runner in manager.cudagraph_runners:
            for name in _GRAPHS:
                if getattr(runner, name) is not None:
                    getattr(runner, name).reset()
                setattr(runner, name, None)
        manager.cudagraph_runners = []
    # Megatron-Core's delete_cuda_graphs forgets the captured ones, and its release of memory would wait for the device,
    # where a rank that failed leaves the others waiting
    record = graphs._CudagraphGlobalRecord
    record.cudagraph_created = False
    record.cudagraph_record, record.cudagraph_inference_record = [], []
    if hasattr(record, "tensor_reuse_pool"):  # 0.16
        pool = record.tensor_reuse_pool
        for tensors in (pool.tensor_strong_refs, pool.tensor_strong_refs_dataptrs, pool.pool):
            tensors.clear()
    if hasattr(record, "_disable_saved_tensors_observer"):  # 0.19
        record._disable_saved_tensors_observer()
    graphs.fwd_buffer_reuse_ref_count = graphs.bwd_buffer_reuse_ref_count = 0
    graphs.CudaGraphManager.global_mempool = None
    graphs._set_capture_end()
    torch.cuda.set_stream(torch.cuda.default_stream())  # a model that was built and not trained has another
