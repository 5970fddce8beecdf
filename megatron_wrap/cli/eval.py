"""`megatron-wrap eval`: evaluate tasks of lm-evaluation-harness, in one process or on a parallel layout."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from contextlib import nullcontext, redirect_stderr
from typing import TYPE_CHECKING, Any

from megatron_wrap.cli.arguments import count, selected
from megatron_wrap.cli.model_processes import add_model_arguments, run_on_processes
from megatron_wrap.errors import ConfigError
from megatron_wrap.nearest_names import did_you_mean
from megatron_wrap.utils.atomic_write import write_atomically

if TYPE_CHECKING:
    from megatron_wrap.core import MegatronWrap


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand; options of lm_eval keep their names, also with underscores."""
    add_model_arguments(parser)

    def option(name: str, text: str, **settings: Any) -> None:
        parser.add_argument(
            f"--{name}", *([f"--{name.replace('-', '_')}"] if "-" in name else []), help=text, **settings
        )

    option("tasks", "names of tasks, groups or tags; may have *", required=True, metavar="A,B")
    option("include-path", "folder with YAML files of tasks", metavar="FOLDER")
    option("num-fewshot", "examples before each question (default: the task's)", type=int, metavar="N")
    option("limit", "examples of each task; below 1, their share", type=float, metavar="N")
    option("batch-size", "sequences at a time (default: 8)", type=count, default=8, metavar="N")
    option("apply-chat-template", "prompts as messages of a user", action="store_true")
    option("system-instruction", "system message", metavar="TEXT")
    option("gen-kwargs", "of generation, such as max_gen_toks=64", metavar="K=V,K=V")
    option("output", "also write all results to FILE, as JSON", metavar="FILE")
    option("log-samples", "with each question and answer in --output", action="store_true")
    option("confirm-run-unsafe-code", "run the code that a model writes, for tasks that need it", action="store_true")


def run(arguments: argparse.Namespace) -> int:
    """Prints the table of results; returns the exit code of the processes."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("eval needs lm-evaluation-harness; install it: pip install 'megatron-wrap[eval]'")
    if arguments.log_samples and not arguments.output:
        raise ConfigError("eval: --log-samples writes into --output; also give --output")
    return run_on_processes(use_model, arguments)


def use_model(wrap: MegatronWrap, arguments: argparse.Namespace) -> None:
    """Evaluates the tasks, on every rank."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable, make_table

    from megatron_wrap.inference.harness import HarnessModel

    rank = wrap.state.parallel.world.rank
    model = HarnessModel(wrap, arguments.batch_size)  # a mistake is found before the harness reads its tasks
    with nullcontext() if rank == 0 else redirect_stderr(open(os.devnull, "w", encoding="utf-8")):
        # every process does the same, and one of them shows its bars and warnings
        manager = TaskManager(include_path=arguments.include_path)
        results: dict[str, Any] | None = simple_evaluate(
            model,
            tasks=_matching(arguments.tasks, manager),
            task_manager=manager,
            **selected(arguments, "num_fewshot", "limit", "batch_size", "log_samples", "apply_chat_template"),
            **selected(arguments, "system_instruction", "gen_kwargs", "confirm_run_unsafe_code"),
        )
    if results is None or rank != 0:
        return
    results["config"]["model"] = arguments.source
    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))
    if arguments.output:
        text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
        write_atomically(arguments.output, text + "\n")


def _matching(names: str, manager: Any) -> list[str]:
    """The tasks that match the comma-separated names and patterns."""
    tasks: list[str] = []
    for name in filter(None, (name.strip() for name in names.split(","))):
        matches = manager.match_tasks([name])
        if not matches:
            raise ConfigError(f"eval: unknown task {name!r}{did_you_mean(name, manager.all_tasks)}")
        tasks += [match for match in matches if match not in tasks]
    return tasks
