"""`megatron-wrap chat`: talk to a model, or complete a file of prompts, in one process or on a parallel layout."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wrap.cli.arguments import count, selected
from megatron_wrap.cli.model_processes import add_model_arguments, run_on_processes
from megatron_wrap.errors import ConfigError, DataError, special_file
from megatron_wrap.utils.atomic_write import write_atomically

if TYPE_CHECKING:
    from megatron_wrap.core import MegatronWrap


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    add_model_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message (default: none)")
    parser.add_argument(
        "--prompts", metavar="FILE", help='JSON lines to complete: {"prompt": ...}, {"messages": [...]} or a text each'
    )
    parser.add_argument("--output", metavar="FILE", help="JSON lines to write (default: standard output)")
    parser.add_argument("--max-new-tokens", type=count, default=512, metavar="N", help="of an answer (default: 512)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0: the most probable token (default: 0)"
    )
    parser.add_argument("--top-p", type=float, metavar="P", help="sample from the most probable tokens of this sum")
    parser.add_argument("--top-k", type=count, metavar="K", help="sample from the K most probable tokens")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of sampling (default: 0)")
    parser.add_argument("--batch-size", type=count, default=8, metavar="N", help="prompts at a time (default: 8)")


def run(arguments: argparse.Namespace) -> int:
    """Starts the conversation, or completes the file; returns the exit code of the processes."""
    if arguments.output and not arguments.prompts:
        raise ConfigError("chat: --output is for the completions of --prompts; give both, or neither")
    if arguments.prompts:
        read_prompts(arguments.prompts)  # a mistake is found before the model is loaded
    return run_on_processes(use_model, arguments)


def use_model(wrap: MegatronWrap, arguments: argparse.Namespace) -> None:
    """Holds the conversation, or completes the file, on every rank."""
    from megatron_wrap.inference.chat import Conversation, Sampling, complete_rows, talk

    names = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "batch_size")
    sampling = Sampling(**selected(arguments, *names))
    rank = wrap.state.parallel.world.rank
    if arguments.prompts:
        rows = complete_rows(wrap, read_prompts(arguments.prompts), sampling, arguments.system)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        if rank == 0 and arguments.output:
            write_atomically(arguments.output, text)
        elif rank == 0:
            sys.stdout.write(text)
        return
    conversation = Conversation(wrap, sampling, arguments.system)
    if rank == 0 and sys.stdin.isatty():
        kind = "Talk to the model" if conversation.has_template else "No chat template: the model completes each line"
        print(f"{kind}. /reset forgets the conversation, Ctrl-D ends.")
    talk(conversation, _read, _write, rank)


def _read() -> str | None:
    """The next line of standard input, edited with readline on a terminal; None at its end."""
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        import readline  # noqa: F401 - input() uses it
    try:
        return input("> " if on_terminal else "")
    except EOFError:
        if on_terminal:
            print()
        return None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def read_prompts(path: str) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines, each `{"prompt": text or messages}`, `{"messages": [...]}` or a text, which
    becomes `{"prompt": text}`.

    Raises:
        DataError: the file is missing, or a line is something else; the message contains its number.
    """
    if reason := special_file(Path(path).expanduser()):
        raise DataError(reason)
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise DataError(f"{path}: cannot be read ({reason}); give a file of JSON lines") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not JSON ({error})") from error
        row = {"prompt": row} if isinstance(row, str) else row
        prompt = row.get("messages", row.get("prompt")) if isinstance(row, Mapping) else None
        if not prompt or not isinstance(prompt, str | list):
            raise DataError(
                f'{path}:{number}: a line is {{"prompt": text or messages}}, {{"messages": [...]}} or a text, '
                f"not {line[:60]!r}"
            )
        rows.append(dict(row))
    return rows
