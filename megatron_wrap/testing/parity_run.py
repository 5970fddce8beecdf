"""The part of `check_parity` that runs on each rank: a few steps of the flow, and the values to compare."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy

from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.flow.contract.routing import ROUTED_EXPERTS
from megatron_wrap.testing.observer import Observer, Seen

if TYPE_CHECKING:
    from megatron_wrap.engine.batches.micro_batch import MicroBatch


@dataclass
class CaseResult:
    """Results of one layout, the same on every rank."""

    objectives: list[float]
    """The objective of each step."""
    metrics: list[dict[str, float]]
    """The flow's metrics of each step."""
    gradients: dict[str, numpy.ndarray]
    """Global name -> unsharded gradient of the first step, before clipping."""
    seen: Seen
    """Observations from the ranks' calls of `calculate_loss`."""
    num_microbatches: int
    router_losses: list[dict[str, float]] = field(default_factory=list)
    """Router losses of each step, without their coefficients; empty for a dense model."""
    undeclared_fields: list[str] = field(default_factory=list)
    """Collated fields with a dimension of the sequence's length that `get_fields_and_seqdims` does not list."""
    weight_is_one: bool = False
    """Whether each micro-batch has the weight 1, although it has several samples."""


def first_windows(config: RunConfig, count: int) -> list[Any]:
    """The head of indexed data, read in a process where Megatron-Core is imported for its platform."""
    from megatron_wrap.config.checks.vocabulary import model_vocab_size
    from megatron_wrap.data.chat.tokenizer import run_tokenizer
    from megatron_wrap.data.indexed.windows import open_indexed

    tokenizer = run_tokenizer(config.data)
    size = model_vocab_size(config.arch, tokenizer, config.model_provider.hf_path)
    windows = open_indexed(config, size, tokenizer).training
    return [windows.read(position) for position in range(count)]


def recorded_routing(config: RunConfig, samples: list[Any]) -> list[numpy.ndarray]:
    """The routing of each sample with initial weights, on one process; `router_replay` of the config is R2."""
    from megatron_wrap.core.wrap import MegatronWrap

    with MegatronWrap(config) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        return [outputs[ROUTED_EXPERTS].numpy() for outputs in wrap.forward(samples)]


def run_case(
    config: RunConfig, samples: list[Any], steps: int, extra_padding: int = 0, noise: float = 0.0
) -> CaseResult:
    """Train `steps` steps from initial weights on the layout of `config`. Collective over all ranks.

    Args:
        samples: global_batch_size * steps samples.
        extra_padding: tokens of additional padding of every sequence.
        noise: relative size of noise on the model's outputs.
    """
    from megatron_wrap.core.wrap import MegatronWrap
    from megatron_wrap.engine.batches.collation import try_flow
    from megatron_wrap.engine.router_losses import router_loss_names
    from megatron_wrap.engine.step import gradients_of_batch, train_step
    from megatron_wrap.testing.gradients import gather_gradients

    # in this rank's process only: find my_module:MyFlow in the working directory, as `python -m` does, and log less
    if "" not in sys.path:
        sys.path.insert(0, "")
    os.environ.setdefault("CONSOLE_LOG_LEVEL", "WARNING")
    with MegatronWrap(config) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        state, size = wrap.state, wrap.global_batch_size
        prepared = [(f"sample {index}", state.prepare_sample(sample)) for index, sample in enumerate(samples[:size])]
        try_flow(state.flow, prepared, config.train.seed)
        state.extra_padding = extra_padding
        observer = Observer(noise)
        state.calculate_loss = observer.around(state.calculate_loss)
        with observer.reported(state.flow, state.parallel):
            micro_batches = gradients_of_batch(state, samples[:size]).training
        undeclared = _undeclared_fields(micro_batches[0])
        seen = observer.seen(state.flow, state.parallel)
        gradients = {name: gradient.numpy() for name, gradient in gather_gradients(state).items()}
        objectives, metrics, router_losses = [], [], []
        router_names = router_loss_names(config.arch)
        for step in range(steps):
            report = train_step(state, samples[step * size : (step + 1) * size])
            objectives.append(report.metrics["loss"])
            metrics.append({name: report.metrics[name] for name in report.flow_metrics})
            router_losses.append({name: report.metrics[name] for name in router_names})
    is_one = all({*part.weights.values()} == {1.0} and part.num_samples > 1 for part in micro_batches)
    return CaseResult(objectives, metrics, gradients, seen, len(micro_batches), router_losses, undeclared, is_one)


def _undeclared_fields(micro_batch: MicroBatch) -> list[str]:
    fields = {**micro_batch.model_inputs, **micro_batch.loss_inputs}
    whole = {name for name, tensor in fields.items() if tensor is not None and micro_batch.width in tensor.shape[1:]}
    return sorted(whole - {*micro_batch.seqdims})
