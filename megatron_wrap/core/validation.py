"""What is validated of a run before it begins, in one order for `MegatronWrap` and the command line.

Needs no process group, and writes nothing. Only the checks of data and flow import torch.
"""

from __future__ import annotations

import sys

from megatron_wrap.bridge.loading.hf_path import check_hugging_face
from megatron_wrap.checkpoint.precheck import check_checkpoints
from megatron_wrap.checkpoint.reference_config import reference_config
from megatron_wrap.config import RunConfig
from megatron_wrap.config.checks.run import check_layout, check_run
from megatron_wrap.config.checks.vocabulary import model_vocab_size
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.sources import SourceConfig
from megatron_wrap.errors import DataError


def validate(config: RunConfig, num_processes: int | None = None, own_script: bool = False) -> RunConfig | None:
    """Validate a decoded configuration.

    Args:
        num_processes: of a run that a command is about to start, over all nodes: its layout, data files and flow are
            validated once, for all processes. None: this process is one of them.
        own_script: the processes run a script of the user, which may register the flow itself.

    Returns:
        The configuration of the reference or teacher model, from `reference_config`.

    Raises:
        MegatronWrapError: the first mistake.
    """
    check_run(config)
    if num_processes is not None:
        check_layout(config, num_processes)
        check_data(config)
    check_checkpoints(config)
    check_hugging_face(config)
    reference = reference_config(config)
    if num_processes is not None:
        from megatron_wrap.flow.entry import SHIPPED

        if not own_script:
            check_flow(config)
        if not own_script or config.flow.flow_key in SHIPPED:
            check_lengths(config)
    return reference


def check_data(config: RunConfig) -> None:
    """Open every file that the configuration names, and parse every line of JSON lines unless bad rows are skipped.

    Raises:
        DataError: a missing file or a malformed line; the message contains its number.
    """
    if derived.is_indexed(config.data):
        from megatron_wrap.data.indexed.windows import check_indices

        check_indices(config)
    if not derived.has_sources(config.data):
        return
    from megatron_wrap.data.order.sample_sets import check_source

    for source in _local_sources(config):
        check_source(source, every_row=config.data.on_bad_sample == "error")


def check_flow(config: RunConfig) -> None:
    """Import the flow's module, and validate its class, and its keys against the class's `Config`.

    Raises:
        ConfigError: an unknown flow, or unknown keys. FlowError: the flow is incomplete.
    """
    from megatron_wrap.flow.contract.config import decode_flow_config
    from megatron_wrap.flow.entry import MegatronWrapFlowEntry

    if "" not in sys.path:  # for my_module:MyFlow in the working directory, where the processes find it
        sys.path.insert(0, "")
    decode_flow_config(MegatronWrapFlowEntry.get_flow_class(config.flow.flow_key), config)


def check_lengths(config: RunConfig) -> None:
    """Tokenize every sample if the flow refuses to truncate, so that no sample ends the run hours later.

    Raises:
        DataError: a sample is longer than the context; the message contains its file and line.
    """
    refuses = config.flow.options.get("truncation") == "refuse" and config.data.on_bad_sample == "error"
    if not derived.has_sources(config.data) or not refuses:
        return
    from megatron_wrap.data.chat.tokenizer import load_tokenizer
    from megatron_wrap.data.order.sample_sets import open_source
    from megatron_wrap.data.sources.rows import BadSample
    from megatron_wrap.engine.setup.flow import build_flow

    tokenizer = None if config.data.tokenizer is None else load_tokenizer(config.data.tokenizer)
    flow = build_flow(config, tokenizer, model_vocab_size(config.arch, tokenizer))
    for source in _local_sources(config):
        if source.streaming:
            continue
        rows = open_source(source)
        for index in range(len(rows)):
            try:
                flow.prepare_sample(rows[index])
            except BadSample:
                raise
            except DataError as error:
                raise DataError(f"{rows.where(index)}: {error}") from error


def _local_sources(config: RunConfig) -> list[SourceConfig]:
    """The sources that are files; a hub id may have to be downloaded, and a Python source to be computed."""
    validation = [source for sources in derived.validation_sources(config).values() for source in sources]
    all_sources = {source.path: source for source in [*derived.training_sources(config), *validation]}
    return [source for source in all_sources.values() if source.kind in ("file", "folder", "glob")]
