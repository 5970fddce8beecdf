"""`check_parity`: a flow that is right on one process is right on every layout, shown by running it on them.

A layout agrees when the objective of each step, every metric of the flow and the whole gradient of every parameter are
those of one process. All ranks are processes on this machine, started once for each world size.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy

from megatron_wrap.core.config import RunConfig, derived, load_run_config
from megatron_wrap.core.config.checks import check_layout, check_run
from megatron_wrap.core.config.schema import ArchConfig
from megatron_wrap.errors import DataError, FlowError, MegatronWrapError
from megatron_wrap.testing.diagnosis import Deviation, likely_cause
from megatron_wrap.testing.layouts import LayoutCase, default_layouts, expert_reason, parse_layout
from megatron_wrap.testing.parity_run import CaseResult, run_case
from megatron_wrap.testing.pools import Pools
from megatron_wrap.testing.ranks import RankPool

OBJECTIVE_TOLERANCE = 1e-5
"""Largest relative difference of an objective, dense models in fp32."""
METRIC_TOLERANCE = 1e-4
"""The same of a metric, which may be a small difference of large numbers."""
EXPERTS_TOLERANCE = 1e-4
"""The objective's, and ten times that a metric's, for models with experts, whose sums have another order in each
layout."""
GRADIENT_TOLERANCE = 1e-4
"""Largest norm of a gradient's difference over the norm of the gradient."""
GRADIENT_FLOOR = 1e-6
"""Share of the largest parameter gradient's norm below which a gradient counts as rounding."""
DETERMINISM_TOLERANCE = 1e-6
"""Largest relative difference of two runs on one process: kernels of a GPU may add up in any order."""
ROUNDING = 1e-6
"""Relative size of the noise on the model's outputs that shows how much rounding moves an objective or a metric; above
what layouts differ by in fp32, some 1e-7 to 1e-6."""
ROUNDING_MARGIN = 10.0
"""How often what that noise moves may still count as rounding: it is one draw, not a bound."""
EXTRA_PADDING = 16
"""Tokens by which the case `padded` pads every sequence further."""


@dataclass(frozen=True)
class LayoutVerdict:
    """One row of the report."""

    layout: str
    processes: int
    agrees: bool | None
    """None: the layout was left out; `note` says why."""
    objective_difference: float = math.nan
    """Largest relative difference over the steps."""
    metric_difference: float = math.nan
    gradient_difference: float = math.nan
    """Of the worst parameter."""
    worst_parameter: str = ""
    worst_metric: str = ""
    """The metric that disagrees most and both values; empty where all agree."""
    gradient_ratio: float = math.nan
    """Least-squares factor between this layout's whole gradient and the reference's; 1 where they agree."""
    router_loss_difference: float = math.nan
    """Of the experts' auxiliary losses, which are no part of the objective; nan where there are none."""
    note: str = ""


