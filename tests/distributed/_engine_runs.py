"""Functions that the engine tests run on each rank, and the same results from plain torch, without the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import _started
import numpy
import torch
from _checkpoint_runs import state_digest
from _started import gradients_of, weights_of
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

CONFIG = Path(__file__).parent / "layouts.yaml"
VOCAB, BATCH, LONGEST = 500, 8, 48
TRAIN, PARALLEL = "megatron_lm.train.common", "megatron_lm.model.parallel"
PATHS = {
    "tp": f"{PARALLEL}.tensor_model_parallel_size",
    "pp": f"{PARALLEL}.pipeline_model_parallel_size",
    "cp": f"{PARALLEL}.context_parallel_size",
    "sp": f"{PARALLEL}.sequence_parallel",
    "layers_per_chunk": f"{PARALLEL}.num_layers_per_virtual_pipeline_stage",
    "micro": f"{TRAIN}.micro_batch_size",
    "distributed": "megatron_lm.train.optimizer.use_distributed_optimizer",
    "tied": "megatron_lm.model.arch.untie_embeddings_and_output_weights",
}


def options(flow: str = "", **settings: Any) -> tuple[str, ...]:
    """Overrides of layouts.yaml by short names; `flow` is a class of `_engine_flows`."""
    if "tied" in settings:
        settings["tied"] = not settings["tied"]
    values = [f"{PATHS.get(name, name)}={str(value).lower()}" for name, value in settings.items()]
    return (*values, *([f"megatron_wrap.flow.flow_key=_engine_flows:{flow}"] if flow else []))


def started(overrides: Sequence[str], folder: str | Path | None = None) -> AbstractContextManager[Any]:
    """A run that is ready to train; its records are written to `folder`."""
    records = [] if folder is None else [f"megatron_wrap.logger.output_dir={folder}"]
    return _started.started(CONFIG, [*overrides, *records])


# ---- samples ----


def weighted_samples(count: int = BATCH, seed: int = 5) -> list[dict[str, Any]]:
    """Tokenized samples of unequal lengths and weights; the third has no loss token."""
    generator = numpy.random.default_rng(seed)
    samples = []
    for index in range(count):
        length = int(generator.integers(LONGEST // 4, LONGEST + 2))
        mask = (generator.random(length) < 0.6).astype(int)
        ids = generator.integers(0, VOCAB, length).tolist()
        weight = float(generator.uniform(0.2, 2.0))
        samples.append({"input_ids": ids, "loss_mask": (mask * (index != 2)).tolist(), "weight": weight})
    return samples


def pairs(count: int = BATCH, seed: int = 6) -> list[dict[str, list[int]]]:
    """Chosen and rejected sequences of unequal lengths."""
    generator = numpy.random.default_rng(seed)
    lengths = generator.integers(LONGEST // 3, LONGEST + 1, (count, 2))
    return [
        {"chosen": generator.integers(0, VOCAB, a).tolist(), "rejected": generator.integers(0, VOCAB, b).tolist()}
        for a, b in lengths
    ]


# ---- on ranks ----


def step(overrides: Sequence[str], samples: Sequence[Any], folder: str | Path | None = None) -> dict[str, Any]:
    """Unsharded gradients of one step as numpy arrays by their global names, and the step's metrics."""
    with started(overrides, folder) as wrap:
        return {"gradients": gradients_of(wrap, samples), "metrics": wrap.train(samples)}


def evaluate_and_forward(overrides: Sequence[str], samples: Sequence[Any], sizes: Sequence[int]) -> dict[str, Any]:
    """Evaluations of the first `sizes` samples, passed by rank 0 only; outputs of all samples; and whether the state is
    unchanged; on this rank."""
    with started(overrides) as wrap:
        before = state_digest(wrap)
        mine = samples if torch.distributed.get_rank() == 0 else None
        evaluations = [wrap.evaluate({"set": mine and mine[:size]}) for size in sizes]
        outputs = [{name: rows.numpy() for name, rows in sample.items()} for sample in wrap.forward(mine)]
        unchanged = state_digest(wrap) == before and wrap.iteration == wrap.consumed_samples == 0
        training_mode = all(module.training for chunk in wrap.state.chunks for module in chunk.modules())
    return {"evaluations": evaluations, "outputs": outputs, "unchanged": unchanged and training_mode}


