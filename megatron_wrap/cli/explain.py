"""`megatron-wrap explain CONFIG [KEY] [a.b.c=value ...]`."""

import argparse
import contextlib
import os
from pathlib import Path

from megatron_wrap.bridge.export.adapted import adapter_lines
from megatron_wrap.bridge.export.frozen import trained_shape
from megatron_wrap.bridge.loading.hub import with_downloads
from megatron_wrap.config import RunConfig
from megatron_wrap.config.decode import decode, load_tree
from megatron_wrap.config.defaults import (
    CONNECTIONS,
    Choice,
    all_choices,
    has_transformer_engine_layers,
    layer_choices,
    with_choices,
)
from megatron_wrap.config.explain import explain
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.run import SECTION_PATHS
from megatron_wrap.config.standalone_checks import check_configuration
from megatron_wrap.errors import ConfigError, LayoutError, Mistakes
from megatron_wrap.launch.interface import nodes_of
from megatron_wrap.plan.context_exchange import exchange_choice
from megatron_wrap.plan.pipeline_split import split_choice
from megatron_wrap.platform.base.machine import this_machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    parser.add_argument("config", metavar="CONFIG", help="YAML of the run")
    parser.add_argument(
        "rest",
        nargs="*",
        default=[],
        metavar="[KEY] [a.b.c=value ...]",
        help="dotted path of a key or section (default: the whole configuration), and overrides, applied last",
    )


def run(args: argparse.Namespace) -> int:
    """Prints value, type, meaning and origins of KEY, or a table of a section or of the whole configuration. Includes
    the values that this machine and `megatron-wrap train` would choose for keys that the YAML leaves open, and, after
    the section `megatron_wrap.adapter`, the modules that it adapts.

    Raises:
        MegatronWrapError: a contradiction of the configuration alone, after the values are printed.
    """
    keys = [text for text in args.rest if "=" not in text]
    if len(keys) > 1:
        raise ConfigError(f"one KEY at a time, not {len(keys)}: {', '.join(keys)}; an override is written a.b.c=value")
    overrides = [text for text in args.rest if "=" in text]
    tree = with_downloads(lambda: load_tree(args.config, overrides))
    config = decode(tree, Path(args.config).stem)  # refuses a value of the wrong type
    mistakes = Mistakes()
    chosen: tuple[Choice, ...] = ()
    with mistakes.collected():
        check_configuration(config)
    with mistakes.collected():
        chosen = _choices_here(config)
    adapted: list[str] = []
    with mistakes.collected():
        adapted = adapter_lines(config, config.arch.vocab_size)
    lines = [explain(tree, keys[0] if keys else None, chosen)]
    if keys == [SECTION_PATHS["adapter"]]:
        lines += adapted
    print("\n".join(lines), flush=True)
    mistakes.raise_first()
    return 0


def _choices_here(config: RunConfig) -> tuple[Choice, ...]:
    """The choices that `megatron-wrap train` would make, with the processes that it would start on this machine."""
    processes = derived.processes_needed(config)
    with contextlib.suppress(LayoutError):  # the environment of a node describes no run
        processes = nodes_of(config).world_size
    shards = derived.data_parallel_size(config, processes) * config.parallel.context_parallel_size
    machine = this_machine(config.init.platform)
    chosen = all_choices(config, machine, max(1, shards), os.environ.get(CONNECTIONS))
    tokens = config.arch.vocab_size  # without a tokenizer nothing more is known, and explain loads none
    split = None
    if tokens is not None and derived.splits_by_cost(config):
        split = split_choice(config, trained_shape(config, tokens), machine.device)
    here = with_choices(config, layer_choices(config, machine))
    exchange = exchange_choice(here, has_transformer_engine_layers(here, machine))
    return (*chosen, *(choice for choice in (split, exchange) if choice is not None))
