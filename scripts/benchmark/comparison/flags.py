"""Flags of a bare Megatron-Core loop, and the search for its fastest ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from comparison.task import Task
from megatron_wrap.errors import ConfigError


@dataclass(frozen=True)
class Flags:
    """Settings that a user of Megatron-Core chooses for speed."""

    implementation: str
    """Implementation of the layers: "transformer_engine" or "local"."""
    cross_entropy: str = "unfused"
    """Cross-entropy: "unfused", "native" (Megatron-Core's fused one) or "te" (Transformer Engine's)."""
    rope_fusion: bool = False
    swiglu_fusion: bool = True
    weight_gradient_fusion: bool = False
    """Whether weight gradients are accumulated within the matmul."""
    collect_garbage: bool = True
    """Whether Python's garbage collector stays on."""
    overlap: bool = False
    """Whether the reduction of gradients and the gathering of parameters overlap with computation."""
    expert_fusion: bool = False
    """Whether Transformer Engine's fused router and permutation are used."""
    user_buffers: bool = False
    """Whether tensor parallelism's communication overlaps with matmuls (tp_comm_overlap)."""
    more_on_first_stage: int = 0
    """Number of layers that the first of two pipeline stages has beyond half of all layers."""

    def text(self) -> str:
        """Description of the flags for the report."""
        parts = [
            "Transformer Engine" if self.implementation == "transformer_engine" else "local layers",
            f"{self.cross_entropy} cross-entropy",
            *(["fused rotary embedding"] if self.rope_fusion else []),
            *(["fused SwiGLU"] if self.swiglu_fusion else []),
            *(["fused weight gradients"] if self.weight_gradient_fusion else []),
            *(["overlapped communication"] if self.overlap else []),
            *(["fused router and permutation"] if self.expert_fusion else []),
            *(["user buffers"] if self.user_buffers else []),
            *([f"{self.more_on_first_stage} layers more on the first stage"] if self.more_on_first_stage else []),
            *([] if self.collect_garbage else ["garbage collection off"]),
        ]
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Values of the fields by name."""
        return asdict(self)


def default_flags(platform: str) -> Flags:
    """Megatron-LM's defaults (megatron/training/arguments.py), without extensions that are not installed: Transformer
    Engine, fused rotary embedding and SwiGLU, unfused cross-entropy, and Apex's fused weight gradients."""
    if platform == "cpu" or importlib.util.find_spec("transformer_engine") is None:
        return Flags("local")
    return Flags("transformer_engine", rope_fusion=True, weight_gradient_fusion=_has_apex_extension())


def _has_apex_extension() -> bool:
    return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


_LONGEST_LOCAL = 2048
"""Longest sequence in tokens for which Megatron-Core's local layers are worth a trial: their attention stores all
scores."""


def changes(start: Flags, task: Task) -> list[tuple[str, dict[str, Any]]]:
    """(name, fields) of each single change that a search from `start` tries, the most important ones first."""
    with_te = start.implementation == "transformer_engine"
    candidates: list[tuple[str, dict[str, Any]]] = [("native fused cross-entropy", {"cross_entropy": "native"})]
    if with_te:
        candidates.append(("Transformer Engine's cross-entropy", {"cross_entropy": "te"}))
    if with_te and task.num_experts:
        candidates.append(("fused router and permutation", {"expert_fusion": True}))
    if with_te and task.tensor_parallel > 1:
        candidates.append(("user buffers", {"user_buffers": True}))
    if task.pipeline_parallel == 2 and task.virtual_stages == 1:
        counts = [count for count in (1, 2, 3) if count < task.num_layers // 2]
        candidates += [(f"{count} more on the first stage", {"more_on_first_stage": count}) for count in counts]
    if task.num_replicas * task.context_parallel > 1:
        candidates.append(("overlapped communication", {"overlap": True}))
    candidates.append(("garbage collection off", {"collect_garbage": False}))
    candidates.append(("unfused SwiGLU", {"swiglu_fusion": False}))
    if with_te:
        candidates.append(("unfused rotary embedding", {"rope_fusion": False}))
    if task.platform == "cuda":
        candidates.append(("fused weight gradients", {"weight_gradient_fusion": not start.weight_gradient_fusion}))
    if with_te and task.seq_length <= _LONGEST_LOCAL:
        candidates.append(("local layers", {"implementation": "local", "rope_fusion": False}))
    return candidates


def changed(start: Flags, names: list[str], task: Task) -> Flags:
    """`start` with the changes of these names.

    Raises:
        ConfigError: a name in `changes` is unknown.
    """
    known = dict(changes(start, task))
    fields: dict[str, Any] = {}
    for name in names:
        if name not in known:
            raise ConfigError(f"{name!r} is no change of these flags; they are {', '.join(map(repr, known))}")
        fields |= known[name]
    return replace(start, **fields)


def fastest(
    start: Flags, alternatives: list[tuple[str, dict[str, Any]]], measure: Callable[[str, Flags], float | str]
) -> tuple[Flags, list[dict[str, Any]]]:
    """Search greedily: each change is tried on the fastest flags so far, and kept if it is faster.

    Args:
        measure: function of a name and flags; returns the median seconds of a step, or why there are none.

    Returns:
        The fastest flags, and a record of every trial.

    Raises:
        RuntimeError: `start` itself could not be measured.
    """
    best_seconds = measure("starting flags", start)
    records = [_record("starting flags", start, best_seconds)]
    if isinstance(best_seconds, str):
        raise RuntimeError(f"the bare loop did not run: {best_seconds}")
    best = start
    for name, fields in alternatives:
        tried = replace(best, **fields)
        seconds = measure(name, tried)
        records.append(_record(name, tried, seconds))
        if not isinstance(seconds, str) and seconds < best_seconds:
            best, best_seconds = tried, seconds
    return best, records


def _record(name: str, flags: Flags, seconds: float | str) -> dict[str, Any]:
    measured = {"error": seconds} if isinstance(seconds, str) else {"step_seconds": seconds}
    return {"change": name, "flags": flags.as_json(), **measured}