@dataclass(frozen=True)
class ParityReport:
    """All rows, and what is worth saying of the flow itself."""

    flow: str
    rows: list[LayoutVerdict]
    notes: list[str] = field(default_factory=list)
    platform: str = "cpu"

    @property
    def agrees(self) -> bool:
        """Whether every layout that ran agrees."""
        return all(row.agrees is not False for row in self.rows)

    def table(self) -> str:
        """The report as a person reads it."""
        where = "" if self.platform == "cpu" else f", on {self.platform}"
        lines = [f"parity of {self.flow} with one process{where}", ""]
        lines.append(f"{'layout':<14} {'ranks':>5}  {'objective':>9}  {'metrics':>9}  {'gradients':>9}  ")
        for row in self.rows:
            mark = {True: "agrees", False: "DISAGREES", None: "left out"}[row.agrees]
            numbers = [row.objective_difference, row.metric_difference, row.gradient_difference]
            shown = "  ".join(f"{'-' if math.isnan(number) else format(number, '.1e'):>9}" for number in numbers)
            routers = "" if math.isnan(row.router_loss_difference) else f"; routers' {row.router_loss_difference:.1e}"
            lines.append(f"{row.layout:<14} {row.processes:>5}  {shown}  {mark}{routers}")
            if row.agrees is False and row.worst_parameter:
                lines.append(f"{'':>14} worst: {row.worst_parameter}; gradient ratio {row.gradient_ratio:.6g}")
            if row.worst_metric:
                lines.append(f"{'':>14} metric {row.worst_metric}")
            if row.note:
                lines.append(f"{'':>14} {row.note}")
        lines += ["", *self.notes] if self.notes else []
        ran = [row for row in self.rows if row.agrees is not None]
        right = sum(bool(row.agrees) for row in ran)
        lines.append(
            f"{right} of {len(ran)} layouts agree" + ("" if self.agrees else ": the flow is NOT layout-invariant")
        )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The report as plain values; a number that is not there is null."""
        rows = [
            {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in row.items()
            }
            for row in map(asdict, self.rows)
        ]
        return {"flow": self.flow, "platform": self.platform, "agrees": self.agrees, "rows": rows, "notes": self.notes}


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
        config: the run's YAML; its flow, options and data are taken.
        overrides: `a.b.c=value` strings.
        flow: registered key or `my_package.my_module:MyFlow`, in place of the configuration's.
        layouts: names for `parse_layout`; default: `default_layouts`.
        max_processes: layouts of more are left out.
        steps: optimizer steps of each run.
        samples: take these; default: the head of the configuration's training data.
        shrink: make the model tiny, of the same kind; False leaves its sizes.
        platform: "cpu" (gloo processes) or "cuda": each process on a GPU of this machine, over NCCL, in fp32 without
            TF32; layouts of more processes than GPUs are left out. The tolerances are the same: both round in fp32.
        ranks: world size -> pool of ranks to use, for many checks in one process; default: pools of its own.

    Raises:
        MegatronWrapError: the configuration, the samples or the flow cannot run on one process.
    """
    with tempfile.TemporaryDirectory() as folder:
        base = _overrides(config, overrides, flow, shrink, folder, platform)
        reference_config = load_run_config(config, base)
        check_run(reference_config)
        taken = _samples(reference_config, samples, steps)
        with Pools(platform, ranks) as pools:
            reference = pools.run(1, run_case, reference_config, taken, steps)
            again = pools.run(1, run_case, reference_config, taken, steps)
            notes, broken = _of_the_flow_itself(reference, again)
            rows = [broken] if broken else []
            rounded = again if broken else pools.run(1, run_case, reference_config, taken, steps, noise=ROUNDING)
            comparison = _Comparison(config, base, taken, steps, reference, rounded, pools)
            for case in map(parse_layout, [] if broken else layouts or default_layouts(reference_config.arch)):
                rows.append(comparison.verdict(case, max_processes))
    return ParityReport(reference_config.flow.flow_key, rows, notes, platform)


def assert_layout_invariant(config: str | Path, **arguments: Any) -> None:
    """For pytest: `check_parity`, and an AssertionError with its table where a layout disagrees."""
    report = check_parity(config, **arguments)
    assert report.agrees, "\n" + report.table()


