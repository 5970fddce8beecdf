"""Entry point of `megatron-wrap`: imports the module of the subcommand, and reports a user's error in one line."""

import argparse
import functools
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from megatron_wrap import __version__
from megatron_wrap.errors import MegatronWrapError
from megatron_wrap.hidden_secrets import hide_secrets
from megatron_wrap.nearest_names import did_you_mean

COMMANDS: dict[str, str] = {
    "train": "validate a configuration, then train it",
    "check": "report everything that is wrong with a run, before it begins",
    "doctor": "report what is wrong with this machine, or the nodes of a run",
    "explain": "show a configuration's values, meanings and origins",
    "schema": "print the JSON schema of the configuration, for editors",
    "inspect-data": "show which tokens of the data are trained, and the usual mistakes",
    "profile": "show where the time of a step goes, and what to change",
    "check-parity": "compare a flow's parallel layouts with one process",
    "preprocess": "tokenize text once, into files that pretraining reads",
    "train-tokenizer": "train a byte-level BPE tokenizer on text",
    "jobs": "list, follow and cancel the jobs that were submitted to Slurm",
    "checkpoints": "list the checkpoints of a run, and verify their files",
    "report": "write a page of one or several runs: curves, texts, configuration",
    "precompute": "store the outputs of a reference model, so that training needs none",
    "new-flow": "write a new flow, its configuration and its test",
    "export-hf": "write a Hugging Face folder from a checkpoint",
    "chat": "talk to a model, or complete a file of prompts",
    "eval": "run tasks of lm-evaluation-harness",
    "verify-hf": "compare a Hugging Face folder with transformers",
    "families": "list the Hugging Face families, and how they compare with transformers",
    "completion": "print the code by which a shell completes this command",
}
"""Subcommand -> purpose. `cli/NAME.py` (`_` for `-`) defines `add_arguments(parser)` and `run(args)`; `examples.txt`
contains the examples of its help."""

_LISTED = f"; the commands are {', '.join(COMMANDS)}"
_HELP_FORMAT = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=26)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns its exit code, or 2 for a user's error, reported in one line on stderr."""
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        command_parser("completion")[0].complete()
    module, args = parse(sys.argv[1:] if argv is None else argv)
    if "" not in sys.path:  # my_module:MyFlow in the working directory, which `python -m` and `train` find
        sys.path.append("")
    try:
        return int(module.run(args))
    except MegatronWrapError as error:
        print(hide_secrets(f"error: {error}"), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or "interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of stdout (head, less) has exited
        sys.stderr.close()
        return 0


def parse(argv: Sequence[str]) -> tuple[ModuleType, argparse.Namespace]:
    """The module of the subcommand that `argv` names and its parsed arguments.

    Raises:
        SystemExit: `--help` or `--version`, after its text is printed (0); a wrong command line, or none, after the
            help is printed (2).
    """
    if not argv:
        _parser().print_help()
        raise SystemExit(2)
    name, *rest = argv
    if name not in COMMANDS:
        parser = _parser()
        if name.startswith("-"):
            parser.parse_args(argv)
            parser.error("COMMAND comes first")
        parser.error(f"there is no command {name}{did_you_mean(name, COMMANDS) or _LISTED}")
    module, parser = command_parser(name)
    arguments, unknown = parser.parse_known_intermixed_args(rest)  # overrides are accepted after options
    if unknown:
        options = [option for option in parser._option_string_actions if option.startswith("--")]
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(unknown[0], options)}")
    return module, arguments


def command_parser(name: str) -> tuple[ModuleType, argparse.ArgumentParser]:
    """The module of a subcommand, and the parser of its arguments. Only this module is imported, so that explain does
    not wait for the imports of train."""
    module = importlib.import_module(f"megatron_wrap.cli.{name.replace('-', '_')}")
    purpose = COMMANDS[name]
    parser = argparse.ArgumentParser(
        prog=f"megatron-wrap {name}",
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=_epilog(name),
        formatter_class=_HELP_FORMAT,
    )
    module.add_arguments(parser)
    return module, parser


def _parser() -> argparse.ArgumentParser:
    """The parser of a command line without a subcommand. Its description lists the commands aligned, which argparse
    does not."""
    listed = "\n".join(f"  {name:<17}{purpose}" for name, purpose in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="megatron-wrap",
        usage="megatron-wrap [-h] [--version] COMMAND ...",
        description=f"Train models with Megatron-Core.\n\ncommands (`megatron-wrap COMMAND --help`):\n{listed}",
        epilog=_epilog("megatron-wrap"),
        formatter_class=_HELP_FORMAT,
    )
    parser.add_argument("--version", action="version", version=f"megatron-wrap {__version__}")
    return parser


def _hint(argument: str, options: Sequence[str]) -> str:
    """The ending of a message about an argument that a subcommand does not have."""
    name = argument.partition("=")[0]
    if not name.startswith("-"):
        return ""
    if "." in name:
        return f"; an override has no dashes: {argument.lstrip('-')}"
    from megatron_wrap.config.schema.familiar_names import familiar_advice

    advice = familiar_advice(name)
    return did_you_mean(name, options) if advice is None else f"; {advice}"


def _epilog(command: str) -> str:
    """The examples of a subcommand, or of `megatron-wrap` itself, from `examples.txt`."""
    blocks = Path(__file__).with_name("examples.txt").read_text(encoding="utf-8").rstrip().split("\n\n")
    examples = {name: lines for name, _, lines in (block.partition("\n") for block in blocks)}
    return f"examples, in a checkout of the repository:\n{examples[command]}"


if __name__ == "__main__":
    sys.exit(main())
