"""Functions that the tests of non-finite steps run on each rank: values that become nan, or inf, in one tensor of a
step."""

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
POISONS = ("loss", "gradient", "spike")
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


class _BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: float) -> Tensor:
        ctx.value = value
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.value, None


@contextmanager
def injected(wrap: Any, kind: str) -> Iterator[None]:
    """A step makes nan in one tensor, or inf with "activation inf". activation: MODULE's output in a micro-batch with
    MARK. backward: the same of its backward pass. weight: one value of PARAMETER. once: as activation, the first time
    only."""
    from megatron_wrap.model.chunks import bare_model
    from megatron_wrap.model.initial_weights import global_module_names, global_names

    kind, _, text = kind.partition(" ")
    handles, marked, left, value = [], [False], [1 if kind == "once" else 10**6], float(text or "nan")

    def see(module: Any, arguments: Any, keywords: Any) -> None:
        marked[0] = bool((keywords["input_ids"] == MARK).any())

    def spoil(module: Any, arguments: Any, output: Any) -> Any:
        if not marked[0] or not left[0]:
            return output
        left[0] -= 1
        first = output[0] if isinstance(output, tuple) else output
        spoiled = _BadBackward.apply(first, value) if kind == "backward" else first * value
        return (spoiled, *output[1:]) if isinstance(output, tuple) else spoiled

    with torch.no_grad():
        for model in map(bare_model, wrap.state.chunks):
            if kind == "weight":
                for named in global_names(model, tied=False):
                    if named.name == PARAMETER:
                        named.tensor.flatten()[7] = value
            elif kind not in POISONS:
                handles.append(model.register_forward_pre_hook(see, with_kwargs=True))
                modules = [module for module, name in global_module_names(model).items() if name == MODULE]
                handles += [module.register_forward_hook(spoil) for module in modules]
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


def skipped(overrides: Sequence[str], kinds: Sequence[str]) -> dict[str, Any]:
    """A good step, skipped ones of each kind, and a good step; and the same with batches without a trained token
    instead of the skipped ones. The metrics, and whether weights, buffers and optimizer are equal at both ends."""
    batch = samples()
    untrained = [{**sample, "loss_mask": [0] * len(sample["loss_mask"])} for sample in batch[: runs.BATCH]]
    metrics, ends = [], []
    keys = (*runs.options("Poisoned"), "megatron_wrap.bad_steps.on_bad_step=skip")
    for with_bad_steps in (True, False):
        with runs.started((*keys, *overrides)) as wrap:
            steps = [wrap.train(batch[: runs.BATCH])]
            for kind in kinds:
                with injected(wrap, kind if with_bad_steps else "loss"):
                    steps.append(wrap.train(bad_batch(kind) if with_bad_steps else untrained))
            steps.append(wrap.train(batch[runs.BATCH :]))
            wrap.state.progress.bad_steps = wrap.state.progress.consumed_tokens = 0
            ends.append((runs.everything(wrap), steps[-1]["loss"], steps[-1]["grad_norm"]))
        metrics.append(steps)
    return {"metrics": metrics[0], "equal": ends[0] == ends[1]}


def rolled_back(overrides: Sequence[str], folder: str, names: Sequence[str]) -> dict[str, Any]:
    """Runs of 8 steps with a checkpoint every 4. whole: with a bad sample in step 6. resumed: as whole, but it ends
    after step 6 and is resumed. without: without the samples of the bad batch. The iteration after each step, what is
    counted and the end of each."""
    plain = samples(8 * runs.BATCH)
    spoiled = [*plain[: 5 * runs.BATCH], *bad_batch("gradient"), *plain[5 * runs.BATCH :]]
    common = (*runs.options("Poisoned"), *overrides, "megatron_wrap.data.shuffle=false")
    results: dict[str, Any] = {}
    for name in names:
        steps: list[float] = []
        for limit in (6, 8) if name == "resumed" else (8,):
            save = f"{folder}/{name}"
            keys = (
                *("megatron_wrap.bad_steps.on_bad_step=rollback", "megatron_lm.train.common.save_interval=4"),
                *(f"megatron_lm.train.common.save={save}", f"megatron_wrap.logger.output_dir={save}/records"),
            )
            with runs.started((*common, *keys)) as wrap:
                for batch in wrap.batches(plain if name == "without" else spoiled):
                    steps.append(wrap.train(batch)["iteration"])
                    wrap.log_last_metrics()
                    if wrap.iteration == limit:
                        break
                wrap.save()
                progress = wrap.state.progress
                counts = (progress.bad_steps, progress.rollbacks, list(progress.left_out))
                progress.bad_steps, progress.rollbacks = 0, 0
                progress.left_out, progress.data = [], {}
                results[name] = {"steps": steps, "counts": counts, "end": runs.everything(wrap)}
    return results


def in_a_row(overrides: Sequence[str], kinds: Sequence[str]) -> list[str]:
    """What becomes of steps of these kinds, "" a good one: the number of bad steps so far, or the error."""
    results = []
    with runs.started((*runs.options("Poisoned"), *overrides)) as wrap:
        for kind in kinds:
            try:
                step = wrap.train(bad_batch(kind) if kind else samples()[: runs.BATCH])
                results.append(f"{step['bad_steps']:.0f} of {step['iteration']:.0f}")
            except Exception as error:
                results.append(f"{type(error).__name__}: {error}")
    return results


def refused_in_parts(overrides: Sequence[str]) -> str:
    """The error of a step in two parts whose second part has the bad sample."""
    batch = bad_batch("loss")
    parts = [batch[: runs.BATCH // 2], batch[runs.BATCH // 2 :]]
    with runs.started((*runs.options("Poisoned"), *overrides)) as wrap:
        weights = wrap.count_weights(parts)
        for part in parts:
            wrap.forward_backward(part, step_weights=weights)
        try:
            wrap.optimizer_step()
        except Exception as error:
            return str(error)
    return "no error"


def differing_copies(overrides: Sequence[str], name: str) -> tuple[float, str]:
    """The loss of a good step with equal copies, and the error of a step after one bit of a parameter of rank 1 has
    changed."""
    import torch.distributed as dist

    from megatron_wrap.model.chunks import bare_model
    from megatron_wrap.model.initial_weights import global_names

    key = "megatron_lm.train.common.check_weight_hash_across_dp_replicas_interval=1"
    with runs.started((*runs.options("Poisoned"), *overrides, key)) as wrap:
        loss = wrap.train(samples()[: runs.BATCH])["loss"]
        for model in map(bare_model, wrap.state.chunks):
            for named in global_names(model, tied=False):
                if named.name == name and dist.get_rank() == 1:
                    named.of(named.tensor.data).view(-1).view(torch.uint8)[5] ^= 4
        try:
            wrap.train(samples()[runs.BATCH : 2 * runs.BATCH])
        except Exception as error:
            return loss, f"{type(error).__name__}: {error}"
    return loss, "no error"
