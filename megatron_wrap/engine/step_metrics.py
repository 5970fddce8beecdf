"""The metrics of a step by name: loss, norms, tokens per second, TFLOP/s, memory and what the flow reports."""

from __future__ import annotations

import math
import time

from megatron_wrap.engine.passes.loss import ReducedMetrics
from megatron_wrap.engine.passes.parameters import parameter_square_sum
from megatron_wrap.engine.router_losses import expert_load
from megatron_wrap.engine.state.state import OpenStep, TrainingState, Update
from megatron_wrap.errors import FlowError
from megatron_wrap.parallel.collectives import reduce_in_place
from megatron_wrap.plan.flops import tflops_per_device


def step_metrics(
    state: TrainingState,
    reduced: ReducedMetrics,
    step: OpenStep,
    update: Update,
    learning_rate: float,
) -> dict[str, float]:
    """The step's metrics by name, in the order of `metrics.declared`; the elapsed time ends here."""
    progress, logger, devices = state.progress, state.config.logger, state.parallel.world.size
    counts = step.weights.counts
    first: dict[str, float] = {"iteration": progress.iteration, "loss": reduced.loss}
    metrics: dict[str, float] = {
        "grad_norm": update.grad_norm,
        "learning_rate": learning_rate,
        "loss_scale": state.optimizer.loss_scale,
    }
    if logger.add_num_zeros_in_grad_to_metrics:
        metrics["num_zeros_in_grad"] = update.num_zeros
    metrics |= reduced.sums
    if logger.add_params_norm_to_metrics:
        total = parameter_square_sum(state.chunks, state.parallel, state.platform.device)  # after the update
        reduce_in_place(total, "sum", state.parallel.world.group)
        metrics["params_norm"] = math.sqrt(total.item())
    if logger.add_expert_load_to_metrics and state.config.arch.num_experts is not None:
        metrics |= expert_load(state.chunks, state.config.arch, state.parallel.world)
    elapsed_seconds = time.perf_counter() - step.started
    metrics |= {
        "global_batch_size": len(step.samples),
        "consumed_samples": progress.consumed_samples,
        "consumed_tokens": progress.consumed_tokens,
        "skipped_iterations": progress.skipped_iterations,
        "bad_steps": progress.bad_steps,
        "skipped_samples": progress.skipped_samples,
        "elapsed_time": elapsed_seconds,
        "tokens_per_second": counts.tokens / elapsed_seconds,
        "tokens_per_second_per_device": counts.tokens / elapsed_seconds / devices,
    }
    if "num_tokens" not in reduced.flow_metrics:  # a flow may report one
        metrics["num_tokens"] = progress.consumed_tokens
    if logger.add_throughput_to_metrics:
        flops = state.step_flops.of(counts.tokens, counts.squared_lengths)
        metrics["tflops"] = metrics["throughput"] = tflops_per_device(flops, elapsed_seconds, devices)
    if logger.add_memory_to_metrics:
        metrics |= state.platform.memory_gib()
    clash = sorted(reduced.flow_metrics.keys() & (first.keys() | metrics.keys()))
    if clash:
        raise FlowError(
            f"{type(state.flow).__name__} reports the metrics {clash}, which the engine reports itself; rename them"
        )
    return {**first, **reduced.flow_metrics, **metrics}
