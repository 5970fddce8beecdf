"""`megatron-wrap explain CONFIG [KEY] [a.b=c ...]`."""

import argparse
from pathlib import Path

from megatron_wrap.config.decode import decode, load_tree
from megatron_wrap.config.explain import explain
from megatron_wrap.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the subcommand's arguments."""
    parser.add_argument("config", metavar="CONFIG", help="the run's YAML")
    parser.add_argument(
        "rest",
        nargs="*",
        default=[],
        metavar="[KEY] [a.b=c ...]",
        help="dotted path of a value or section (none: the whole tree), and overrides",
    )


def run(args: argparse.Namespace) -> int:
    """Prints value, type, meaning and sources of KEY, or a table of a section or of the whole tree."""
    keys = [text for text in args.rest if "=" not in text]
    if len(keys) > 1:
        raise ConfigError(f"one KEY at a time, not {len(keys)}: {', '.join(keys)}; an override is written a.b.c=value")
    tree = load_tree(args.config, [text for text in args.rest if "=" in text])
    text = explain(tree, keys[0] if keys else None)
    decode(tree, Path(args.config).stem)  # a value of the wrong type is no explanation
    print(text)
    return 0