def evaluation(overrides: Sequence[str], samples: Sequence[Any]) -> dict[str, float]:
    """Metrics of an evaluation."""
    with started(overrides) as wrap:
        return wrap.evaluate({"set": samples})


def skip(overrides: Sequence[str], empty: Sequence[Any], samples: Sequence[Any]) -> dict[str, Any]:
    """A step without any loss weight, then a normal one; metrics of both, and whether each changed the state."""
    with started(overrides) as wrap:
        before = state_digest(wrap)
        first = wrap.train(empty)
        unchanged = state_digest(wrap) == before
        second = wrap.train(samples)
        return {"first": first, "second": second, "unchanged": unchanged, "changed": state_digest(wrap) != before}


def pass_on_rank_0(overrides: Sequence[str], samples: Sequence[Any]) -> dict[str, Any]:
    """Metrics of a step whose batch only rank 0 passes, and the messages of wrong calls."""
    from megatron_wrap.errors import DataError

    first = torch.distributed.get_rank() == 0
    messages = []

    def refused(wrap: Any, batch: Sequence[Any] | None) -> None:
        try:
            wrap.train(batch)
        except DataError as error:
            messages.append(str(error))

    with started(overrides) as wrap:
        refused(wrap, None if first else samples)
        metrics = wrap.train(samples if first else None)
        refused(wrap, samples[:-1] if first else None)
        refused(wrap, None if first else samples)
        wrap.train(samples if first else None)
        return {"metrics": metrics, "messages": messages, "iteration": wrap.iteration}


def norms(overrides: Sequence[str], samples: Sequence[Any]) -> dict[str, Any]:
    """params_norm and num_zeros_in_grad as reported, and by torch on the gathered weights and gradients."""
    enabled = [f"megatron_wrap.logger.add_{name}_to_metrics=true" for name in ("params_norm", "num_zeros_in_grad")]
    with started([*overrides, *enabled]) as wrap:
        zeros = sum(int((gradient == 0).sum()) for gradient in gradients_of(wrap, samples).values())
        metrics = wrap.train(samples)
        weights = numpy.concatenate([weight.ravel().astype(numpy.float64) for weight in weights_of(wrap).values()])
    return {"metrics": metrics, "norm": float(numpy.linalg.norm(weights)), "zeros": zeros}


def everything(wrap: Any) -> str:
    """A hash of all state that a step may change on this rank: weights, buffers, optimizer states and groups, schedule,
    loss scale and counters."""
    state = wrap.state
    digest = hashlib.sha256(state_digest(wrap).encode())
    digest.update(repr((state.progress, state.lr_scheduler.state_dict())).encode())
    for chunk in state.chunks:
        for name, buffer in chunk.named_buffers():
            digest.update(name.encode() + buffer.detach().float().numpy().tobytes())
    for part in state.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            digest.update(repr({key: value for key, value in group.items() if key != "params"}).encode())
            for parameter in group["params"]:  # fp32 shards in half precision
                digest.update(parameter.detach().float().numpy().tobytes())
        scaler = getattr(part, "grad_scaler", None)
        digest.update(repr(scaler and {name: float(value) for name, value in scaler.state_dict().items()}).encode())
    return digest.hexdigest()


def poisoned(overrides: Sequence[str], samples: Sequence[Any], kinds: Sequence[str]) -> dict[str, Any]:
    """A step, one for each kind of poison, and another step; then the same without the poisoned ones. Returns the
    errors of the poisoned steps, whether each left the state unchanged, and whether both runs end bit for bit equal."""
    half = len(samples) // 2
    errors, unchanged, ends = [], [], []
    for steps in (kinds, ()):
        with started(overrides) as wrap:
            metrics = [wrap.train(samples[:half])]
            for kind in steps:
                before = everything(wrap)
                try:
                    metrics.append(wrap.train([{**samples[0], "poison": kind}, *samples[1:half]]))
                    errors.append("no error")
                except Exception as error:
                    errors.append(f"{type(error).__name__}: {error}")
                unchanged.append(everything(wrap) == before)
            metrics.append(wrap.train(samples[half:]))
            ends.append((everything(wrap), [(step["loss"], step["grad_norm"], step["loss_scale"]) for step in metrics]))
    return {"errors": errors, "unchanged": unchanged, "equal": ends[0] == ends[1], "metrics": metrics}


