"""`megatron-wrap precompute`: start the processes of a run's layout, which store the outputs of its reference model."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from typing import Any

from megatron_wrap.bridge.loading.hub import read_run
from megatron_wrap.checkpoint.reference_config import check_tokenizer, precompute_config
from megatron_wrap.cli.arguments import add_run_arguments
from megatron_wrap.cli.launching import (
    add_launch_arguments,
    add_start_arguments,
    read_for_launch,
    shares_files,
    started,
)
from megatron_wrap.config import RunConfig
from megatron_wrap.config.checks.layout import check_layout
from megatron_wrap.config.checks.run import check_values
from megatron_wrap.config.schema import derived
from megatron_wrap.core.validation.paths import check_run
from megatron_wrap.errors import ConfigError
from megatron_wrap.launch.interface import Program


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    add_run_arguments(parser)
    parser.add_argument(
        "--output", metavar="FOLDER", help="folder to write (default: megatron_wrap.models.reference.precomputed)"
    )
    add_launch_arguments(parser)
    add_start_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Validates, starts the processes, and returns their exit code."""
    config = read_for_launch(arguments, arguments.overrides)
    reference = config.models.reference_or_teacher
    folder = arguments.output or (None if reference is None else reference.precomputed)
    if folder is None:
        raise ConfigError(
            f"precompute needs a folder to write; give --output FOLDER, or {config.models.path}.precomputed"
        )
    (check_run if shares_files(config, arguments) else check_values)(config)
    precompute_config(config)
    output = ["--output", arguments.output] if arguments.output else []
    command = ("precompute", arguments.config, *output, *arguments.overrides)
    program = Program((folder, arguments.config, *arguments.overrides), function=run_rank)
    return started(config, arguments, command, program, functools.partial(check_layout, config)).exit_code


def run_rank(folder: str, config: str, *overrides: str) -> None:
    """The work of one process."""
    from megatron_wrap.core import MegatronWrap, exit_on_user_error
    from megatron_wrap.metrics.number_format import counted
    from megatron_wrap.utils.dist_logger import logger
    from megatron_wrap.utils.progress import tracked

    with exit_on_user_error():
        run_config = read_run(config, overrides)
        with MegatronWrap(precompute_config(run_config)) as wrap:
            wrap.initialize()
            wrap.setup_model()
            check_tokenizer(run_config, wrap.config, wrap.tokenizer)
            from megatron_wrap.evaluation.precompute import (
                precompute,  # after the platform, whose Megatron-Core it imports
            )

            skip_bad = run_config.data.on_bad_sample == "skip"
            samples = tracked(_samples(run_config), "precompute", _count(run_config), "sample")
            count = precompute(wrap.state, samples, folder, run_config.models.role, skip_bad)
            logger.info_rank_0(f"outputs of {counted(count, 'sample')}: {folder}")


def _count(config: RunConfig) -> int | None:
    """The number of `_samples`; None if a source streams."""
    from megatron_wrap.data.sources.files import open_rows

    training = derived.training_sources(config)
    validation = [source for sources in derived.validation_sources(config).values() for source in sources]
    if any(source.streaming for source in (*training, *validation)):
        return None
    count = (derived.mock_samples(config.data) or 0) + sum(len(open_rows(source)) for source in training)
    for source in validation:
        rows = len(open_rows(source))
        count += rows if source.samples is None else min(rows, source.samples)
    return count


def _samples(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """(FILE:ROW, sample) of each row of the training and evaluation sets, with a DataError instead of a bad row."""
    from megatron_wrap.data.order.sample_sets import NumberedSamples, each_row

    mock = derived.mock_samples(config.data)
    for number, sample in enumerate(NumberedSamples(mock or 0), 1):
        yield f"mock:{number}", sample
    for source in derived.training_sources(config):
        yield from each_row(source)
    for sources in derived.validation_sources(config).values():
        for source in sources:
            yield from each_row(source, source.samples)
