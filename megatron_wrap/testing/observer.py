"""Records what a flow's loss does on a rank, and finds torch functions that it calls over the vocabulary of
vocabulary-parallel logits."""

from __future__ import annotations

import contextlib
import linecache
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_wrap.engine.passes.loss import CalculateLoss
from megatron_wrap.errors import FlowError, MegatronWrapError
from megatron_wrap.flow.contract.base import LossOutput
from megatron_wrap.metrics.metric import Difference, Maximum, Minimum, Total
from megatron_wrap.parallel.collectives import gather_objects
from megatron_wrap.parallel.state import ParallelState

_TOKEN_LOG_PROBS = "-token_log_probs(logits, labels)"
_OF_IDS = "token_log_probs(logits, labels), or gather_log_probs(logits, id_sets) for several ids of a token"
_TOP_1, _TOP_K = "top_k(logits, 1).ids[..., 0]", "top_k(logits, k)"
_REPLACEMENTS: Mapping[str, tuple[int | None, int | None, str]] = {
    "cross_entropy": (None, None, _TOKEN_LOG_PROBS),
    "nll_loss": (None, None, _TOKEN_LOG_PROBS),
    "log_softmax": (1, None, _OF_IDS),
    "softmax": (1, None, "token_log_probs(logits, labels).exp(), or entropy(logits), kl_divergence(logits, others)"),
    "logsumexp": (1, None, "logsumexp(logits)"),
    "gather": (1, None, "gather_logits(logits, id_sets)"),
    "take_along_dim": (2, None, "gather_logits(logits, id_sets)"),
    "argmax": (1, None, _TOP_1),
    "max": (1, None, "vocabulary_max(logits)"),
    "amax": (1, None, "vocabulary_max(logits)"),
    "topk": (2, -1, _TOP_K),
    "sort": (1, -1, _TOP_K),
}
"""Name of a torch function -> (index of its argument `dim` (None: it has none), the default of `dim` (None: all), what
to write instead, with functions of `megatron_wrap.ops`)."""
_PACKAGE = str(Path(__file__).parents[1])
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(_PACKAGE, "testing")))


