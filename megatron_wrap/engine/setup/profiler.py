"""The profiler of a run's steps, built from its state."""

from __future__ import annotations

from pathlib import Path

from megatron_wrap.config.schema import derived
from megatron_wrap.engine.setup.linear_cross_entropy import avoidable_logits_bytes
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.flow.contract.class_checks import packing_refusal
from megatron_wrap.model.transformer_config import use_transformer_engine
from megatron_wrap.plan.pipeline_split import faster_split
from megatron_wrap.profiling.advice import ProfiledRun
from megatron_wrap.profiling.step_profiler import StepProfiler


def build_step_profiler(state: TrainingState, output_dir: Path) -> StepProfiler | None:
    """The profiler of `megatron_wrap.profile`; None if all of its steps have been taken.

    Args:
        output_dir: of the run.
    """
    config, iteration = state.config, state.progress.iteration
    if not any(step > iteration for step in config.profile.steps):
        return None
    platform, parallel = state.platform, state.parallel
    run = ProfiledRun(
        device=platform.machine.device,
        transformer_engine_layers=use_transformer_engine(config, platform),
        has_transformer_engine=platform.has_transformer_engine,
        has_triton=platform.machine.triton,
        can_pack=not packing_refusal(type(state.flow)),
        dp_size=parallel.dp.size,
        num_microbatches=max(1, derived.num_microbatches(config, parallel.dp.size)),
        total_gib=platform.total_memory_bytes() / 2**30 / (1 if platform.name == "cuda" else parallel.world.size),
        faster_split=faster_split(config, state.shape, platform.machine.device),
    )
    return StepProfiler(
        config,
        platform,
        parallel,
        iteration,
        Path(config.profile.output_dir) if config.profile.output_dir else output_dir / "profile",
        run=run,
        flops=state.step_flops,
        avoidable_logits_bytes=avoidable_logits_bytes(state),
    )
