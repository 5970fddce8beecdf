"""Profiles steps of a run: traces, a memory snapshot, and the table of where the time went."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from megatron_wrap.flow.contract import packing_refusal
from megatron_wrap.metrics.step_profile import StepBreakdown, break_down
from megatron_wrap.metrics.throughput import training_flops
from megatron_wrap.metrics.trace import read_timeline
from megatron_wrap.model.transformer import use_transformer_engine
from megatron_wrap.parallel.collectives import gather_objects
from megatron_wrap.report.profile_advice import Setting, promising_changes
from megatron_wrap.report.profile_table import StepReport, json_of, slowest_rank, text
from megatron_wrap.utils.dist_logger import logger

if TYPE_CHECKING:
    from megatron_wrap.engine.state import TrainingState

_GIB = 2**30
_SNAPSHOT_ENTRIES = 200_000


class StepProfiler:
    """Profiles the iterations of `megatron_wrap.profile.steps`. A step lasts from the end of the one before to its own
    end, so that the wait for its batch is part of it.

    Args:
        state: of the run.
        folder: receives the files, one subfolder for each row of consecutive iterations.
    """

    def __init__(self, state: TrainingState, folder: Path) -> None:
        self._state, self._folder = state, folder
        self._steps = frozenset(state.config.profile.steps)
        self._cuda = state.platform.name == "cuda"
        self._first = state.progress.iteration
        self._usual: list[float] = []
        self._last_end = time.perf_counter()
        self._recorded: list[tuple[int, Mapping[str, float]]] = []
        self._trace: Path | None = None
        self.last_report: StepReport | None = None
        """Of the last row of profiled iterations."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        self._profile: profile | None = profile(
            activities=activities, schedule=self._action, on_trace_ready=self._export
        )
        self._profile.start()
        self._records_memory = False
        self._before_step(self._first + 1)

    def step_ends(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Call after each step. Collective after the last one of a row of profiled iterations.

        Args:
            iteration: the step's number.
            metrics: of the step.
        """
        if self._profile is None:
            return
        if (iteration in self._steps) != (iteration + 1 in self._steps):
            self._state.platform.synchronize()  # a row begins and ends with an idle device
        now = time.perf_counter()
        if self._records_memory:
            self._write_memory(iteration)
        if iteration in self._steps:
            self._recorded.append((iteration, dict(metrics)))
        elif iteration + 1 not in self._steps:  # in that one the profiler gets ready
            self._usual.append(1e3 * (now - self._last_end))
        self._last_end = now
        self._profile.step()
        if iteration in self._steps and iteration + 1 not in self._steps:
            self._report()
            self._last_end = time.perf_counter()
        if iteration >= max(self._steps):
            self.close()
        else:
            self._before_step(iteration + 1)

    def close(self) -> None:
        """Stop the profiler."""
        if self._profile is not None:
            running, self._profile, self._trace = self._profile, None, None
            self._recorded = []
            running.stop()
            if self._records_memory:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _action(self, place: int) -> ProfilerAction:
        """What the profiler does in the step that is `place` after the first one of this run."""
        iteration = self._first + place + 1
        if iteration in self._steps:
            return ProfilerAction.RECORD if iteration + 1 in self._steps else ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.WARMUP if iteration + 1 in self._steps else ProfilerAction.NONE

    def _before_step(self, iteration: int) -> None:
        """Record allocations in the step before a row, because that slows Python down; in the first step of a row that
        has none before."""
        begins = iteration + 1 in self._steps and iteration not in self._steps
        begins = begins or (iteration == self._first + 1 and iteration in self._steps)
        if begins and self._cuda and self._state.config.profile.memory_snapshot:
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=_SNAPSHOT_ENTRIES)
            self._records_memory = True

    def _write_memory(self, iteration: int) -> None:
        folder = self._row_folder(iteration if iteration in self._steps else iteration + 1)
        folder.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(folder / f"memory-rank{self._rank}.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
        self._records_memory = False

    @property
    def _rank(self) -> int:
        return self._state.parallel.world.rank

    def _row_folder(self, iteration: int) -> Path:
        """Folder of the row of consecutive iterations that contains one."""
        first = last = iteration
        while first - 1 in self._steps and first - 1 > self._first:
            first -= 1
        while last + 1 in self._steps:
            last += 1
        return self._folder / f"iterations-{first}-{last}"

    def _export(self, finished: profile) -> None:
        if not self._recorded:
            return  # the run ended within a row
        folder = self._row_folder(self._recorded[-1][0])
        folder.mkdir(parents=True, exist_ok=True)
        self._trace = folder / f"trace-rank{self._rank}.json.gz"
        finished.export_chrome_trace(str(self._trace))

    def _report(self) -> None:
        """Compare all processes, keep the files of rank 0 and of the slowest rank, write and log the table."""
        assert self._trace is not None
        folder, own = self._row_folder(self._recorded[-1][0]), break_down(read_timeline(self._trace))
        shared: list[tuple[StepBreakdown, float]] = gather_objects((own, self._peak_gib()))
        ranks = tuple(step for step, _ in shared)
        kept = (0, slowest_rank(ranks))
        if self._rank not in kept:
            self._trace.unlink()
            (folder / f"memory-rank{self._rank}.pickle").unlink(missing_ok=True)
        self.last_report = self._step_report(ranks, shared[0][1])
        if self._rank == 0:
            (folder / "profile.json").write_text(json.dumps(json_of(self.last_report), indent=1) + "\n")
            (folder / "profile.txt").write_text(text(self.last_report) + "\n")
            logger.info_rank_0(f"profile of {text(self.last_report)}\n{folder}")
        self._recorded = []

    def _step_report(self, ranks: tuple[StepBreakdown, ...], peak_gib: float) -> StepReport:
        state, metrics = self._state, [metrics for _, metrics in self._recorded]
        slowest = ranks[slowest_rank(ranks)]
        real = sum(values["tokens_per_second"] * values["elapsed_time"] for values in metrics) / len(metrics)
        computed = slowest.computed_tokens * state.parallel.dp.size
        padding = max(0.0, 1 - real / computed) if computed else 0.0
        setting = self._setting(padding, real, peak_gib)
        return StepReport(
            iterations=tuple(iteration for iteration, _ in self._recorded),
            ranks=ranks,
            usual_ms=statistics.median(self._usual[1:]) if len(self._usual) > 1 else None,
            tflops=metrics[-1].get("tflops", 0.0),
            peak_gib=peak_gib,
            padding_share=padding,
            changes=tuple(promising_changes(slowest, state.config, setting)),
            title=f"{state.config.name} ({state.platform.name}, {state.parallel.layout})",
        )

    def _setting(self, padding: float, real_tokens: float, peak_gib: float) -> Setting:
        state, total_gib = self._state, 0.0
        if self._cuda:
            properties = torch.cuda.get_device_properties(state.platform.device)
            total_gib = properties.total_memory / _GIB
        else:
            import psutil

            total_gib = psutil.virtual_memory().total / _GIB / state.parallel.world.size
        train, dp_size = state.config.train, state.parallel.dp.size
        return Setting(
            device=torch.cuda.get_device_name(state.platform.device) if self._cuda else "",
            transformer_engine_layers=use_transformer_engine(state.config, state.platform),
            has_transformer_engine=state.platform.has_transformer_engine,
            has_triton=state.platform.machine.triton,
            can_pack=not packing_refusal(type(state.flow)),
            dp_size=dp_size,
            num_microbatches=max(1, train.global_batch_size // (train.micro_batch_size * dp_size)),
            padding_share=padding,
            product_flops=training_flops(state.shape, real_tokens, 0.0) / state.parallel.world.size,
            peak_gib=peak_gib,
            total_gib=total_gib,
        )

    def _peak_gib(self) -> float:
        return self._state.platform.memory_gib()["memory_max"]


def step_profiler(state: TrainingState, output_dir: Path) -> StepProfiler | None:
    """The profiler that `megatron_wrap.profile` asks for, if any of its steps is still to come.

    Args:
        output_dir: of the run.
    """
    settings = state.config.profile
    if not any(step > state.progress.iteration for step in settings.steps):
        return None
    return StepProfiler(state, Path(settings.output_dir) if settings.output_dir else output_dir / "profile")