@dataclass
class _Comparison:
    """Runs cases and holds each against the reference."""

    config: str | Path
    base: list[str]
    samples: list[Any]
    steps: int
    reference: CaseResult
    rounded: CaseResult
    """The reference with noise on the model's outputs."""
    pools: Pools

    @functools.cached_property
    def objective_floors(self) -> list[float]:
        """For each step: what to hold a difference against where the objective itself is smaller, as a mean of
        advantages is: rounding is not a share of what cancels out."""
        return [
            rounding_floor(moved, value, OBJECTIVE_TOLERANCE)
            for moved, value in zip(self.rounded.objectives, self.reference.objectives, strict=True)
        ]

    @functools.cached_property
    def metric_floors(self) -> list[dict[str, float]]:
        """The same of each metric."""
        return [
            {name: rounding_floor(moved.get(name, math.nan), value, METRIC_TOLERANCE) for name, value in values.items()}
            for moved, values in zip(self.rounded.metrics, self.reference.metrics, strict=True)
        ]

    def verdict(self, case: LayoutCase, max_processes: int) -> LayoutVerdict:
        """The row of one layout."""

        def left_out(why: str) -> LayoutVerdict:
            return LayoutVerdict(case.name, case.processes, None, note=why)

        if case.processes > max_processes:
            return left_out(f"takes {case.processes} processes, more than {max_processes}")
        if self.pools.devices is not None and case.processes > self.pools.devices:
            return left_out(f"takes {case.processes} processes, each on a GPU; this machine has {self.pools.devices}")
        if self.reference.seen.two_values and case.micro_batch_size is not None:
            return left_out(
                "the flow returns (loss, metrics), a mean over the micro-batch, which depends on how the batch is cut; "
                "return LossOutput to be free of the cut"
            )
        try:
            config = load_run_config(self.config, [*self.base, *case.overrides()])
            check_run(config)
            check_layout(config, case.processes)
        except MegatronWrapError as error:
            return left_out(f"does not fit: {error}")
        reason = expert_reason(config.arch, case)
        if reason:
            return left_out(reason)
        padding = EXTRA_PADDING if case.extra_padding else 0
        try:
            found = self.pools.run(case.processes, run_case, config, self.samples, self.steps, padding)
        except FlowError as error:
            return LayoutVerdict(case.name, case.processes, False, note=f"cannot run: {error}")
        return self._compared(case, config, found)

    def _compared(self, case: LayoutCase, config: RunConfig, found: CaseResult) -> LayoutVerdict:
        reference = self.reference
        has_experts = config.arch.num_experts is not None
        tolerance = EXPERTS_TOLERANCE if has_experts else OBJECTIVE_TOLERANCE
        objective = max(map(relative, found.objectives, reference.objectives, self.objective_floors))
        metrics = metric_differences(found.metrics, reference.metrics, self.metric_floors)
        metric = max((difference for difference, _, _ in metrics.values()), default=0.0)
        routers = metric_differences(found.router_losses, reference.router_losses, [{}] * len(reference.router_losses))
        router_loss = max((difference for difference, _, _ in routers.values()), default=math.nan)
        differences = gradient_differences(found.gradients, reference.gradients)
        worst = max(differences, key=lambda name: differences[name])
        ratio = gradient_ratio(found.gradients, reference.gradients)
        objective_agrees = objective <= tolerance
        gradients_agree = differences[worst] <= GRADIENT_TOLERANCE
        worst_metric, shown, metric_ratio = "", "", math.nan
        if metric > (10 * tolerance if has_experts else METRIC_TOLERANCE):
            worst_metric = max(metrics, key=lambda name: metrics[name][0])
            _, value, expected = metrics[worst_metric]
            metric_ratio = value / expected if expected else math.nan
            shown = f"{worst_metric}: {value:.6g}, on one process {expected:.6g}"
        elif found.seen.over_tp:  # the report is right only because tensor-parallel rank 0 speaks
            worst_metric = next(iter(found.seen.over_tp))
            shown = f"{worst_metric}: {found.seen.over_tp[worst_metric]} on two ranks"
        agrees = objective_agrees and gradients_agree and not worst_metric and not router_loss > tolerance
        note = ""
        if not agrees:
            deviation = Deviation(
                case, found, reference, ratio, objective_agrees, gradients_agree, worst_metric, metric_ratio
            )
            note = likely_cause(deviation, lambda: self._agrees_on_equal_samples(case, config))
        return LayoutVerdict(
            case.name,
            case.processes,
            agrees,
            objective,
            metric,
            differences[worst],
            worst_parameter="" if gradients_agree else worst,
            worst_metric=shown,
            gradient_ratio=ratio,
            router_loss_difference=router_loss,
            note=note,
        )

    def _agrees_on_equal_samples(self, case: LayoutCase, config: RunConfig) -> bool:
        """Whether reference and layout agree on a batch that repeats its first sample that has a loss."""
        reference_config = load_run_config(self.config, self.base)
        size = config.train.global_batch_size
        for sample in self.samples[:size]:
            repeated = [sample] * size
            reference = self.pools.run(1, run_case, reference_config, repeated, 1)
            if reference.objectives[0]:
                break
        padding = EXTRA_PADDING if case.extra_padding else 0
        found = self.pools.run(case.processes, run_case, config, repeated, 1, padding)
        differences = gradient_differences(found.gradients, reference.gradients)
        return relative(found.objectives[0], reference.objectives[0]) <= OBJECTIVE_TOLERANCE and (
            max(differences.values()) <= GRADIENT_TOLERANCE
        )


