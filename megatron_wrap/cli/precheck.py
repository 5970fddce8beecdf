"""Checks before any process starts: configuration, layout, data files, checkpoints and the flow."""

import sys

from megatron_wrap.bridge.start import check_hugging_face
from megatron_wrap.checkpoint import check_checkpoints
from megatron_wrap.checkpoint.second_model import reference_config
from megatron_wrap.config import RunConfig, derived
from megatron_wrap.config.checks import check_layout, check_run
from megatron_wrap.config.sources import SourceConfig
from megatron_wrap.data.rows import BadSample
from megatron_wrap.errors import DataError


def check_data(config: RunConfig) -> None:
    """Opens every file that the configuration names, and parses every line of JSON lines unless bad rows are skipped.

    Raises:
        DataError: a missing file or a malformed line; the message contains its number.
    """
    if derived.is_indexed(config.data):
        from megatron_wrap.data.indexed import check_indices

        check_indices(config)
    if not derived.has_sources(config.data):
        return
    from megatron_wrap.data.sources import check_source

    for source in _local_sources(config):
        check_source(source, every_row=config.data.on_bad_sample == "error")


def _local_sources(config: RunConfig) -> list[SourceConfig]:
    """The sources that are files; a hub id may have to be downloaded, and a Python source to be computed."""
    validation = [source for sources in derived.validation_sources(config).values() for source in sources]
    all_sources = {source.path: source for source in [*derived.training_sources(config), *validation]}
    return [source for source in all_sources.values() if source.kind in ("file", "folder", "glob")]


def check_lengths(config: RunConfig) -> None:
    """Tokenizes every sample if the flow refuses to truncate, so that no sample ends the run hours later.

    Raises:
        DataError: a sample is longer than the context; the message contains its file and line.
    """
    refuses = config.flow.options.get("truncation") == "refuse" and config.data.on_bad_sample == "error"
    if not derived.has_sources(config.data) or not refuses:
        return
    from megatron_wrap.cli.one_process import flow_of_one_rank
    from megatron_wrap.data.sources import open_source
    from megatron_wrap.data.tokenizer import load_tokenizer

    tokenizer = None if config.data.tokenizer is None else load_tokenizer(config.data.tokenizer)
    flow = flow_of_one_rank(config, tokenizer)
    for source in _local_sources(config):
        if source.streaming:
            continue
        rows = open_source(source)
        for place in range(len(rows)):
            try:
                flow.prepare_sample(rows[place])
            except BadSample:
                raise
            except DataError as error:
                raise DataError(f"{rows.where(place)}: {error}") from error


def check_flow(config: RunConfig) -> None:
    """Imports the flow's module and validates its class, and its keys against the class's `Config`.

    Raises:
        ConfigError: an unknown flow, or unknown keys. FlowError: the flow is incomplete.
    """
    from megatron_wrap.flow.config import decode_flow_config
    from megatron_wrap.flow.entry import MegatronWrapFlowEntry

    if "" not in sys.path:  # my_module:MyFlow in the working directory, where the processes find it, too
        sys.path.insert(0, "")
    decode_flow_config(MegatronWrapFlowEntry.get_flow_class(config.flow.flow_key), config)


def precheck(config: RunConfig, world_size: int, own_script: bool = False) -> None:
    """Runs every check of a decoded configuration that needs no process group.

    Args:
        config: the run.
        world_size: number of processes over all nodes.
        own_script: the processes run a script of the user, which may register the flow itself.

    Raises:
        MegatronWrapError: the first error found.
    """
    check_run(config)
    check_layout(config, world_size)
    check_data(config)
    check_checkpoints(config)
    check_hugging_face(config)
    reference_config(config)
    from megatron_wrap.flow.entry import SHIPPED

    if not own_script:
        check_flow(config)
    if not own_script or config.flow.flow_key in SHIPPED:
        check_lengths(config)
