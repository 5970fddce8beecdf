"""Record of how a model was trained, as JSON values in every checkpoint, and the model card that is written from it:
README.md of an exported folder, in the format of the Hugging Face hub.

A card is for publication: it contains only the last part of a local path, and no value that looks like a secret.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

from megatron_wrap.config import RunConfig
from megatron_wrap.config.hugging_face import read_hugging_face_config
from megatron_wrap.config.reading.yaml_nodes import inline_yaml
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.data import source_kind
from megatron_wrap.hidden_secrets import HIDDEN, SECRET_NAME, hide_secrets, without_secrets
from megatron_wrap.utils.atomic_write import write_atomically

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData


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


FILE_NAME = "README.md"
MARK = "<!-- Written by megatron-wrap, which replaces this file at the next export; delete this line to keep it. -->"
_SETTING = re.compile(r"([\w.-]+)(\s*[=:]\s*)('[^']*'|\"[^\"]*\"|[^\s,}\]]+)")
_LOCAL_PATH = re.compile(
    r"(?<![\w.:/~-])(?:~[\w.-]*)?/(?:[^\s/'\",;:\]}]+/)+(?=[^\s'\",;:\]}]*)|(?<![\w.:/~-])~[\w.-]*/"
)
_CACHED_REPOSITORY = re.compile(r"/(?:models|datasets)--([^/]+?)--([^/]+)/snapshots/[0-9a-f]+/?$")


def write_model_card(
    folder: Path,
    record: TrainingRecord,
    iteration: int,
    evaluation: tuple[int, Mapping[str, float]] | None,
    pipeline_tag: str,
) -> None:
    """Write README.md, unless the folder has one that its owner wrote.

    Args:
        record: of the run that trained the model.
        iteration: steps taken.
        evaluation: (iteration, SET/METRIC -> value) of the last evaluation; None: there was none.
        pipeline_tag: the hub's name of the task, such as text-generation.
    """
    path = folder / FILE_NAME
    if path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return
    write_atomically(path, card_text(record, iteration, evaluation, pipeline_tag))


def card_text(
    record: TrainingRecord, iteration: int, evaluation: tuple[int, Mapping[str, float]] | None, pipeline_tag: str
) -> str:
    """The card, from the template `model_card.md.jinja`; arguments as for `write_model_card`."""
    from huggingface_hub import ModelCard

    sources: dict[str, list[str]] = {}
    for source in record["data"]:
        sources.setdefault(source["use"], []).append(_source(source))
    options = {
        name: _code_span(HIDDEN if SECRET_NAME.search(name) else published(value))
        for name, value in record["flow_options"].items()
    }
    card = ModelCard.from_template(
        _metadata(record, evaluation, pipeline_tag),
        template_path=str(Path(__file__).with_name("model_card.md.jinja")),
        record=record,
        mark=MARK,
        base=_base(record),
        iteration=iteration,
        sources=sources,
        command=published(record["command"]),
        options=options,
        evaluation=evaluation,
    )
    return f"{card}\n"


def published(text: str) -> str:
    """The text without secrets, and with only the last part of each absolute path."""
    text = _SETTING.sub(
        lambda match: match[1] + match[2] + (HIDDEN if SECRET_NAME.search(match[1]) else match[3]), hide_secrets(text)
    )
    return _LOCAL_PATH.sub("", text)


def hub_id(path_or_id: str) -> str | None:
    """The hub id of a model or data set, also for its folder in the local cache; None for a local path."""
    cached = _CACHED_REPOSITORY.search(path_or_id)
    if cached is not None:
        return f"{cached[1]}/{cached[2]}"
    return path_or_id if source_kind(path_or_id) == "hub" else None


def _metadata(
    record: TrainingRecord, evaluation: tuple[int, Mapping[str, float]] | None, pipeline_tag: str
) -> ModelCardData:
    from huggingface_hub import EvalResult, ModelCardData

    results = []
    for name, value in ({} if evaluation is None else evaluation[1]).items():
        of_set, _, metric = name.rpartition("/")
        if math.isfinite(value):
            results.append(EvalResult(pipeline_tag, of_set, of_set, metric, value))
    base = None if record["base_model"] is None else hub_id(record["base_model"])
    identifiers = [hub_id(source["path"]) for source in record["data"] if source["kind"] in ("hub", "folder")]
    datasets = list(dict.fromkeys(identifier for identifier in identifiers if identifier is not None))
    return ModelCardData(
        base_model=base,
        datasets=datasets or None,
        eval_results=results or None,
        library_name="transformers",
        model_name=record["name"],
        pipeline_tag=pipeline_tag,
        tags=["megatron-wrap", record["flow"]],
    )


def _base(record: TrainingRecord) -> str:
    if record["base_checkpoint"] is not None:
        return f"checkpoint {_code_span(_last_part(record['base_checkpoint']))}"
    if record["base_model"] is None:
        return "none, trained from initial weights"
    return _link(record["base_model"], "https://huggingface.co/")


def _source(source: DataRecord) -> str:
    texts = {
        "mock": "generated samples",
        "none": "samples passed by a program",
        "python": _code_span(source["path"]),
    }
    return texts.get(source["kind"]) or _link(source["path"], "https://huggingface.co/datasets/")


def _link(path_or_id: str, site: str) -> str:
    """A link to a repository of the hub, or the last part of a local path."""
    identifier = hub_id(path_or_id)
    return _code_span(_last_part(path_or_id)) if identifier is None else f"[{identifier}]({site}{identifier})"


def _last_part(path: str) -> str:
    return published(Path(path).name or path)


def _code_span(text: str) -> str:
    """Code in a cell of a table, on one line."""
    fence = "``" if "`" in text else "`"
    return f"{fence}{' '.join(text.split())}{fence}".replace("|", "\\|")
