"""`megatron-wrap explain CONFIG [KEY] [a.b.c=value ...]`."""

import argparse
from pathlib import Path

from megatron_wrap.bridge.hub import with_downloads
from megatron_wrap.config.decode import decode, load_tree
from megatron_wrap.config.explain import explain
from megatron_wrap.errors import ConfigError

EXAMPLES = (
    ("one key; its own name is enough if only one section has it", "explain configs/tiny-llama-sft.yaml eval_interval"),
    ("a section", "explain configs/tiny-llama-sft.yaml megatron_lm.model.parallel"),
    (
        "a field of Megatron-Core that no file sets",
        "explain configs/tiny-llama-sft.yaml megatron_lm.model.arch.qk_l2_norm",
    ),
    (
        "all values, with an override",
        "explain configs/tiny-llama-sft.yaml megatron_lm.train.learning-rate.lr=1e-3",
    ),
)


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
    """Prints value, type, meaning and origins of KEY, or a table of a section or of the whole configuration."""
    keys = [text for text in args.rest if "=" not in text]
    if len(keys) > 1:
        raise ConfigError(f"one KEY at a time, not {len(keys)}: {', '.join(keys)}; an override is written a.b.c=value")
    overrides = [text for text in args.rest if "=" in text]
    tree = with_downloads(lambda: load_tree(args.config, overrides))
    text = explain(tree, keys[0] if keys else None)
    decode(tree, Path(args.config).stem)  # a value of the wrong type is an error here, too
    print(text)
    return 0
