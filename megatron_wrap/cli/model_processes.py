"""Commands that use a trained model: their arguments, and the processes that load the model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_wrap.config.checks.layout import check_layout
from megatron_wrap.config.schema import derived
from megatron_wrap.errors import ConfigError
from megatron_wrap.inference.trained_model import SOURCES, read_model
from megatron_wrap.launch.agent import launch_processes, python_call
from megatron_wrap.launch.interface import nodes_of

if TYPE_CHECKING:
    from megatron_wrap.core import MegatronWrap

UseOfModel = Callable[["MegatronWrap", argparse.Namespace], None]
"""Function that a command runs with a model, on every rank."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares SOURCE and overrides of its run."""
    parser.add_argument("source", metavar="FOLDER|CHECKPOINT", help=SOURCES)
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="a.b.c=value",
        help="of the model's run, such as megatron_lm.model.parallel.tensor_model_parallel_size=2 (default: one "
        "process, in the precision of the weights)",
    )
    parser.add_argument_group("environment", "GPUS_PER_NODE, NNODES, ...  as for megatron-wrap train")


def run_on_processes(use: UseOfModel, arguments: argparse.Namespace) -> int:
    """Call `use` in as many processes as the layout needs, in this process if that is one; returns the exit code.

    Args:
        use: a function of a command's module, which other processes import by its name.
        arguments: parsed arguments of the command; JSON values.

    Raises:
        MegatronWrapError: the model, or its layout, is wrong.
    """
    config = read_model(arguments.source, arguments.overrides)
    if derived.has_value_head(config):
        raise ConfigError(
            f"{arguments.source}: a model with a value head returns scores instead of text; export it, and score with "
            "transformers' AutoModelForSequenceClassification"
        )
    nodes = nodes_of(config)
    if nodes.world_size == 1:
        _run(use, arguments, 1)
        return 0
    config = read_model(arguments.source, arguments.overrides, nodes.world_size)
    check_layout(config, nodes.world_size)
    words = [json.dumps(vars(arguments)), str(nodes.world_size)]
    return launch_processes(nodes, [*python_call(run_process, use), *words], config, own_exit_codes=False)


def run_process(use: UseOfModel, arguments: str, num_processes: str) -> None:
    """The work of one of several processes; the arguments are those that `run_on_processes` passes."""
    from megatron_wrap.core import exit_on_user_error

    with exit_on_user_error():
        _run(use, argparse.Namespace(**json.loads(arguments)), int(num_processes))


def _run(use: UseOfModel, arguments: argparse.Namespace, num_processes: int) -> None:
    from megatron_wrap.core import MegatronWrap

    with MegatronWrap(read_model(arguments.source, arguments.overrides, num_processes)) as wrap:
        wrap.initialize()
        wrap.setup_model()
        use(wrap, arguments)
