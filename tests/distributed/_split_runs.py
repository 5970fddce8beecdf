"""Functions that the tests of a step in parts run on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from _engine_runs import everything, started
from _started import refusal_of, weights_of


def parts_of(samples: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """The samples in parts of these sizes."""
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [list(samples[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def whole_and_parts(overrides: Sequence[str], samples: Sequence[Any], sizes: Sequence[int]) -> dict[str, Any]:
    """Two steps by `train`, and the same in parts; of each run the metrics, a hash of the state and the weights."""
    actual: dict[str, Any] = {}
    for kind in ("whole", "parts"):
        with started(overrides) as wrap:
            metrics, size = [], wrap.global_batch_size
            for start in (0, size):
                batch = samples[start : start + size]
                if kind == "whole":
                    metrics.append(wrap.train(batch))
                    continue
                parts = parts_of(batch, sizes)
                step_weights = wrap.count_weights(parts)
                for part in parts:
                    wrap.forward_backward(part, step_weights=step_weights)
                metrics.append(wrap.optimizer_step())
            actual[kind] = {"metrics": metrics, "state": everything(wrap), "weights": weights_of(wrap)}
    return actual


def wrong_calls(overrides: Sequence[str], samples: Sequence[Any]) -> dict[str, Any]:
    """The messages of calls in a wrong order or with wrong arguments, whether they left the state unchanged, and
    whether the step that begins again is that of `train`."""
    size = len(samples) // 2
    halves = [samples[:size], samples[size:]]
    messages: dict[str, str] = {}

    def refused(name: str, call: Any) -> None:
        messages[name] = refusal_of(call)

    with started(overrides) as wrap:
        before = everything(wrap)
        refused("nothing", wrap.optimizer_step)
        refused("size", lambda: wrap.count_weights([halves[0]]))
        refused("unit", lambda: wrap.count_weights([samples[:1], samples[1:]]))
        refused("weights", lambda: wrap.forward_backward(halves[0], step_weights={"": 1.0}))
        counted = wrap.count_weights(halves)
        refused("part", lambda: wrap.forward_backward(samples, step_weights=counted))
        wrap.forward_backward(halves[0], step_weights=counted)
        refused("train", lambda: wrap.train(samples))
        refused("missing", wrap.optimizer_step)
        refused("another", lambda: wrap.forward_backward(halves[1], step_weights=wrap.count_weights(halves)))
        unchanged = everything(wrap) == before
        for half in halves:
            wrap.forward_backward(half, step_weights=counted)
        last = wrap.optimizer_step()
        refused("late", lambda: wrap.forward_backward(halves[0], step_weights=counted))
    with started(overrides) as wrap:
        expected = wrap.train(samples)
    same = all(last[name] == expected[name] for name in ("loss", "grad_norm"))
    return {"messages": messages, "unchanged": unchanged, "same": same}
