"""Entry of `megatron-wrap`: finds the subcommand's module, and turns a user's error into one line and exit code 2."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from megatron_wrap import __version__
from megatron_wrap.errors import MegatronWrapError

COMMANDS: dict[str, str] = {
    "train": "check a configuration, then start the processes that train it",
    "check-parity": "show that a flow trains alike on every parallel layout",
    "export-hf": "write a Hugging Face folder from a run's checkpoint",
    "verify-hf": "compare our model of a Hugging Face folder with transformers",
    "new-flow": "write a flow to start from: one file, its run and its parity test",
    "explain": "say what a configuration's values are, mean, and where they were set",
}
"""Subcommand -> help. `cli/NAME.py` (dashes as underscores) has `add_arguments(parser)` and `run(args) -> int`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code: 0, or 2 for a mistake of the user, said in one line on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="megatron-wrap", description="Training algorithms on Megatron-Core.")
    parser.add_argument("--version", action="version", version=f"megatron-wrap {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    parsers = {
        name: subparsers.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        for name, text in COMMANDS.items()
    }
    if not arguments or arguments[0] not in parsers:
        parser.parse_args(arguments)  # ends with the help, the version or what is wrong
        parser.error("COMMAND comes first")
    # only the chosen command's module is imported: explain must not pay for what train needs
    module = importlib.import_module(f"megatron_wrap.cli.{arguments[0].replace('-', '_')}")
    module.add_arguments(parsers[arguments[0]])
    args = parsers[arguments[0]].parse_intermixed_args(arguments[1:])  # overrides may stand after options, too
    try:
        return int(module.run(args))
    except MegatronWrapError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader (head, less) has gone
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