# ---- plain torch ----


def plain_log_probs(samples: Sequence[Any]) -> list[Any]:
    """Log-probability of each token but the first, for one sample at a time."""
    with started(()) as wrap, torch.no_grad():
        model = wrap.state.chunks[0].module
        rows = []
        for sample in samples:
            ids = torch.tensor([sample["input_ids"]])
            scores = model(ids[:, :-1], torch.arange(ids.shape[1] - 1)[None], None)[..., :VOCAB].log_softmax(dim=-1)
            rows.append(scores.gather(2, ids[:, 1:, None])[0, :, 0].numpy())
        return rows


def plain_torch(objective: str, samples: Sequence[Any], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """One of the objectives below and its gradient by torch.autograd on the model's logits: one sequence at a time,
    without padding, the engine's schedule and reductions, and `megatron_wrap.ops`."""
    from megatron_wrap.model.initial_weights import global_names

    with started(overrides) as wrap:
        state = wrap.state
        model = state.chunks[0].module
        tied = not state.config.arch.untie_embeddings_and_output_weights
        named = {parameter.name: parameter.tensor for parameter in global_names(model, tied)}

        def logits(ids: Sequence[int]) -> Tensor:
            tokens = torch.tensor([list(ids)])
            return model(tokens, torch.arange(tokens.shape[1])[None], None)[0, :, :VOCAB]

        values = OBJECTIVES[objective](logits, samples)
        gradients = torch.autograd.grad(values["loss"], list(named.values()))
    rows = {name: VOCAB if name.startswith(("embedding.word_embeddings", "output_layer")) else None for name in named}
    return {
        "gradients": {name: g[: rows[name]].numpy() for name, g in zip(named, gradients, strict=True)},
        "metrics": {name: float(value) for name, value in values.items()},
    }


def token_losses(logits: Callable[[Sequence[int]], Tensor], ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each token but the first, and its logits."""
    scores = logits(ids[:-1])
    return cross_entropy(scores, torch.tensor(list(ids[1:])), reduction="none"), scores


def two_terms(logits: Callable[[Sequence[int]], Tensor], samples: Sequence[Any]) -> dict[str, Any]:
    """The objective of `_engine_flows.TwoTerms`."""
    ce, weight, z, tokens = torch.zeros(()), 0.0, torch.zeros(()), 0
    for sample in samples:
        losses, scores = token_losses(logits, sample["input_ids"])
        mask = torch.tensor(sample["loss_mask"][1:]) * sample["weight"]
        ce, weight = ce + (losses * mask).sum(), weight + float(mask.sum())
        z, tokens = z + (scores.amax(dim=1) ** 2).sum(), tokens + len(losses)
    return {"loss": ce / weight + 0.03 * z / tokens, "z_mean": z / tokens, "tokens_seen": tokens}


def whole_pairs(logits: Callable[[Sequence[int]], Tensor], samples: Sequence[Any]) -> dict[str, Any]:
    """The objective of `_engine_flows.Pairs`."""
    margins = torch.stack(
        [token_losses(logits, s["rejected"])[0].sum() - token_losses(logits, s["chosen"])[0].sum() for s in samples]
    )
    wins = (margins > 0).sum()
    return {
        "loss": -logsigmoid(0.2 * margins).mean(),
        "accuracy": wins / len(samples),
        "margin": margins.mean(),
        "wins": wins,
    }


def mean_of_means(logits: Callable[[Sequence[int]], Tensor], samples: Sequence[Any]) -> dict[str, Any]:
    """The objective of `_engine_flows.PairsTwoValues`, for micro-batches with the same number of pairs."""
    values = whole_pairs(logits, samples)
    return {name: values[name] for name in ("loss", "margin")}


OBJECTIVES = {"TwoTerms": two_terms, "Pairs": whole_pairs, "PairsTwoValues": mean_of_means}
