"""Record of how a model was trained, as JSON values. A checkpoint contains it, and a model card is written from it."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict, cast

from megatron_wrap.config import RunConfig
from megatron_wrap.config.hugging_face import read_hugging_face_config
from megatron_wrap.config.reading.yaml_nodes import inline_yaml
from megatron_wrap.config.schema import derived
from megatron_wrap.hidden_secrets import without_secrets

PACKAGES = ("megatron-wrap", "torch", "megatron-core", "transformer-engine", "triton", "transformers")
"""Distributions whose versions are recorded."""


class DataRecord(TypedDict):
    """A source of samples."""

    use: str
    """Use of the source: training, or the name of an evaluation set."""
    path: str
    kind: str
    """Kind of the source, as `SourceConfig.kind`; mock for numbered samples; none for samples that a program passes."""


class TrainingRecord(TypedDict):
    """A training run; paths are as in its configuration."""

    name: str
    base_model: str | None
    """Hugging Face folder or hub id of the initial weights."""
    base_quantization: str | None
    """Kind of quantization of the weights in the folder `base_model`; null if they are not quantized."""
    base_checkpoint: str | None
    """Checkpoint of the initial weights."""
    data: list[DataRecord]
    flow: str
    flow_options: dict[str, str]
    """Key of `megatron_wrap.flow` -> its value as YAML text."""
    versions: dict[str, str]
    command: str
    """Command that started the run."""
    output_dir: str
    """Folder of metrics.jsonl, absolute."""


def training_record(config: RunConfig) -> TrainingRecord:
    """The record of a run in this process, without secrets."""
    flow, data = config.flow, config.data
    sources = [("training", derived.training_sources(config)), *derived.validation_sources(config).items()]
    if derived.is_indexed(data):
        sources = [("training", data.train), *data.validation.items()]
    records = [DataRecord(use=use, path=source.path, kind=source.kind) for use, of_use in sources for source in of_use]
    options = {"packing": flow.packing, **flow.options}
    record = TrainingRecord(
        name=config.name,
        base_model=config.model_provider.hf_path,
        base_quantization=_quantization(config.model_provider.hf_path),
        base_checkpoint=config.train.load,
        data=records or [DataRecord(use="training", path="", kind="mock" if data.data_key == "mock" else "none")],
        flow=flow.flow_key,
        flow_options={key: inline_yaml(value) for key, value in without_secrets(options).items()},
        versions={"python": platform.python_version(), **package_versions()},
        command=command_line(sys.argv),
        output_dir=os.path.abspath(os.path.expanduser(derived.output_dir(config))),
    )
    return cast(TrainingRecord, without_secrets(record))


def _quantization(hf_path: str | None) -> str | None:
    quantization = None if hf_path is None else read_hugging_face_config(hf_path).quantization
    return None if quantization is None else quantization.shown


@functools.cache
def package_versions() -> Mapping[str, str]:
    """Name -> version of the installed distributions among `PACKAGES`."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def command_line(argv: Sequence[str]) -> str:
    """The command of this process, as a user types it: a process of `megatron-wrap train` runs examples/train.py."""
    program, *arguments = argv
    path = Path(program)
    if path.parts[-2:] == ("examples", "train.py"):
        words = ["megatron-wrap", "train", *arguments]
    elif path.name == "megatron-wrap" or path.parts[-2:] == ("cli", "main.py"):
        words = ["megatron-wrap", *arguments]
    else:
        words = ["python", program, *arguments]
    return shlex.join(words)
