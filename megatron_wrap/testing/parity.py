"""`check_parity`: runs a flow on one process and on parallel layouts, and compares them.

A layout agrees if the objective of each step, every metric of the flow and the gradient of every parameter equal those
of one process within tolerances. All ranks are processes on this machine, started once for each world size.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_wrap.bridge.loading.hub import read_run
from megatron_wrap.config import RunConfig
from megatron_wrap.config.checks.layout import check_layout
from megatron_wrap.config.schema import derived
from megatron_wrap.core.validation.paths import check_run
from megatron_wrap.errors import DataError, FlowError, MegatronWrapError
from megatron_wrap.flow import MegatronWrapFlowEntry
from megatron_wrap.flow.contract.class_checks import packing_refusal
from megatron_wrap.flow.contract.routing import ROUTED_EXPERTS
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.testing.diagnosis import PACKING_CAUSE, Deviation, likely_cause
from megatron_wrap.testing.layouts import LayoutCase, check_overrides, default_layouts, expert_reason, parse_layout
from megatron_wrap.testing.parity_comparison import (
    DETERMINISM_TOLERANCE,
    EXPERTS_TOLERANCE,
    GRADIENT_TOLERANCE,
    METRIC_TOLERANCE,
    OBJECTIVE_TOLERANCE,
    ROUNDING,
    LayoutVerdict,
    ParityReport,
    gradient_differences,
    gradient_ratio,
    metric_differences,
    relative,
    rounding_floor,
)
from megatron_wrap.testing.parity_run import CaseResult, first_windows, recorded_routing, run_case
from megatron_wrap.testing.ranks import Pools, RankPool


def check_parity(
    config: str | Path,
    overrides: Sequence[str] = (),
    flow: str | None = None,
    layouts: Sequence[str] | None = None,
    max_processes: int = 4,
    steps: int = 2,
    samples: Sequence[Any] | None = None,
    shrink: bool = True,
    platform: str = "cpu",
    ranks: Callable[[int], RankPool] | None = None,
) -> ParityReport:
    """Run a flow on one process and on each layout, and compare.

    Args:
        config: the run's YAML; defines flow, options and data.
        overrides: `a.b.c=value` strings.
        flow: registered key or `my_package.my_module:MyFlow`, instead of the configuration's.
        layouts: names for `parse_layout`; default: `default_layouts`.
        max_processes: layouts with more processes are skipped.
        steps: optimizer steps of each run.
        samples: default: the head of the configuration's training data.
        shrink: replace the model by a tiny one of the same kind; False keeps its sizes.
        platform: "cpu" (gloo processes) or "cuda": each process on a GPU of this machine, over NCCL, in fp32 without
            TF32; layouts with more processes than GPUs are skipped. The tolerances are the same: both compute in fp32.
        ranks: world size -> existing pool of ranks, for many checks in one process; default: start new pools.

    Raises:
        MegatronWrapError: the configuration, the samples or the flow cannot run on one process.
    """
    with tempfile.TemporaryDirectory() as folder:
        base = check_overrides(config, overrides, flow, shrink, folder, platform)
        reference_config = read_run(config, base)
        check_run(reference_config)
        with Pools(platform, ranks) as pools:
            batch_samples = _with_routing(reference_config, _samples(reference_config, samples, steps, pools), pools)
            on_one_process = functools.partial(pools.run, 1, run_case, reference_config, batch_samples, steps)
            reference, again = on_one_process(), on_one_process()
            notes, broken = _check_reference(reference, again)
            rows = [broken] if broken else []
            rounded = again if broken else on_one_process(noise=ROUNDING)
            without_packing = packing_refusal(MegatronWrapFlowEntry.get_flow_class(reference_config.flow.flow_key))
            comparisons = _Comparisons(
                config, base, reference_config, batch_samples, steps, reference, rounded, pools, without_packing
            )
            for case in map(parse_layout, [] if broken else layouts or default_layouts(reference_config.arch)):
                rows.append(comparisons.verdict(case, max_processes))
            calls = comparisons.vocabulary_calls
            if calls and not any(calls in row.note for row in rows):
                notes.append(f"{calls}; layouts agree because the values do not depend on it in these steps")
    return ParityReport(reference_config.flow.flow_key, rows, notes, platform)


def assert_layout_invariant(config: str | Path, **arguments: Any) -> None:
    """For pytest: `check_parity`, and an AssertionError with its table if a layout disagrees."""
    report = check_parity(config, **arguments)
    assert report.agrees, "\n" + report.table()


@dataclass
class _Comparisons:
    """Runs layouts and compares each with the reference."""

    config: str | Path
    base: list[str]
    """Overrides of every layout."""
    reference_config: RunConfig
    samples: list[Any]
    steps: int
    reference: CaseResult
    rounded: CaseResult
    """Results of the reference with noise on the model's outputs."""
    pools: Pools
    without_packing: str
    """Reason why layouts with packed rows are left out; empty if the flow supports them."""
    vocabulary_calls: str = ""
    """`Seen.vocabulary_calls` of a layout with tensor parallelism that agrees; empty: none."""

    @functools.cached_property
    def objective_floors(self) -> list[float]:
        """Smallest denominator of a relative difference of the objective, for each step. If large terms cancel, as in a
        mean of advantages, the objective is small but its rounding error is not."""
        return [
            rounding_floor(noisy, value, OBJECTIVE_TOLERANCE)
            for noisy, value in zip(self.rounded.objectives, self.reference.objectives, strict=True)
        ]

    @functools.cached_property
    def metric_floors(self) -> list[dict[str, float]]:
        """Smallest denominator of a relative difference of each metric, for each step."""
        tolerance = METRIC_TOLERANCE
        return [
            {name: rounding_floor(noisy.get(name, math.nan), value, tolerance) for name, value in values.items()}
            for noisy, values in zip(self.rounded.metrics, self.reference.metrics, strict=True)
        ]

    def verdict(self, case: LayoutCase, max_processes: int) -> LayoutVerdict:
        """Run one layout, compare it, and return its row of the report."""

        def left_out(why: str) -> LayoutVerdict:
            return LayoutVerdict(case.name, case.processes, None, note=why)

        if case.processes > max_processes:
            return left_out(f"needs {case.processes} processes, more than {max_processes}")
        if self.pools.devices is not None and case.processes > self.pools.devices:
            return left_out(f"needs {case.processes} processes, each on a GPU; this machine has {self.pools.devices}")
        if case.packing and self.without_packing:
            return left_out(self.without_packing)
        divides_otherwise = case.packing or case.token_budget or case.micro_batch_size is not None
        if self.reference.seen.two_values and divides_otherwise:
            return left_out(
                "the flow returns (loss, metrics), a mean over the micro-batch, which depends on how a batch is "
                "divided; return LossOutput to make the loss independent of it"
            )
        try:
            config = read_run(self.config, [*self.base, *case.overrides(self.reference_config.train.seq_length)])
            check_run(config)
            check_layout(config, case.processes)
        except MegatronWrapError as error:
            return left_out(f"does not fit: {error}")
        reason = expert_reason(config.arch, case)
        if reason:
            return left_out(reason)
        try:
            result = self.pools.run(case.processes, run_case, config, self.samples, self.steps, case.extra_padding)
        except FlowError as error:
            hint = f"\n{PACKING_CAUSE}" if case.packing else ""
            return LayoutVerdict(case.name, case.processes, False, note=f"cannot run: {error}{hint}")
        return self._compared(case, config, result)

    def _compared(self, case: LayoutCase, config: RunConfig, result: CaseResult) -> LayoutVerdict:
        reference = self.reference
        has_experts = config.arch.num_experts is not None
        tolerance = EXPERTS_TOLERANCE if has_experts else OBJECTIVE_TOLERANCE
        objective = max(map(relative, result.objectives, reference.objectives, self.objective_floors))
        metrics = metric_differences(result.metrics, reference.metrics, self.metric_floors)
        metric = max((difference for difference, _, _ in metrics.values()), default=0.0)
        routers = metric_differences(result.router_losses, reference.router_losses, [{}] * self.steps)
        router_loss = max((difference for difference, _, _ in routers.values()), default=math.nan)
        differences = gradient_differences(result.gradients, reference.gradients)
        worst = max(differences, key=lambda name: differences[name])
        ratio = gradient_ratio(result.gradients, reference.gradients)
        objective_agrees = objective <= tolerance
        gradients_agree = differences[worst] <= GRADIENT_TOLERANCE
        worst_metric, shown, metric_ratio = "", "", math.nan
        if metric > (10 * tolerance if has_experts else METRIC_TOLERANCE):
            worst_metric = max(metrics, key=lambda name: metrics[name][0])
            _, value, expected = metrics[worst_metric]
            metric_ratio = value / expected if expected else math.nan
            shown = f"{worst_metric}: {value:.6g}, on one process {expected:.6g}"
        elif result.seen.over_tp:  # the reported value is correct only because it is tensor-parallel rank 0's
            worst_metric = next(iter(result.seen.over_tp))
            shown = f"{worst_metric}: {result.seen.over_tp[worst_metric]} on two ranks"
        agrees = objective_agrees and gradients_agree and not worst_metric and not router_loss > tolerance
        note = ""
        if not agrees:
            deviation = Deviation(
                case, result, reference, ratio, objective_agrees, gradients_agree, worst_metric, metric_ratio
            )
            note = likely_cause(deviation, lambda: self._ratio_on_equal_samples(case, config))
        elif case.tp > 1:
            self.vocabulary_calls = result.seen.vocabulary_calls
        numbers = (objective, metric, differences[worst])
        parameter = "" if gradients_agree else worst
        return LayoutVerdict(case.name, case.processes, agrees, *numbers, parameter, shown, ratio, router_loss, note)

    def _ratio_on_equal_samples(self, case: LayoutCase, config: RunConfig) -> float:
        """The factor between the gradients of layout and reference on a batch that repeats one sample, the first with a
        non-zero loss; nan if objective and gradients do not have the same factor."""
        size = config.train.global_batch_size
        for sample in self.samples[:size]:
            repeated = [sample] * size
            reference = self.pools.run(1, run_case, self.reference_config, repeated, 1)
            if reference.objectives[0]:
                break
        result = self.pools.run(case.processes, run_case, config, repeated, 1, case.extra_padding)
        ratio = gradient_ratio(result.gradients, reference.gradients)
        multiplied = {name: ratio * gradient for name, gradient in reference.gradients.items()}
        differences = gradient_differences(result.gradients, multiplied)
        is_multiple = relative(result.objectives[0], ratio * reference.objectives[0]) <= OBJECTIVE_TOLERANCE
        return ratio if is_multiple and max(differences.values()) <= GRADIENT_TOLERANCE else math.nan


