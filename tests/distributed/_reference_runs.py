"""Functions that the tests of reference models run on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _dpo_runs as runs
import numpy
from _started import started

REFERENCE = "megatron_wrap.models.reference"
SMALLER = (
    *(f"megatron_lm.model.arch.{key}" for key in ("hidden_size=32", "ffn_hidden_size=64", "num_layers=2")),
    "megatron_lm.train.common.seed=7",
)
"""Another architecture with other weights."""


def export(folder: str | Path, overrides: Sequence[str] = (), with_checkpoint: bool = False) -> None:
    """A Hugging Face folder of a run's first weights, and a checkpoint of them."""
    with started(runs.CONFIG, [*runs.DPO, *overrides]) as wrap:
        wrap.save_pretrained(folder)
        if with_checkpoint:
            wrap.save()


def precompute(overrides: Sequence[str], samples: Sequence[Any], folder: str | Path) -> int:
    """Store the outputs of the reference model of a run."""
    from megatron_wrap.bridge.loading.hub import read_run
    from megatron_wrap.checkpoint.reference_config import precompute_config
    from megatron_wrap.core import MegatronWrap
    from megatron_wrap.engine.precompute import precompute as store

    config = read_run(runs.CONFIG, [*runs.DPO, *overrides])
    with MegatronWrap(precompute_config(config)) as wrap:
        wrap.initialize()
        wrap.setup_model()
        return store(wrap.state, [("here", sample) for sample in samples], folder, config.models.role, skip_bad=False)


def weights(overrides: Sequence[str], samples: Sequence[Any], steps: int) -> list[tuple[Any, Any]]:
    """(policy, reference) before the first step and after each: all parameters of one rank in one vector, fp32; of a
    reference with an average that."""

    def vector(tensors: Any) -> numpy.ndarray:
        return numpy.concatenate([tensor.detach().float().flatten().numpy() for tensor in tensors])

    taken = []
    with started(runs.CONFIG, [*runs.DPO, *overrides]) as wrap:
        policy, reference = wrap.state.chunks[0], wrap.state.reference
        for step in range(steps + 1):
            taken.append((vector(policy.parameters()), vector(reference.average or reference.parameters)))
            if step < steps:
                wrap.train(samples[step * runs.BATCH : (step + 1) * runs.BATCH])
    return taken


def refusal_of_batches(overrides: Sequence[str]) -> str:
    """The message of the error that an epoch of the run's own data raises."""
    from megatron_wrap.errors import MegatronWrapError

    try:
        with started(runs.CONFIG, [*runs.DPO, *overrides]) as wrap:
            for batch in wrap.batches():
                wrap.train(batch)
    except MegatronWrapError as error:
        return str(error)
    return "no error"
