"""Contradictions between the keys of `megatron_wrap.data`, of samples and of indexed data."""

import dataclasses
import math
from collections.abc import Sequence

from megatron_wrap.config.checks.contradictions import refuse
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.data import SourceConfig
from megatron_wrap.config.schema.run import RunConfig

_SHARES = ("weight", "epochs", "samples")
_PREFIX_KEYS = ("path", "name", "weight")
"""Keys that a source of indexed data may have."""


def check_data(config: RunConfig) -> None:
    """Check that data_key reads the sources, that their shares of an epoch are consistent, and that streaming is
    possible.

    Raises:
        ConfigError: the values contradict each other.
    """
    data = config.data
    _check_indexed(config)
    if derived.is_indexed(data):
        return
    if derived.has_sources(data) and not (data.train or data.validation):
        rule = f"{data.data_key} needs samples; set train (or only validation) to a data file or hub id"
        refuse(config, ["data.data_key"], rule)
    _check_training_sources(config, data.train)
    for name, sources in data.validation.items():
        for source in sources:
            _check_evaluation_source(config, name, source)


def _check_training_sources(config: RunConfig, sources: Sequence[SourceConfig]) -> None:
    for source in sources:
        shares = [name for name in _SHARES if getattr(source, name) is not None]
        if len(shares) > 1:
            refuse(config, ["data.train"], f"{source.name} has {' and '.join(shares)}; delete all but one")
    weighted = [source.name for source in sources if source.weight is not None]
    without = [source.name for source in sources if source.weight is None]
    if weighted and without:
        rule = f"{', '.join(weighted)} have a weight and {', '.join(without)} none; set it for all sources, or none"
        refuse(config, ["data.train"], rule)
    streamed = [source.name for source in sources if source.streaming]
    if len(sources) > 1 and streamed and without:
        rule = f"{', '.join(streamed)} stream, so their length is unknown; set a weight for each source of the mixture"
        refuse(config, ["data.train"], rule)
    if len(sources) == 1 and streamed and (sources[0].epochs or sources[0].samples):
        refuse(config, ["data.train"], f"{streamed[0]} streams, so epochs and samples have no effect; delete them")


def _check_evaluation_source(config: RunConfig, name: str, source: SourceConfig) -> None:
    shares = [share for share in ("weight", "epochs") if getattr(source, share) is not None]
    if shares:
        rule = f"{shares[0]} applies to training, but the set {name} has every sample once; delete it, or set samples"
        refuse(config, ["data.validation"], rule)
    if source.streaming and source.samples is None:
        rule = f"the set {name} streams, so its length is unknown; set samples, the number of samples to evaluate"
        refuse(config, ["data.validation"], rule)


def _check_indexed(config: RunConfig) -> None:
    """Check the batches, splits and weights of indexed data.

    Raises:
        ConfigError: the values contradict each other.
    """
    data = config.data
    if not derived.is_indexed(data):
        return
    if data.mock_data == bool(data.train):
        needed = "indexed needs documents; set train to a prefix of .bin and .idx files, or mock_data: true"
        rule = "mock_data true and train are both set; delete one" if data.train else needed
        refuse(config, ["data.train", "data.mock_data"], rule)
    if not data.shuffle:
        refuse(config, ["data.shuffle"], "false has no effect: Megatron-Core's index is shuffled; delete it")
    separated = [
        name for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask") if getattr(data, name)
    ]
    if separated and data.eod_token is None and data.tokenizer is None:
        rule = "true needs the token that ends a document; set eod_token, or tokenizer with an eos token"
        refuse(config, [f"data.{separated[0]}"], rule)
    _check_split(config)
    for sources in (data.train, *data.validation.values()):
        _check_prefixes(config, sources)
    _check_weights(config, data.train)


def _check_split(config: RunConfig) -> None:
    data = config.data
    if data.split is None:
        return
    if data.mock_data:
        refuse(config, ["data.split"], f"{data.split} has no effect with mock_data; delete it")
    if data.validation:
        rule = f"{data.split} takes validation from train, but validation is also set; delete one of them"
        refuse(config, ["data.split", "data.validation"], rule)
    try:
        derived.split_shares(data.split)
    except ValueError:
        rule = "must be the shares of training, validation and test, such as 949,50,1 or 98,2,0, the first above 0"
        refuse(config, ["data.split"], f"{rule}, not {data.split!r}")


def _check_prefixes(config: RunConfig, sources: Sequence[SourceConfig]) -> None:
    for source in sources:
        for field in dataclasses.fields(SourceConfig):
            default = {} if field.name == "columns" else field.default
            if field.name not in _PREFIX_KEYS and getattr(source, field.name) != default:
                rule = f"{source.name} has {field.name}, but indexed data accepts {', '.join(_PREFIX_KEYS)}; delete it"
                refuse(config, ["data.train"], rule)


def _check_weights(config: RunConfig, sources: Sequence[SourceConfig]) -> None:
    weights = [source.weight for source in sources if source.weight is not None]
    if not weights:
        return
    without = [source.name for source in sources if source.weight is None]
    if without:
        rule = f"{', '.join(without)} has no weight and the others have one; set it for all sources, or none"
        refuse(config, ["data.train"], rule)
    total = math.fsum(weights)
    if not any(math.isclose(total, whole, rel_tol=1e-6) for whole in (1, 100)):
        shares = ", ".join(
            f"{source.name} {100 * weight / total:.6g}" for source, weight in zip(sources, weights, strict=True)
        )
        rule = f"the weights sum to {total:g}, not to 1 or 100; write these instead: {shares}"
        refuse(config, ["data.train"], rule)