def _check_reference(first: CaseResult, second: CaseResult) -> tuple[list[str], LayoutVerdict | None]:
    """Notes on the two runs on one process, and a failed row if they cannot be used as the reference."""
    notes = []
    if first.router_losses[0]:
        values = ", ".join(f"{name} {value:.6g}" for name, value in first.router_losses[0].items())
        notes.append(f"router losses, not part of the objective, without coefficients: {values}")
    without_gradient = [name for name, gradient in first.gradients.items() if not gradient.any()]
    if without_gradient:
        notes.append(f"{counted(len(without_gradient), 'parameter')} without a gradient, such as {without_gradient[0]}")
    if first.undeclared_fields:
        notes.append(
            f"fields {', '.join(first.undeclared_fields)} have a dimension of the sequence's length, but "
            "get_fields_and_seqdims does not list them, so context parallelism does not split them"
        )

    def broken(why: str) -> LayoutVerdict:
        return LayoutVerdict("one process", 1, False, note=f"likely cause: {why}")

    if not all(map(math.isfinite, first.objectives)):
        return notes, broken(
            "the objective is not finite on one process, perhaps 0 / 0 for a sample without loss tokens; return sums "
            "(self.token_mean) and let the framework divide"
        )
    if max(map(relative, second.objectives, first.objectives)) > DETERMINISM_TOLERANCE:
        return notes, broken(
            f"the flow is not deterministic: two runs on one process result in {first.objectives[0]:.8g} and "
            f"{second.objectives[0]:.8g}; draw random numbers in collate_data_micro_batch, which is seeded"
        )
    if without_gradient and len(without_gradient) == len(first.gradients):
        return notes, broken("no parameter gets a gradient; compute the loss from model_forward_output")
    return notes, None


