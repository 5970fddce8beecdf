"""What a command looks at before it starts processes: configuration, layout and data files, in this one process."""

from collections.abc import Sequence
from pathlib import Path

from megatron_wrap.core.config.checks import check_layout, check_run
from megatron_wrap.core.config.decode import load_run_config
from megatron_wrap.core.config.schema import RunConfig


def check_data(config: RunConfig) -> None:
    """Parses every line of the JSON lines files that the configuration names.

    Raises:
        DataError: a missing file or a malformed line, with its number.
    """
    if config.data.data_key != "jsonl":
        return
    from megatron_wrap.data.jsonl import JsonLines

    files = [config.data.train, *config.data.validation.values()]
    for file in dict.fromkeys(file for file in files if file is not None):
        JsonLines(Path(file)).check()


def precheck(path: str, overrides: Sequence[str], world_size: int | None = None) -> RunConfig:
    """The configuration of a run, held against everything that needs no process group.

    Args:
        world_size: processes over all nodes; None: not known yet.

    Raises:
        MegatronWrapError: the first thing that is wrong.
    """
    config = load_run_config(path, overrides)
    check_run(config)
    if world_size is not None:
        check_layout(config, world_size)
    check_data(config)
    return config