class VocabularyCalls(TorchFunctionMode):
    """A context that records calls that need the whole vocabulary but get only this process's columns of it.
    `megatron_wrap.ops` combines the columns of all processes, so its calls are not recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = 0
        """Size of the last dimension of this process's logits."""
        self.calls: dict[str, str] = {}
        """FILE:LINE -> what is wrong there and what to write instead."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _REPLACEMENTS and _is_over(self.columns, name, args, named):
            frame = _users_frame(sys._getframe(1))
            if frame is not None and not frame.f_code.co_filename.startswith(str(Path(_PACKAGE, "ops"))):
                where, source = _location(frame.f_code.co_filename, frame.f_lineno)
                self.calls.setdefault(
                    where,
                    f"{where} calls {name} over this process's part of the vocabulary, {self.columns} columns: "
                    f"`{source}`; write {_REPLACEMENTS[name][2]}, of megatron_wrap.ops",
                )
        return func(*args, **named)


def raised_at(error: BaseException) -> str:
    """FILE:LINE and the line of the user's code that raised an error."""
    trace: TracebackType | None = error.__traceback__
    where, source = "", ""
    while trace is not None:
        if _is_users(trace.tb_frame):
            where, source = _location(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return f"{where}: `{source}`"


def _is_over(columns: int, name: str, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether the function is computed over a dimension with as many entries as this process has columns."""
    tensor = args[0] if args else named.get("input")
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or not tensor.dim():
        return False
    index, default, _ = _REPLACEMENTS[name]
    if index is None:  # the class dimension is the second, and of a single token the first
        return tensor.shape[min(1, tensor.dim() - 1)] == columns
    dim = named.get("dim", args[index] if len(args) > index else default)
    return columns in tensor.shape if not isinstance(dim, int) else tensor.shape[dim] == columns


def _users_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    return frame


def _is_users(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(_NOT_THE_USERS)


def _location(file: str, line: int) -> tuple[str, str]:
    return f"{Path(file).name}:{line}", linecache.getline(file, line).strip()


SAME_METRIC = 1e-4
"""Largest relative difference of two ranks' values that count as equal."""


@dataclass(frozen=True)
class Seen:
    """Observations from all ranks' calls of `calculate_loss`; the same on every rank."""

    two_values: bool
    """Whether the flow returns (loss, metrics), where the loss is a mean over the micro-batch."""
    draws_random: bool
    """Whether the flow draws random numbers, which differ between layouts."""
    metric_kinds: dict[str, str] = field(default_factory=dict)
    """Metric -> "number", "pair" (also of a Difference), "total" or "extreme"."""
    over_tp: dict[str, str] = field(default_factory=dict)
    """Metric -> two different values that tensor-parallel ranks report."""
    over_cp: dict[str, str] = field(default_factory=dict)
    """Metric -> two different values that context-parallel ranks report as bare numbers; pairs and totals may
    differ."""
    vocabulary_calls: str = ""
    """Calls of torch functions over the vocabulary, which see one tensor-parallel rank's columns; empty if none."""


@dataclass
class Observer:
    """Records the metrics that a flow's `calculate_loss` returns on one rank."""

    noise: float = 0.0
    """Relative size of the noise that is added to the model's outputs, to measure the effect of rounding."""
    two_values: bool = False
    draws_random: bool = False
    calls: list[dict[str, tuple[str, float, float]]] = field(default_factory=list)
    """Metric -> (kind, value, weight), for each call."""
    vocabulary: VocabularyCalls = field(default_factory=VocabularyCalls)
    error: Exception | None = None
    """The error that `calculate_loss` raised; None: it raised none."""

    def around(self, calculate_loss: CalculateLoss) -> CalculateLoss:
        """A function that calls `calculate_loss` and records what it returns."""
        generator = torch.Generator().manual_seed(0)

        def observed(loss_inputs: Any, model_forward_output: torch.Tensor) -> Any:
            if self.noise:
                noise = torch.randn(model_forward_output.shape, generator=generator).to(model_forward_output)
                model_forward_output = model_forward_output * (1 + self.noise * noise)
            before = _random_state(model_forward_output.device)
            self.vocabulary.columns = model_forward_output.shape[-1]
            try:
                with self.vocabulary:
                    returned = calculate_loss(loss_inputs, model_forward_output)
            except Exception as error:
                self.error = error
                raise
            self.draws_random |= not torch.equal(before, _random_state(model_forward_output.device))
            self.two_values |= isinstance(returned, tuple)
            others = returned.metrics if isinstance(returned, LossOutput) else {}
            metrics = returned[1] if isinstance(returned, tuple) else others
            self.calls.append({name: _read(metric) for name, metric in metrics.items()})
            return returned

        return observed

    @contextlib.contextmanager
    def reported(self, flow: Any, parallel: ParallelState) -> Iterator[None]:
        """Convert an error that `calculate_loss` raises inside the block, on the ranks that run it.

        Raises:
            FlowError: with the line of the flow, and with its likely cause under tensor parallelism.
        """
        try:
            yield
        except MegatronWrapError:
            raise
        except Exception as error:
            if error is not self.error:
                raise
            text = f"{type(flow).__name__}.calculate_loss raised {type(error).__name__}: {str(error).rstrip('.')}"
            if self.vocabulary.calls and parallel.tp.size > 1:
                raise FlowError(f"{text}; likely cause: {'; '.join(self.vocabulary.calls.values())}") from error
            raise FlowError(f"{text}, at {raised_at(error)}") from error

    def seen(self, flow: Any, parallel: ParallelState) -> Seen:
        """The observations of all ranks. Collective.

        Raises:
            FlowError: the names of the metrics differ between micro-batches or ranks.
        """
        rank = (parallel.dp.rank, parallel.cp.rank, parallel.tp.rank)
        vocabulary_calls = "; ".join(self.vocabulary.calls.values())
        everywhere = gather_objects((rank, self.calls, self.two_values, self.draws_random, vocabulary_calls))
        ranks = {rank: calls for rank, calls, *_ in everywhere if calls}
        _refuse_other_names(type(flow).__name__, ranks)
        names: dict[str, tuple[str, float, float]] = next((calls[0] for calls in ranks.values()), {})
        return Seen(
            two_values=any(two for _, _, two, _, _ in everywhere),
            draws_random=any(random for _, _, _, random, _ in everywhere),
            vocabulary_calls=max(of_rank for *_, of_rank in everywhere),
            metric_kinds={name: kind for name, (kind, _, _) in names.items()},
            over_tp=_differences(((dp, cp), calls) for (dp, cp, _), calls in ranks.items()),
            over_cp=_differences(((dp, tp), _bare(calls)) for (dp, _, tp), calls in ranks.items()),
        )


Calls = list[dict[str, tuple[str, float, float]]]


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _read(metric: Any) -> tuple[str, float, float]:
    if isinstance(metric, Total | Minimum | Maximum):
        return "total" if isinstance(metric, Total) else "extreme", _number(metric.value), 0.0
    if isinstance(metric, Difference):
        metric = (metric.first[0], metric.second[0])
    if isinstance(metric, tuple):
        return "pair", _number(metric[0]), _number(metric[1])
    return "number", _number(metric), 0.0


def _number(value: Any) -> float:
    tensor = torch.as_tensor(value).detach()
    return float(tensor) if tensor.numel() == 1 else math.nan  # the engine raises for it


def _bare(calls: Calls) -> Calls:
    return [{name: seen for name, seen in call.items() if seen[0] == "number"} for call in calls]


def _refuse_other_names(flow: str, ranks: Mapping[tuple[int, ...], Calls]) -> None:
    names = [sorted(call) for calls in ranks.values() for call in calls]
    other = next((names_of_call for names_of_call in names if names_of_call != names[0]), None)
    if other is not None:
        raise FlowError(
            f"{flow}.calculate_loss reports the metrics {names[0]} in one micro-batch and {other} in another; report "
            "the same names in every one, as a pair (0, 0) if there is no value"
        )


def _differences(groups: Iterable[tuple[Any, Calls]]) -> dict[str, str]:
    """Metric -> the first two different values that ranks of the same group report for one micro-batch."""
    first: dict[Any, Calls] = {}
    differences: dict[str, str] = {}
    for group, calls in groups:
        for values, first_values in zip(calls, first.setdefault(group, calls), strict=False):
            for name, (_, value, weight) in values.items():
                _, other, other_weight = first_values[name]
                if not (_same(value, other) and _same(weight, other_weight)):
                    differences.setdefault(name, f"{other:.4g} and {value:.4g}")
    return differences


def _same(value: float, other: float) -> bool:
    if not math.isfinite(value) or not math.isfinite(other):
        return value == other or (math.isnan(value) and math.isnan(other))
    return abs(value - other) <= SAME_METRIC * max(abs(value), abs(other), 1e-6)
