"""The profiler of a run's steps, built from its state."""

from __future__ import annotations

from pathlib import Path

from megatron_wrap.engine.setup.linear_cross_entropy import avoidable_logits_bytes
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.flow.contract.class_checks import packing_refusal
from megatron_wrap.model.transformer_config import use_transformer_engine
from megatron_wrap.profiling.step_profiler import StepProfiler


def build_step_profiler(state: TrainingState, output_dir: Path) -> StepProfiler | None:
    """The profiler that `megatron_wrap.profile` asks for; None if all of its steps have been taken.

    Args:
        output_dir: of the run.
    """
    config, iteration = state.config, state.progress.iteration
    if not any(step > iteration for step in config.profile.steps):
        return None
    return StepProfiler(
        config,
        state.platform,
        state.parallel,
        iteration,
        Path(config.profile.output_dir) if config.profile.output_dir else output_dir / "profile",
        shape=state.shape,
        flops=state.step_flops,
        transformer_engine_layers=use_transformer_engine(config, state.platform),
        avoidable_logits_bytes=avoidable_logits_bytes(state),
        can_pack=not packing_refusal(type(state.flow)),
    )
