"""Functions that the tests of parameters trained whole in addition to adapters run on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import _bridge_runs as bridge
from _adapter_runs import SETTINGS, factors_of, stack
from _dpo_runs import BATCH, CONFIG
from _started import started


def train_scores(overrides: Sequence[str], samples: Sequence[Any], single: Sequence[Any], outputs: str) -> Any:
    """Metrics of each step on the samples, factors and head before and after them, and the scores of single sequences
    with and without the adapter; writes the folders adapter and merged."""
    from megatron_wrap.nn.adapters.lora import only_adapter

    with started(CONFIG, list(overrides)) as wrap:
        initial, steps = factors_of(wrap), []
        while wrap.iteration < len(samples) // BATCH:
            start = wrap.iteration * BATCH
            steps.append(dict(wrap.train(samples[start : start + BATCH])))
        trained = factors_of(wrap)
        scores = [float(output["score"]) for output in wrap.forward(single)]
        with only_adapter(wrap.state.chunks, None):
            base = [float(output["score"]) for output in wrap.forward(single)]
        wrap.save_pretrained(f"{outputs}/adapter")
        wrap.save_pretrained(f"{outputs}/merged", merge=True)
        return steps, initial, trained, scores, base


def loaded_factors(overrides: Sequence[str]) -> Any:
    """Factors and head of a run before its first step."""
    with started(CONFIG, list(overrides)) as wrap:
        return factors_of(wrap)


def train_until(overrides: Sequence[str], samples: Sequence[Any], stop: int) -> Any:
    """Metrics of the steps until `stop` of a run that resumes if it can and saves each step, the adapter after them,
    and the names in its last checkpoint."""
    from megatron.core import dist_checkpointing

    steps = []
    with started(CONFIG, list(overrides)) as wrap:
        while wrap.iteration < stop:
            start = wrap.iteration * BATCH
            steps.append(dict(wrap.train(samples[start : start + BATCH])))
            wrap.save()
        save, factors = wrap.state.config.train.save, factors_of(wrap)
    saved = dist_checkpointing.serialization.load_sharded_metadata(f"{save}/iter_{stop:07d}")
    return steps, factors, [entry.key for entry in saved.values() if "rng" not in entry.key]


def base_logits(folder: str, overrides: Sequence[str], save: str) -> Any:
    """Logits [2, 64, V] without the adapter of a run that resumes from the last checkpoint in `save`."""
    from megatron_wrap.core import MegatronWrap
    from megatron_wrap.evaluation.scoring import sequence_logits
    from megatron_wrap.nn.adapters.lora import only_adapter

    settings = (*SETTINGS, *overrides, f"megatron_lm.train.common.save={save}")
    with MegatronWrap.from_pretrained(folder, bridge.CONFIG, settings) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        assert wrap.iteration > 0
        with only_adapter(wrap.state.chunks, None):
            return stack(sequence_logits(wrap.state, bridge.token_ids()))
