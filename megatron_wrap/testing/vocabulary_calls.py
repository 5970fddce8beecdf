"""Finds where a flow's loss calls a torch function over the vocabulary of vocabulary-parallel logits."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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