def _samples(config: RunConfig, samples: Sequence[Any] | None, steps: int, pools: Pools) -> list[Any]:
    from megatron_wrap.data.order.sample_sets import training_stream

    needed = config.train.global_batch_size * steps
    if samples is None and derived.is_indexed(config.data):
        windows: list[Any] = pools.run(1, first_windows, config, needed)
        return windows
    mock, sources = derived.mock_samples(config.data), derived.training_sources(config)
    if samples is None and (sources or mock is not None):
        stream = training_stream(sources, config.train.seed, False, config.data.shuffle_buffer, mock)
        return [stream.read(position) for position in range(needed)]
    if samples is None or not len(samples):
        raise DataError("check-parity: there are no samples; set megatron_wrap.data.train, or pass samples")
    return [samples[index % len(samples)] for index in range(needed)]


def _with_routing(config: RunConfig, samples: list[Any], pools: Pools) -> list[Any]:
    """Samples for a run with `router_replay`: samples without a routing get that of one process."""
    if config.train.router_replay == "disabled" or any(ROUTED_EXPERTS in sample for sample in samples):
        return samples
    recording = replace(config, train=replace(config.train, router_replay="R2"))
    routings = pools.run(1, recorded_routing, recording, samples)
    return [{**sample, ROUTED_EXPERTS: routing} for sample, routing in zip(samples, routings, strict=True)]
