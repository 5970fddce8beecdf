"""Functions that the tests of non-finite steps run on each rank: values that become nan in one place of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import _engine_runs as runs
import torch
from torch import Tensor

MARK, BAD = 499, 5
"""Token that only the bad sample has, and the index of this sample in its batch."""
MODULE, PARAMETER = "decoder.layers.2.mlp.linear_fc2", "decoder.layers.3.self_attention.linear_qkv.weight"
POISONS = ("loss", "gradient")
"""Kinds that the flow `_engine_flows.Poisoned` does itself."""


def samples(count: int = 2 * runs.BATCH) -> list[dict[str, Any]]:
    """`weighted_samples` without MARK."""
    return [
        {**sample, "input_ids": [min(token, MARK - 1) for token in sample["input_ids"]]}
        for sample in runs.weighted_samples(count)
    ]


def bad_batch(kind: str) -> list[dict[str, Any]]:
    """A batch in which the sample BAD has the mark, or the poison of the flow."""
    batch = samples()[: runs.BATCH]
    ids = batch[BAD]["input_ids"]
    changed = {"poison": kind} if kind in POISONS else {"input_ids": [*ids[:3], MARK, *ids[4:]]}
    batch[BAD] = {**batch[BAD], **changed, "loss_mask": [1] * len(ids)}
    return batch


class _NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * float("nan")


@contextmanager
def injected(wrap: Any, kind: str) -> Iterator[None]:
    """A step makes nan in one place. activation: MODULE's output in a micro-batch with MARK. backward: the same of its
    backward pass. weight: one value of PARAMETER. once: as activation, the first time only."""
    from megatron_wrap.model.chunks import bare_model
    from megatron_wrap.model.initial_weights import global_names
    from megatron_wrap.model.module_names import global_module_names

    handles, marked, left = [], [False], [1 if kind == "once" else 10**6]

    def see(module: Any, arguments: Any, keywords: Any) -> None:
        marked[0] = bool((keywords["input_ids"] == MARK).any())

    def spoil(module: Any, arguments: Any, output: Any) -> Any:
        if not marked[0] or not left[0]:
            return output
        left[0] -= 1
        first = output[0] if isinstance(output, tuple) else output
        spoiled = _NanBackward.apply(first) if kind == "backward" else first * float("nan")
        return (spoiled, *output[1:]) if isinstance(output, tuple) else spoiled

    with torch.no_grad():
        for model in map(bare_model, wrap.state.chunks):
            if kind == "weight":
                for named in global_names(model, tied=False):
                    if named.name == PARAMETER:
                        named.tensor.flatten()[7] = float("nan")
            elif kind not in POISONS:
                handles.append(model.register_forward_pre_hook(see, with_kwargs=True))
                found = [module for module, name in global_module_names(model).items() if name == MODULE]
                handles += [module.register_forward_hook(spoil) for module in found]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def refused(overrides: Sequence[str], kinds: Sequence[str]) -> dict[str, list[Any]]:
    """For each kind, the error of a step with it after a good step, and whether the state is as before it."""
    errors, unchanged = [], []
    with runs.started((*runs.options("Poisoned"), *overrides)) as wrap:
        wrap.train(samples()[: runs.BATCH])
        for kind in kinds:
            before = runs.everything(wrap)
            with injected(wrap, kind):
                try:
                    wrap.train(bad_batch(kind))
                    errors.append("no error")
                except Exception as error:
                    errors.append(f"{type(error).__name__}: {error}")
            unchanged.append(runs.everything(wrap) == before)
    return {"errors": errors, "unchanged": unchanged}
