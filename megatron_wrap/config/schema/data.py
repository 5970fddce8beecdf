"""The section of data: the samples that a run trains on and evaluates, where they come from, and their reading."""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_wrap.config.reading.yaml_nodes import Node, describe
from megatron_wrap.config.schema.keys import checked_field, describe_key, key
from megatron_wrap.errors import ConfigError

SourceKind = Literal["file", "folder", "glob", "python", "hub"]
FILE_ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst", ".parquet", ".arrow")
"""File endings that a source recognizes; a file with another ending is read as JSON lines."""
_PYTHON = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """A mapping of `megatron_wrap.data.train` or `.validation`: where samples come from, their columns, and their share
    of an epoch. A path alone means a mapping with only `path`."""

    path: str = key()
    """File (.jsonl, .json, .parquet, .arrow, JSON also as .gz or .zst), also by URL (s3://, gs://, hf://), glob, folder
    of such files, folder of `datasets`' save_to_disk, hub id `org/name`, or `my_module:my_dataset` (a sequence, or a
    function that returns one)."""
    name: str = key("", kind="a string or null")
    """Name in samples, metrics and messages; null: derived from the path."""
    subset: str | None = None
    """Configuration of a hub dataset; null: its default."""
    split: str | None = None
    """Split of a hub id or folder, also a part as in `train[:1000]` or `train[10%:]`; null: train."""
    columns: Mapping[str, str] = key({}, kind="a mapping from our name of a column to the file's, or null")
    """Our name of a column -> its name in the file, for columns to rename; null: none."""
    format: Literal["auto", "messages", "sharegpt", "prompt_completion", "text", "preference", "tokens"] = "auto"
    """Content of a row; another row is refused with its file and number. auto: recognized from the columns."""
    weight: float | None = key(None, above=0)
    """Share of an epoch relative to the other sources' weights; an epoch then has as many samples as all sources
    together. Set one of weight, epochs and samples; all null: epochs 1."""
    epochs: float | None = key(None, above=0)
    """Number of passes over this source in an epoch of the run."""
    samples: int | None = key(None, at_least=1)
    """Number of samples of this source in an epoch; of an evaluation set, its first samples."""
    sample_weight: float = key(1.0, at_least=0)
    """Factor of each sample's loss weight, multiplied with its column `weight`, if any."""
    max_length: int | None = key(None, at_least=1)
    """Samples with more tokens are dropped and counted; null: the flow's truncation applies."""
    streaming: bool = False
    """Read in order instead of by random access, for very large data; shuffled in blocks of data.shuffle_buffer."""

    @property
    def kind(self) -> SourceKind:
        """Kind of source that `path` names, from its form and from the files that exist here; no network."""
        return source_kind(self.path)


def source_kind(path: str) -> SourceKind:
    """Kind of source that a path names. An existing path is a file or a folder, whatever its form."""
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
    """The sources that a path, a mapping or a list of these defines; null: none. Names are unique.

    Raises:
        ConfigError: another value, an unknown key or a wrong type; the message has file, line and dotted path.
    """
    if node.value is None:
        return ()
    if isinstance(node.value, list):
        if not node.value:
            raise ConfigError(f"{node.where} {path}: an empty list; give a path, a mapping or a list of mappings")
        decoded = [_source(item, f"{path}[{index}]") for index, item in enumerate(node.items)]
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
    return {name: decode_sources(sources, f"{path}.{name}") for name, sources in node.value.items()}


def _source(node: Node, path: str) -> SourceConfig:
    if isinstance(node.value, str):
        return SourceConfig(path=node.value)
    if not isinstance(node.value, dict):
        raise ConfigError(f"{node.where} {path}: must be a path or a mapping with path, not {describe(node.value)}")
    optional = {field.name for field in dataclasses.fields(SourceConfig)} - {"path"}
    values = {
        name: checked_field(value, SourceConfig, name, path)
        for name, value in node.value.items()
        if value.value is not None or name not in optional
    }
    if "path" not in values:
        raise ConfigError(f"{node.where} {path}: a source needs path")
    columns = values.get("columns", {})
    if not all(isinstance(column, str) for column in columns.values()):
        kind = describe_key(SourceConfig, "columns")
        raise ConfigError(f"{node.value['columns'].where} {path}.columns: must be {kind}, not {describe(columns)}")
    return SourceConfig(**values)


