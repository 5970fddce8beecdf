"""Sources of samples: the mappings of `megatron_wrap.data.train` and `.validation`, decoded."""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_wrap.config.keys import describe_key, key
from megatron_wrap.config.mappings import checked_field
from megatron_wrap.config.reading import Node, describe
from megatron_wrap.errors import ConfigError

SourceKind = Literal["file", "folder", "glob", "python", "hub"]
FILE_ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst", ".parquet", ".arrow")
"""File names that a source reads; `.jsonl` and every other ending are JSON lines."""
_PYTHON = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """A mapping of `megatron_wrap.data.train` or `.validation`: where samples come from, their columns, and their share
    of an epoch. A path alone is the mapping with only `path`."""

    path: str = key()
    """File (.jsonl, .json, .parquet, .arrow, JSON also as .gz or .zst), glob, folder of such files, folder of
    `datasets`' save_to_disk, hub id `org/name`, or `my_module:my_dataset` (a sequence, or a function that returns
    one)."""
    name: str = key("", kind="a string or null")
    """Name in samples, metrics and messages; null: from the path."""
    subset: str | None = None
    """Configuration of a hub dataset; null: its default."""
    split: str | None = None
    """Split of a hub id or folder, also a part as in `train[:1000]` or `train[10%:]`; null: train."""
    columns: Mapping[str, str] = key({}, kind="a mapping from our name of a column to the file's, or null")
    """Our name of a column -> its name in the file; other columns keep theirs. null: none is renamed."""
    format: Literal["auto", "messages", "sharegpt", "prompt_completion", "text", "preference", "tokens"] = "auto"
    """What a row contains; a row that does not is refused by file and row. auto: recognized from its columns."""
    weight: float | None = key(None, above=0)
    """Share of an epoch relative to the other sources' weights; an epoch then has as many samples as all sources
    together. Give one of weight, epochs and samples; null for all: epochs 1."""
    epochs: float | None = key(None, above=0)
    """How often an epoch of the run goes through this source."""
    samples: int | None = key(None, at_least=1)
    """Samples of this source in an epoch; of an evaluation set the first ones."""
    sample_weight: float = key(1.0, at_least=0)
    """Factor of the loss weight of each sample, times its column `weight`, if any."""
    max_length: int | None = key(None, at_least=1)
    """Samples with more tokens are left out and counted; null: none, the flow's truncation applies."""
    streaming: bool = False
    """Read in order without random access, for data too large for that; shuffled in blocks of data.shuffle_buffer."""

    @property
    def kind(self) -> SourceKind:
        """What `path` names, from its form and from what exists here; no network."""
        return source_kind(self.path)


def source_kind(path: str) -> SourceKind:
    """What a source's path names: a path that exists is a file or a folder whatever its form."""
    expanded = os.path.expanduser(path)
    if os.path.isdir(expanded):
        return "folder"
    if os.path.exists(expanded):
        return "file"
    if any(sign in path for sign in "*?["):
        return "glob"
    if _PYTHON.fullmatch(path):
        return "python"
    if _HUB.fullmatch(path) and not path.endswith(FILE_ENDINGS) and not os.path.exists(path.partition("/")[0]):
        return "hub"
    return "file"


def decode_sources(node: Node, path: str) -> tuple[SourceConfig, ...]:
    """The sources that a path, a mapping or a list of these names; null: none. Names are unique.

    Raises:
        ConfigError: another value, an unknown key or a wrong type; the message has file, line and dotted path.
    """
    if node.value is None:
        return ()
    if isinstance(node.value, list):
        if not node.value:
            raise ConfigError(f"{node.where} {path}: an empty list; give a path, a mapping or a list of mappings")
        decoded = [_source(item, f"{path}[{place}]") for place, item in enumerate(node.items)]
    else:
        decoded = [_source(node, path)]
    return tuple(_with_names(decoded))


def decode_evaluation_sets(node: Node, path: str) -> Mapping[str, tuple[SourceConfig, ...]]:
    """Name of each evaluation set -> its sources; a path alone is the set `validation`.

    Raises:
        ConfigError: as `decode_sources`.
    """
    if node.value is None:
        return {}
    if isinstance(node.value, str):
        return {"validation": decode_sources(node, path)}
    if not isinstance(node.value, dict):
        raise ConfigError(
            f"{node.where} {path}: must be a path, or a mapping from names to paths or sources, "
            f"not {describe(node.value)}"
        )
    return {name: decode_sources(below, f"{path}.{name}") for name, below in node.value.items()}


def _source(node: Node, path: str) -> SourceConfig:
    if isinstance(node.value, str):
        return SourceConfig(path=node.value)
    if not isinstance(node.value, dict):
        raise ConfigError(f"{node.where} {path}: must be a path or a mapping with path, not {describe(node.value)}")
    optional = {field.name for field in dataclasses.fields(SourceConfig)} - {"path"}
    values = {
        name: checked_field(below, SourceConfig, name, path)
        for name, below in node.value.items()
        if below.value is not None or name not in optional
    }
    if "path" not in values:
        raise ConfigError(f"{node.where} {path}: a source needs path")
    columns = values.get("columns", {})
    if not all(isinstance(theirs, str) for theirs in columns.values()):
        kind = describe_key(SourceConfig, "columns")
        raise ConfigError(f"{node.value['columns'].where} {path}.columns: must be {kind}, not {describe(columns)}")
    return SourceConfig(**values)


def _with_names(sources: Sequence[SourceConfig]) -> list[SourceConfig]:
    """The sources with a name each; of equal names the later ones get a number."""
    named: list[SourceConfig] = []
    for source in sources:
        base = source.name or _name_of(source.path)
        taken = {other.name for other in named}
        names = [base, *(f"{base}-{number}" for number in range(2, len(sources) + 1))]
        named.append(dataclasses.replace(source, name=next(name for name in names if name not in taken)))
    return named


def _name_of(path: str) -> str:
    last = re.split(r"[/:]", path.rstrip("/"))[-1]
    ending = max((ending for ending in FILE_ENDINGS if last.endswith(ending)), key=len, default="")
    return last.removesuffix(ending) or path