def rounding_floor(moved: float, value: float, tolerance: float) -> float:
    """The size below which `tolerance` of a value is less than what rounding may move it by."""
    difference = abs(moved - value)
    return ROUNDING_MARGIN * difference / tolerance if math.isfinite(difference) else 0.0


def relative(value: float, reference: float, floor: float = 0.0) -> float:
    """|value - reference| / max(|reference|, floor); inf where exactly one is not a number, 0 where both are not."""
    if math.isnan(value) or math.isnan(reference):
        return 0.0 if math.isnan(value) and math.isnan(reference) else math.inf
    return abs(value - reference) / max(abs(reference), floor, 1e-8)


def metric_differences(
    found: Sequence[dict[str, float]], reference: Sequence[dict[str, float]], floors: Sequence[dict[str, float]]
) -> dict[str, tuple[float, float, float]]:
    """Metric -> (relative difference, found, reference) of the step in which it differs most."""
    differences: dict[str, tuple[float, float, float]] = {}
    for mine, theirs, floor in zip(found, reference, floors, strict=True):
        for name, expected in theirs.items():
            value = mine.get(name, math.nan)
            difference = relative(value, expected, floor.get(name, 0.0))
            if name not in differences or difference > differences[name][0]:
                differences[name] = (difference, value, expected)
    return differences