def _with_names(sources: Sequence[SourceConfig]) -> list[SourceConfig]:
    """The sources with unique names: a name that is taken gets a number."""
    named: list[SourceConfig] = []
    for source in sources:
        base = source.name or _name_of(source.path)
        used = {other.name for other in named}
        names = [base, *(f"{base}-{number}" for number in range(2, len(sources) + 1))]
        named.append(dataclasses.replace(source, name=next(name for name in names if name not in used)))
    return named


def _name_of(path: str) -> str:
    last = re.split(r"[/:]", path.rstrip("/"))[-1]
    ending = max((ending for ending in FILE_ENDINGS if last.endswith(ending)), key=len, default="")
    return last.removesuffix(ending) or path


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """`megatron_wrap.data`: the samples of `wrap.batches()` and `wrap.evaluate()`. A relative path is relative to the
    working directory."""

    data_key: Literal["none", "dataset", "jsonl", "indexed", "mock"] = "none"
    """none: the caller passes samples; dataset: files, folders or hub ids, for which jsonl is another name; indexed:
    windows of Megatron's .bin and .idx files, for gpt_pretrain; mock: numbered empty samples for a flow that generates
    its own."""
    train: tuple[SourceConfig, ...] = key((), kind="a path, a source's mapping, a list of these, or null")
    """Training samples: a file, folder or hub id, a source with the keys below, or a list of sources, which are mixed;
    null: none."""
    validation: Mapping[str, tuple[SourceConfig, ...]] = key(
        {}, kind="a path, a mapping from names to paths or sources, or null"
    )
    """Path of the evaluation set `validation`, or name of each set -> its path, source or list of sources; null:
    none."""
    on_bad_sample: Literal["error", "skip"] = "error"
    """A row that cannot be read or encoded: stop and name file and row, or skip and count it."""
    num_workers: int = key(1, at_least=0)
    """Processes on each replica that read, tokenize and collate ahead of the training step; 0: the step itself."""
    prefetch_batches: int = key(2, at_least=1)
    """Number of global batches that are prepared ahead."""
    shuffle_buffer: int = key(1000, at_least=1)
    """Number of samples of a streaming source that are shuffled together, block by block."""
    cache_dir: str | None = None
    """Folder of cached tokenized samples, by data, tokenizer and template; null: no cache. indexed: folder of the
    indices; null: `cache` in the folder of the first prefix."""
    packing_window: int = key(1024, at_least=1)
    """With flow.packing, number of samples that are packed into rows together; more samples fill the rows better, but
    randomize the order less."""
    num_samples: int = key(1024, at_least=1)
    """Number of samples of mock data."""
    shuffle: bool = True
    """A different order of the samples in each epoch, determined by the seed; false: the order of the files."""
    tokenizer: str | None = None
    """Hugging Face tokenizer folder; null: the tokenizer of model_provider.hf_path, if any."""
    new_tokens: tuple[str, ...] = ()
    """Texts that the tokenizer gets as tokens. Their rows of embedding and output layer begin as the mean of the
    others, and are added where the model of hf_path has none for them; exports contain the grown tokenizer."""
    split: str | None = None
    """indexed: shares of each prefix's documents for training, validation and test, such as 949,50,1; null: all
    documents of train are for training, and validation has its own prefixes."""
    mock_data: bool = False
    """indexed: Megatron-Core's generated documents instead of train."""
    eod_token: int | None = key(None, at_least=0)
    """indexed: id of the token that ends a document; null: the tokenizer's eos token."""
    eod_mask_loss: bool = False
    """indexed: no loss where the input is the end of a document."""
    reset_position_ids: bool = False
    """indexed: positions begin at 0 in each document."""
    reset_attention_mask: bool = False
    """indexed: tokens attend only to their own document; needs flow.packing."""
    index_samples: int | None = key(None, at_least=1)
    """indexed: windows in the training index, which determine their order; null: those of the run. To continue a run
    with another length, keep the number; after the last window, the index begins again."""
