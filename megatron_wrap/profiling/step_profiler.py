"""Profiles steps of a run: traces, a memory snapshot, and the table of where the time goes."""

from __future__ import annotations

import gzip
import json
import shutil
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from megatron_wrap.config.schema import derived
from megatron_wrap.parallel.collectives import gather_objects
from megatron_wrap.plan.pipeline_split import faster_split
from megatron_wrap.profiling.advice import ProfiledRun, StepMemory, memory_changes, promising_changes
from megatron_wrap.profiling.breakdown import StepBreakdown, break_down
from megatron_wrap.profiling.table import ProfileReport, json_of, slowest_rank, text
from megatron_wrap.profiling.trace import read_timeline
from megatron_wrap.utils.dist_logger import logger

if TYPE_CHECKING:
    from megatron_wrap.config import RunConfig
    from megatron_wrap.parallel.state import ParallelState
    from megatron_wrap.plan.flops import Flops
    from megatron_wrap.plan.model_parts import ModelShape
    from megatron_wrap.platform.base.platform import Platform

_GIB = 2**30
_SNAPSHOT_ENTRIES = 200_000


class StepProfiler:
    """Profiles the iterations of `megatron_wrap.profile.steps`. A step begins at the end of the previous step, so it
    includes the wait for its batch.

    Args:
        iteration: steps already taken.
        folder: receives the files, in a subfolder for each range of consecutive iterations.
        shape: of the run's model.
        flops: of a step.
        transformer_engine_layers: whether the model's layers are Transformer Engine's.
        avoidable_logits_bytes: memory of this process that linear_cross_entropy would save.
        can_pack: whether the flow supports packed rows.
    """

    def __init__(
        self,
        config: RunConfig,
        platform: Platform,
        parallel: ParallelState,
        iteration: int,
        folder: Path,
        *,
        shape: ModelShape,
        flops: Flops,
        transformer_engine_layers: bool,
        avoidable_logits_bytes: int,
        can_pack: bool,
    ) -> None:
        self._config, self._platform, self._parallel = config, platform, parallel
        self._previous, self._folder = iteration, folder
        self._shape, self._flops = shape, flops
        self._transformer_engine_layers, self._can_pack = transformer_engine_layers, can_pack
        self._avoidable_logits_bytes = avoidable_logits_bytes
        self._steps = frozenset(config.profile.steps)
        self._cuda = platform.name == "cuda"
        self._usual: list[float] = []
        self._last_end = time.perf_counter()
        self._recorded: list[tuple[int, Mapping[str, float]]] = []
        self._trace: Path | None = None
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        self._profile: profile | None = profile(
            activities=activities, schedule=self._action, on_trace_ready=self._export
        )
        self._profile.start()
        self._records_memory = False
        self._before_step(iteration + 1)

    def step_ends(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Call after each step. Collective after the last step of a range of profiled iterations.

        Args:
            iteration: number of the step.
            metrics: of the step.
        """
        if self._profile is None:
            return
        if (iteration in self._steps) != (iteration + 1 in self._steps):
            self._platform.synchronize()  # a range begins and ends with an idle device
        now = time.perf_counter()
        if self._records_memory:
            self._write_memory(iteration)
        if iteration in self._steps:
            self._recorded.append((iteration, dict(metrics)))
        elif iteration + 1 not in self._steps:  # the profiler warms up in the step before a range
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

    def _action(self, index: int) -> ProfilerAction:
        """The profiler's action in step `index`, counted from 0 in this process."""
        iteration = self._previous + index + 1
        if iteration in self._steps:
            return ProfilerAction.RECORD if iteration + 1 in self._steps else ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.WARMUP if iteration + 1 in self._steps else ProfilerAction.NONE

    def _before_step(self, iteration: int) -> None:
        """Record allocations in the step before a range, because recording slows Python down; if the range begins with
        the first step of this process, in that step."""
        begins = iteration + 1 in self._steps and iteration not in self._steps
        begins = begins or (iteration == self._previous + 1 and iteration in self._steps)
        if begins and self._cuda and self._config.profile.memory_snapshot:
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=_SNAPSHOT_ENTRIES)
            self._records_memory = True

    def _write_memory(self, iteration: int) -> None:
        folder = self._range_folder(iteration if iteration in self._steps else iteration + 1)
        folder.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(folder / f"memory-rank{self._rank}.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
        self._records_memory = False

    @property
    def _rank(self) -> int:
        return self._parallel.world.rank

    def _range_folder(self, iteration: int) -> Path:
        """Folder of the range of consecutive iterations that contains `iteration`."""
        first = last = iteration
        while first - 1 in self._steps and first - 1 > self._previous:
            first -= 1
        while last + 1 in self._steps:
            last += 1
        return self._folder / f"iterations-{first}-{last}"

    def _export(self, finished: profile) -> None:
        if not self._recorded:
            return  # the run ended within a range
        folder = self._range_folder(self._recorded[-1][0])
        folder.mkdir(parents=True, exist_ok=True)
        self._trace = folder / f"trace-rank{self._rank}.json.gz"
        plain = self._trace.with_suffix("")
        finished.export_chrome_trace(str(plain))  # torch would compress it line by line, of which it has 100,000
        with plain.open("rb") as source, gzip.open(self._trace, "wb", compresslevel=6) as compressed:
            shutil.copyfileobj(source, compressed, 1 << 20)
        plain.unlink()

    def _report(self) -> None:
        """Compare all processes, keep the files of rank 0 and of the slowest rank, write and log the table."""
        assert self._trace is not None
        folder = self._range_folder(self._recorded[-1][0])
        breakdown = break_down(read_timeline(self._trace))
        memory = StepMemory(self._platform.memory_gib()["memory_max"], self._avoidable_logits_bytes / _GIB)
        shared: list[tuple[StepBreakdown, StepMemory]] = gather_objects((breakdown, memory))
        ranks = tuple(step for step, _ in shared)
        if self._rank not in (0, slowest_rank(ranks)):
            self._trace.unlink()
            (folder / f"memory-rank{self._rank}.pickle").unlink(missing_ok=True)
        if self._rank == 0:
            report = self._profile_report(ranks, [memory for _, memory in shared])
            (folder / "profile.json").write_text(json.dumps(json_of(report), indent=1) + "\n")
            (folder / "profile.txt").write_text(text(report) + "\n")
            logger.info_rank_0(f"profile of {text(report)}\n{folder}")
        self._recorded = []

    def _profile_report(self, ranks: tuple[StepBreakdown, ...], memory: list[StepMemory]) -> ProfileReport:
        peak_gib = memory[0].peak_gib
        config, metrics = self._config, [metrics for _, metrics in self._recorded]
        slowest = ranks[slowest_rank(ranks)]
        real_tokens = sum(values["tokens_per_second"] * values["elapsed_time"] for values in metrics) / len(metrics)
        computed_tokens = slowest.computed_tokens * self._parallel.dp.size
        padding_share = max(0.0, 1 - real_tokens / computed_tokens) if computed_tokens else 0.0
        run = self._profiled_run(padding_share, real_tokens, peak_gib)
        return ProfileReport(
            iterations=tuple(iteration for iteration, _ in self._recorded),
            ranks=ranks,
            usual_ms=statistics.median(self._usual[1:]) if len(self._usual) > 1 else None,
            tflops=metrics[-1].get("tflops", 0.0),
            peak_gib=peak_gib,
            padding_share=padding_share,
            changes=tuple(promising_changes(slowest, config, run)),
            memory_changes=tuple(memory_changes(memory)),
            title=f"{config.name} ({self._platform.name}, {self._parallel.layout})",
        )

    def _profiled_run(self, padding_share: float, real_tokens: float, peak_gib: float) -> ProfiledRun:
        platform, parallel = self._platform, self._parallel
        return ProfiledRun(
            device=platform.machine.device,
            transformer_engine_layers=self._transformer_engine_layers,
            has_transformer_engine=platform.has_transformer_engine,
            has_triton=platform.machine.triton,
            can_pack=self._can_pack,
            dp_size=parallel.dp.size,
            num_microbatches=max(1, derived.num_microbatches(self._config, parallel.dp.size)),
            padding_share=padding_share,
            product_flops=self._flops.of(real_tokens, 0.0) / parallel.world.size,
            peak_gib=peak_gib,
            total_gib=platform.total_memory_bytes() / _GIB / (1 if self._cuda else parallel.world.size),
            faster_split=faster_split(self._config, self._shape, platform.machine.device),
        )