def gradient_differences(found: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    """Name -> norm of the difference over the norm of the reference's gradient, or over a floor for tiny ones."""
    floor = GRADIENT_FLOOR * max(float(numpy.linalg.norm(gradient)) for gradient in reference.values())
    differences = {}
    for name, expected in reference.items():
        if name not in found:
            differences[name] = math.inf
            continue
        difference = float(numpy.linalg.norm(found[name] - expected))
        share = difference / max(float(numpy.linalg.norm(expected)), floor, 1e-30)
        differences[name] = math.inf if math.isnan(share) else share
    return differences


def gradient_ratio(found: dict[str, Any], reference: dict[str, Any]) -> float:
    """The factor c for which c * reference is nearest to the found gradient, over all parameters."""
    inner = sum(float(numpy.vdot(found[name], reference[name])) for name in reference if name in found)
    square = sum(float(numpy.vdot(gradient, gradient)) for gradient in reference.values())
    return inner / square if square else math.nan


def _of_the_flow_itself(first: CaseResult, second: CaseResult) -> tuple[list[str], LayoutVerdict | None]:
    """Notes on the reference runs, and a row that ends the check where they cannot serve as one."""
    notes = []
    if first.router_losses[0]:
        told = ", ".join(f"{name} {value:.6g}" for name, value in first.router_losses[0].items())
        notes.append(f"losses of the experts' routers, no part of the objective, without coefficients: {told}")
    silent = [name for name, gradient in first.gradients.items() if not gradient.any()]
    if silent:
        notes.append(f"{len(silent)} parameters get no gradient, such as {silent[0]}")
    if first.undeclared_fields:
        notes.append(
            f"fields {', '.join(first.undeclared_fields)} have a dimension as long as the sequence that "
            "get_fields_and_seqdims does not name: context parallelism does not split them"
        )

    def broken(why: str) -> LayoutVerdict:
        return LayoutVerdict("one process", 1, False, note=f"likely cause: {why}")

    if not all(map(math.isfinite, first.objectives)):
        return notes, broken(
            "the objective is not finite on one process already: a sample without any loss token divides 0 by 0? Give "
            "sums (self.token_mean) and let the framework divide"
        )
    if max(map(relative, second.objectives, first.objectives)) > DETERMINISM_TOLERANCE:
        return notes, broken(
            f"the flow itself is not deterministic: two runs on one process give {first.objectives[0]:.8g} and "
            f"{second.objectives[0]:.8g}; draw random numbers in collate_data_micro_batch, which is seeded"
        )
    if silent and len(silent) == len(first.gradients):
        return notes, broken("no parameter gets a gradient: is the loss computed from model_forward_output?")
    return notes, None


def _samples(config: RunConfig, samples: Sequence[Any] | None, steps: int) -> list[Any]:
    from megatron_wrap.data.sources import training_samples

    source = training_samples(config.data) if samples is None else samples
    needed = config.train.global_batch_size * steps
    if not len(source):
        raise DataError("check-parity: there are no samples")
    return [source[place % len(source)] for place in range(needed)]


def _overrides(
    config: str | Path, overrides: Sequence[str], flow: str | None, shrink: bool, folder: str, platform: str = "cpu"
) -> list[str]:
    """What the check itself sets: fp32 without dropout, small batches, nothing saved; the user's words come last."""
    train = "megatron_lm.train.common"
    values = [
        f"{train}.{key}={value}"
        for key, value in {
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "rampup_batch_size": "null",
            "train_iters": 1000,
            "save": "null",
            "save_interval": "null",
            "load": "null",
            "finetune": "false",
            "eval_interval": "null",
            "check_for_nan_in_loss_and_grad": "false",  # nan is a finding here
        }.items()
    ]
    values += [
        f"megatron_wrap.init.platform={platform}",
        "megatron_lm.train.dtype.__select__=fp32",
        "megatron_wrap.logger.progress_bar=false",
        "megatron_wrap.logger.enable_wandb=false",
        "megatron_wrap.logger.enable_tensorboard=false",
        "megatron_wrap.logger.ignore_warning=true",
        f"megatron_wrap.logger.output_dir={folder}",
        "megatron_lm.model.arch.hidden_dropout=0.0",
        "megatron_lm.model.arch.attention_dropout=0.0",
        "megatron_lm.model.arch.transformer_impl=torch",
        "megatron_lm.model.parallel.num_layers_per_virtual_pipeline_stage=null",
        *(f"megatron_lm.model.parallel.decoder_{end}_pipeline_num_layers=null" for end in ("first", "last")),
        *LayoutCase("one process").overrides(),
    ]
    if flow is not None:
        values.append(f"megatron_wrap.flow.flow_key={flow}")
    if shrink:
        values += _tiny(load_run_config(config, [*values, *overrides]))
    return [*values, *overrides]


def _tiny(config: RunConfig) -> list[str]:
    """The same kind of model in little: its ratio of query to key heads, its norms, activation and positions."""
    arch = config.arch
    experts = {} if arch.num_experts is None else _tiny_experts(arch)
    groups = arch.num_query_groups or arch.num_attention_heads
    few_groups = groups if groups < 2 else 2
    heads = few_groups * min(arch.num_attention_heads // groups, 4)
    sizes: dict[str, Any] = {
        "num_layers": 4,
        "num_attention_heads": heads,
        "num_query_groups": few_groups,
        "group_query_attention": "null",
        "kv_channels": 16,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        **experts,
    }
    if arch.multi_latent_attention:
        ranks = {"kv_lora_rank": 32, "q_lora_rank": "null" if arch.q_lora_rank is None else 48}
        sizes |= {**ranks, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12}
    if arch.window_size is not None:  # one that sequences of a few dozen tokens feel
        sizes["window_size"] = [min(size, 12) for size in arch.window_size]
    values = [f"megatron_lm.model.arch.{key}={value}" for key, value in sizes.items()]
    return [*values, f"megatron_lm.train.common.seq_length={min(config.train.seq_length, 64)}"]


def _tiny_experts(arch: ArchConfig) -> dict[str, Any]:
    """Few experts of the same kind: the same router, groups and shared experts, a dense layer where there are some."""
    grouped = arch.moe_router_num_groups is not None
    experts, topk = 8 if grouped else 4, min(arch.moe_router_topk, 2)
    pattern = derived.moe_layer_pattern(arch)[:4]
    sizes: dict[str, Any] = {
        "num_experts": experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": 64,
        "moe_layer_freq": list(pattern) if len(pattern) == 4 and 1 in pattern else [int(1 in pattern[:1]), 1, 1, 1],
        "moe_shared_expert_intermediate_size": "null" if arch.moe_shared_expert_intermediate_size is None else 64,
    }
    if grouped:
        sizes |= {"moe_router_num_groups": 4, "moe_router_group_topk": min(arch.moe_router_group_topk or 1, topk)}
        if arch.moe_router_group_score_experts is not None:
            sizes["moe_router_group_score_experts"] = min(arch.moe_router_group_score_experts, 2)
    if "moe_input_jitter_eps" in arch.upstream:
        sizes["moe_input_jitter_eps"] = "null"  # random, as dropout is
    return sizes
