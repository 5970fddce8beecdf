"""Outputs of a reference model that were computed before training, added to samples by their hash."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.data.cache.precomputed import MANIFEST, PrecomputedOutputs, sample_hash
from megatron_wrap.data.chat.tokenizer import fingerprint
from megatron_wrap.errors import ConfigError, DataError
from megatron_wrap.flow import MegatronWrapTrainingFlowBase

_VOCAB_SIZE = "vocab_size"


def sample_preparation(flow: MegatronWrapTrainingFlowBase, config: RunConfig) -> Callable[[Any], Any]:
    """The function with which the run prepares a sample: the flow's `prepare_sample`. With `precomputed` it receives
    each sample with the stored outputs of the reference model as `reference_NAME`.

    Raises:
        DataError: there are no outputs. ConfigError: they were computed for another flow, tokenizer or sequence length.
    """
    settings = config.models.reference_or_teacher
    if settings is None or settings.precomputed is None:
        return flow.prepare_sample
    stored = PrecomputedOutputs(settings.precomputed)
    expected = facts_of(flow, config)
    for name, value in expected.items():
        if stored.metadata.get(name) != value:
            raise ConfigError(
                f"{config.models.path}: the outputs in {stored.folder} were computed with another {name}: "
                f"{stored.metadata.get(name)} there and {value} here; run megatron-wrap precompute with this "
                f"configuration, or set {name} back"
            )
    models = config.models

    def prepare_with_outputs(sample: Any) -> Any:
        outputs = stored.get(sample_hash(sample))
        if outputs is None:
            flow.prepare_sample(sample)  # a mistake of the sample comes first
            raise DataError(
                f"{stored.folder} has no output of the {models.role} model for the sample {_shown(sample)}; run "
                "megatron-wrap precompute with the data of this run"
            )
        both = sorted(outputs.keys() & sample.keys())
        if both:
            raise DataError(
                f"the sample contains {', '.join(both)}, which {models.path}.precomputed adds; remove them from the "
                f"samples, or set {models.path} to null"
            )
        return flow.prepare_sample({**sample, **{name: _value(value) for name, value in outputs.items()}})

    return prepare_with_outputs


def facts_of(flow: MegatronWrapTrainingFlowBase, config: RunConfig) -> dict[str, Any]:
    """Everything besides the sample and the model that stored outputs depend on."""
    return {
        "flow_key": config.flow.flow_key,
        "seq_length": config.train.seq_length,
        _VOCAB_SIZE: flow.context.num_token_ids,
        "tokenizer": None if flow.context.tokenizer is None else fingerprint(flow.context.tokenizer, "samples"),
    }


def stored_vocab_size(folder: str) -> int | None:
    """Number of token ids that the models had in common when the outputs in a folder were computed; None: not recorded,
    or the folder has no complete outputs, which `sample_preparation` refuses."""
    try:
        facts = json.loads((Path(folder).expanduser() / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    size = facts.get(_VOCAB_SIZE) if isinstance(facts, dict) else None
    return size if isinstance(size, int) and size > 0 else None


def _value(value: Any) -> Any:
    return value if isinstance(value, float | int) else torch.from_numpy(value.copy())


def _shown(sample: Mapping[str, Any]) -> str:
    text = json.dumps({name: value for name, value in sample.items() if name != "source"}, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
