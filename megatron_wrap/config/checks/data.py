"""Contradictions between the keys of `megatron_wrap.data`."""

from collections.abc import Sequence

from megatron_wrap.config.checks.indexed import check_indexed
from megatron_wrap.config.checks.located_errors import refuse
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.config.schema.sources import SourceConfig

_SHARES = ("weight", "epochs", "samples")


def check_data(config: RunConfig) -> None:
    """Check that data_key reads the sources, their shares of an epoch, and that streaming is possible.

    Raises:
        ConfigError: the values contradict each other.
    """
    data = config.data
    check_indexed(config)
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
