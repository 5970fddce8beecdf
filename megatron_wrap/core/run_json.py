"""`run.json`, the description of a run, written next to its metrics when its training begins, for `megatron-wrap
report`."""

from __future__ import annotations

import datetime
import json
import os
import platform as host
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_wrap.bridge.export.model_card import package_versions
from megatron_wrap.checkpoint.saved_tensors import layout_record
from megatron_wrap.config import RunConfig
from megatron_wrap.config.reading.yaml_nodes import inline_yaml
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.errors import DataError
from megatron_wrap.hidden_secrets import without_secrets
from megatron_wrap.report.run_files import read_run_files
from megatron_wrap.utils.atomic_write import named_write_errors, write_atomically
from megatron_wrap.utils.dist_logger import logger
from megatron_wrap.utils.logger_errors import WRITABLE

FILE_NAME = "run.json"


def recorded_evaluation(output_dir: str, iteration: int) -> tuple[int, Mapping[str, float]] | None:
    """Iteration and metrics, SET/METRIC -> value, of the last evaluation up to `iteration` in a run's records; None if
    there is none, or the records were moved."""
    try:
        evaluations = read_run_files(output_dir).evaluations
    except DataError:
        return None
    before = [evaluated for evaluated in evaluations if evaluated <= iteration]
    return (before[-1], evaluations[before[-1]]) if before else None


def write_run_facts(state: TrainingState, output_dir: Path, resumed_from: int | None) -> None:
    """Write `output_dir/run.json` on rank 0: name, flow, layout, environment, folder of the checkpoints, and each value
    of the configuration with its origin. A resumed run replaces it.

    Args:
        resumed_from: iteration of the checkpoint that the run resumes from.

    Raises:
        ConfigError: the file cannot be written.
    """
    if logger.rank != 0:
        return
    config, parallel = state.config, state.parallel
    facts = {
        "name": config.name,
        "flow": config.flow.flow_key,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "resumed_from": resumed_from,
        "train_iters": config.train.train_iters,
        "checkpoints": None if config.train.save is None else os.path.abspath(os.path.expanduser(config.train.save)),
        "layout": layout_record(parallel, state.platform.name),
        "processes": parallel.world.size,
        "environment": _environment(state),
    }
    values = [[path, value, str(config.origins[path])] for path, value in _values(config).items()]
    path = output_dir / FILE_NAME
    with named_write_errors(path, WRITABLE):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, _json(facts, values))


def _json(facts: Mapping[str, Any], values: Sequence[list[str]]) -> str:
    """The facts as JSON, with a line for each value of the configuration. The values are encoded without an indent,
    which json does in C."""
    text = json.dumps(facts, indent=1, ensure_ascii=False).removesuffix("\n}")
    lines = ",\n  ".join(json.dumps(value, ensure_ascii=False) for value in values)
    return f'{text},\n "configuration": [\n  {lines}\n ]\n}}\n'


def _values(config: RunConfig) -> dict[str, str]:
    """Dotted path of each value with a known origin -> the value as YAML, without secrets."""
    values, resolved = {}, without_secrets(config.resolved)
    for path in config.origins:
        value: Any = resolved
        for part in path.split("."):
            value = value.get(part, KeyError) if isinstance(value, Mapping) else KeyError
        if value is not KeyError:
            values[path] = inline_yaml(value)
    return values


def _environment(state: TrainingState) -> dict[str, str]:
    """Names and versions of this process's machine and packages."""
    device = state.platform.device
    if device.type == "cuda":
        import torch

        device_name = torch.cuda.get_device_name(device)
    else:
        device_name = host.machine()
    facts = {"platform": state.platform.name, "device": device_name, "host": host.node(), "system": host.platform()}
    facts["python"] = host.python_version()
    return {**facts, **package_versions()}
