"""Functions that the tests of preference optimization, reward models, distillation and reference models run on each
rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from _started import refusal_of, started, train_until, weights_of

CONFIG = Path(__file__).parent / "layouts.yaml"
TRAIN, RATE, PARALLEL = "megatron_lm.train.common", "megatron_lm.train.learning-rate", "megatron_lm.model.parallel"
REFERENCE = "megatron_wrap.models.reference"
VOCAB, BATCH = 500, 4
COPY = (f"{REFERENCE}=copy",)
DPO = (
    "megatron_wrap.flow.__select__=gpt_dpo",
    f"{TRAIN}.global_batch_size={BATCH}",
    f"{TRAIN}.seq_length=40",
    f"{TRAIN}.train_iters=10",
    f"{RATE}.lr_decay_style=constant",
    f"{RATE}.lr_warmup_iters=0",
    "megatron_lm.train.optimizer.adam_beta2=0.999",
    "megatron_lm.train.optimizer.weight_decay=0.0",
)
SMALLER = (
    *(f"megatron_lm.model.arch.{key}" for key in ("hidden_size=32", "ffn_hidden_size=64", "num_layers=2")),
    f"{TRAIN}.seed=7",
)
"""Another architecture with other weights."""
REPORTED = ("loss", "grad_norm", "kl", "entropy")
REPORTED += tuple(f"rewards/{name}" for name in ("margins", "accuracies", "chosen", "rejected"))


def of_flow(flow: str, options: dict[str, Any]) -> tuple[str, ...]:
    """Overrides that select a flow with options."""
    selected = [override.replace("gpt_dpo", flow) for override in DPO]
    return (*selected, *(f"megatron_wrap.flow.{key}={value}" for key, value in options.items()))


def pairs(count: int = 40) -> list[dict[str, list[int]]]:
    """Tokenized pairs of unequal lengths."""
    generator = numpy.random.default_rng(5)

    def tokens(shortest: int, longest: int) -> list[int]:
        return generator.integers(3, VOCAB, int(generator.integers(shortest, longest))).tolist()

    return [
        {"prompt_ids": tokens(3, 15), "chosen_ids": tokens(2, 20), "rejected_ids": tokens(2, 20)} for _ in range(count)
    ]


def with_reference(of_pairs: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    """The pairs with outputs of a reference model."""
    return [
        {**pair, **{f"reference_{name}": value for name, value in outputs.items()}}
        for pair, outputs in zip(pairs(), of_pairs, strict=True)
    ]


def steps(
    overrides: Sequence[str], samples: Sequence[Any], until: int = 10, save_at: int | None = None
) -> list[dict[str, float]]:
    """Train to iteration `until`; all metrics of each step taken here."""
    with started(CONFIG, [*DPO, *overrides]) as wrap:
        return train_until(wrap, samples, until, (save_at,))


def train(
    overrides: Sequence[str], samples: Sequence[Any], until: int = 10, save_at: int | None = None
) -> list[dict[str, float]]:
    """The metrics of each step that do not depend on the machine and the layout."""
    taken = steps(overrides, samples, until, save_at)
    return [{name: metrics[name] for name in REPORTED if name in metrics} for metrics in taken]


def initial_weights(overrides: Sequence[str]) -> dict[str, numpy.ndarray]:
    """Unsharded weights before the first step."""
    with started(CONFIG, [*DPO, *overrides]) as wrap:
        return weights_of(wrap)


def outputs(overrides: Sequence[str], samples: Sequence[Any]) -> list[dict[str, float]]:
    """Outputs of `wrap.forward` for each sample."""
    with started(CONFIG, [*DPO, *overrides]) as wrap:
        return [{name: float(value) for name, value in output.items()} for output in wrap.forward(samples)]


def evaluation(overrides: Sequence[str], samples: Sequence[Any], until: int) -> dict[str, float]:
    """Metrics of an evaluation after some steps."""
    with started(CONFIG, [*DPO, *overrides]) as wrap:
        train_until(wrap, samples, until)
        return wrap.evaluate({"set": samples[:7]})


def refusal(overrides: Sequence[str], samples: Sequence[Any] = ()) -> str:
    """The message of the error that a run, or its first step, raises."""
    return refusal_of(train, overrides, samples, 1)


def export(
    folder: str | Path,
    overrides: Sequence[str] = (),
    samples: Sequence[Any] = (),
    single: Sequence[Any] = (),
    with_checkpoint: bool = False,
) -> list[float]:
    """Train one step on the samples, write the Hugging Face folder and a checkpoint, and return the scores of single
    sequences."""
    with started(CONFIG, [*DPO, *overrides]) as wrap:
        if samples:
            wrap.train(samples)
        wrap.save_pretrained(folder)
        if with_checkpoint:
            wrap.save()
        return [float(output["score"]) for output in wrap.forward(single)] if single else []


def complete(overrides: Sequence[str]) -> list[Any]:
    """Completions of a prompt."""
    with started(CONFIG, [*DPO, *overrides]) as wrap:
        return wrap.generate([[1, 2]])


def precompute(overrides: Sequence[str], samples: Sequence[Any], folder: str | Path) -> int:
    """Store the outputs of the reference model of a run."""
    from megatron_wrap.bridge.loading.hub import read_run
    from megatron_wrap.checkpoint.reference_config import precompute_config
    from megatron_wrap.core import MegatronWrap
    from megatron_wrap.evaluation.precompute import precompute as store

    config = read_run(CONFIG, [*DPO, *overrides])
    with MegatronWrap(precompute_config(config)) as wrap:
        wrap.initialize()
        wrap.setup_model()
        return store(wrap.state, [("here", sample) for sample in samples], folder, config.models.role, skip_bad=False)


def policy_and_reference(overrides: Sequence[str], samples: Sequence[Any], until: int) -> list[tuple[Any, Any]]:
    """(policy, reference) before the first step and after each: all parameters of one rank in one vector, fp32; of a
    reference with an average that."""

    def vector(tensors: Any) -> numpy.ndarray:
        return numpy.concatenate([tensor.detach().float().flatten().numpy() for tensor in tensors])

    taken = []
    with started(CONFIG, [*DPO, *overrides]) as wrap:
        policy, reference = wrap.state.chunks[0], wrap.state.reference
        for iteration in range(until + 1):
            train_until(wrap, samples, iteration)
            taken.append((vector(policy.parameters()), vector(reference.average or reference.parameters)))
    return taken


def train_on_own_data(overrides: Sequence[str]) -> None:
    """An epoch of the run's own data."""
    with started(CONFIG, [*DPO, *overrides]) as wrap:
        for batch in wrap.batches():
            wrap.train(batch)
