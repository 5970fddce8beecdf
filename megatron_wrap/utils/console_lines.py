"""The console's lines about steps and evaluations: selection, order and format of the metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from megatron_wrap.metrics.declared import (
    CONSOLE_DISPENSABLE,
    ENGINE_METRICS,
    console_order,
    console_text,
)
from megatron_wrap.metrics.number_format import short
from megatron_wrap.nearest_names import did_you_mean

MAX_LENGTH = 140
"""Largest number of characters of a line, without the 23 of time and level."""


class ConsoleLines:
    """Selects and formats the metrics that the console shows; the metric loggers get all.

    Args:
        train_iters: number of steps of the run, shown after the iteration; None: it is not known.
        chosen: patterns of `megatron_wrap.logger.console_metrics`: each line has the matching metrics, in this order.
            None: a line has the loss, the flow's metrics that match `of_flow`, unless they have been 0 in the whole
            run, and the engine's; of a line longer than `MAX_LENGTH` the last ones are omitted.
        of_flow: patterns of the flow's metrics, the most interesting ones first.
    """

    def __init__(
        self, train_iters: int | None = None, chosen: Sequence[str] | None = None, of_flow: Sequence[str] = ("*",)
    ) -> None:
        self._train_iters, self._chosen, self._of_flow = train_iters, chosen, of_flow
        self._changing: set[str] = set()
        """Names of metrics that have had a value other than 0."""

    def step(self, metrics: Mapping[str, float], is_trained: bool = True) -> str:
        """One line with the metrics of a step, such as
        `iteration 12/100 | loss 5.1234 | grad_norm 1.02 | lr 3.0e-4 | 512 ms | 12.3k tokens/s`.

        Args:
            is_trained: False: no token of the step had a loss, so means over such tokens are nan; the line contains `no
                token trained` instead.
        """
        if not is_trained:
            known = {name: value for name, value in metrics.items() if not math.isnan(value)}
            iteration, *rest = self.step(known).split(" | ")
            return " | ".join([iteration, "no token trained", *rest])
        if self._chosen is not None:
            return self._line(metrics, _matching(self._chosen, metrics))
        names = self._worth_showing(metrics)
        flow = _matching(self._of_flow, [name for name in names if name not in ENGINE_METRICS])
        engine = [name for name in names if name in ENGINE_METRICS]
        shown = console_order([*flow, *engine])
        dispensable = [name for name in CONSOLE_DISPENSABLE if name in engine] + flow[::-1]
        while len(line := self._line(metrics, shown)) > MAX_LENGTH and dispensable:
            shown.remove(dispensable.pop(0))
        return line

    def evaluation(self, iteration: int, metrics: Mapping[str, float]) -> list[str]:
        """A line for each evaluation set, such as `iteration 20/100 | eval validation | loss 4.5 | perplexity 90.02`.

        Args:
            iteration: steps taken before the evaluation.
            metrics: `eval/SET/METRIC` of all sets.
        """
        of_sets: dict[str, dict[str, str]] = {}
        for name in metrics:
            _, evaluation_set, metric = name.split("/", 2)
            of_sets.setdefault(evaluation_set, {})[metric] = name
        return [
            self._line({"iteration": iteration, **metrics}, self._of_evaluation(metrics, names), f"eval {name}")
            for name, names in of_sets.items()
        ]

    def _of_evaluation(self, metrics: Mapping[str, float], names: Mapping[str, str]) -> list[str]:
        """The full names to show, for a set whose metrics have the full names `names`."""
        if self._chosen is not None:
            return [names[name] for name in _matching(self._chosen, names) or ["loss"]]
        worth_showing = self._worth_showing(metrics)
        first = [name for name in ("loss", "perplexity") if name in names]
        of_flow = _matching(self._of_flow, [name for name in names if name not in first])
        return [names[name] for name in [*first, *of_flow] if name in first or names[name] in worth_showing]

    def _worth_showing(self, metrics: Mapping[str, float]) -> list[str]:
        self._changing |= {name for name, value in metrics.items() if value != 0}
        return [name for name in metrics if name in ENGINE_METRICS or name in self._changing]

    def _line(self, metrics: Mapping[str, float], names: Iterable[str], head: str = "") -> str:
        total = "" if self._train_iters is None else f"/{self._train_iters}"
        parts = [f"{console_text('iteration', metrics['iteration'])}{total}"] if "iteration" in metrics else []
        parts += [head] if head else []
        for name in names:
            text = console_text(name, metrics[name])
            if text is None and self._chosen is not None:
                text = f"{name} {short(metrics[name], digits=4)}"
            if text is not None and name != "iteration":
                parts.append(text)
        return " | ".join(parts)

    def unmatched(self, metrics: Iterable[str]) -> list[str]:
        """A warning for each chosen pattern that matches none of these metrics of a step."""
        names = [*metrics, "perplexity"]
        return [
            f"megatron_wrap.logger.console_metrics: no metric matches {pattern}{did_you_mean(pattern, names)}"
            for pattern in self._chosen or ()
            if not _matching([pattern], names)
        ]


def _matching(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """The names that match a pattern, in the order of the patterns, each once."""
    candidates = list(names)
    return list(dict.fromkeys(name for pattern in patterns for name in candidates if fnmatchcase(name, pattern)))
