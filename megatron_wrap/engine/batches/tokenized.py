"""The tokenized cache of a run's sources: its key, and its samples by position."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import megatron_wrap.data
from megatron_wrap.config.schema.data import SourceConfig
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.data.cache.precomputed import MANIFEST
from megatron_wrap.data.cache.token_cache import TokenCache, open_cache
from megatron_wrap.data.chat.tokenizer import fingerprint
from megatron_wrap.data.order.sample_reader import Preparation
from megatron_wrap.data.order.sample_sets import open_source
from megatron_wrap.data.order.stream import SampleStream
from megatron_wrap.data.sources.files import data_files
from megatron_wrap.flow import MegatronWrapTrainingFlowBase

_SHARES = ("weight", "epochs", "samples")
"""Keys of a source that change how often its samples are read, but not the samples themselves."""
_MOST_PROCESSES = 16


class CachedSamples:
    """Prepared samples by position of a stream.

    Args:
        stream: the order of samples.
        caches: the cache of each source; None for a source without one.
    """

    def __init__(self, stream: SampleStream, caches: Sequence[TokenCache | None]) -> None:
        self._stream, self._caches = stream, caches

    def get(self, position: int) -> Any:
        """See `PreparedSamples`."""
        located = self._stream.row(position)
        cache = None if located is None else self._caches[located.source]
        return None if located is None or cache is None else cache.get(located.row)

    def lengths(self, position: int) -> Sequence[int] | None:
        """See `PreparedSamples`."""
        located = self._stream.row(position)
        cache = None if located is None else self._caches[located.source]
        return None if located is None or cache is None else cache.lengths(located.row)


def cached_samples(
    config: RunConfig,
    sources: Sequence[SourceConfig],
    stream: SampleStream,
    flow: MegatronWrapTrainingFlowBase,
    preparation: Preparation,
) -> CachedSamples | None:
    """The samples in `megatron_wrap.data.cache_dir`; caches that are missing are written first. None without that key.

    Args:
        sources: of the stream, in its order.

    Raises:
        DataError: as `open_cache`.
    """
    folder = config.data.cache_dir
    if folder is None or not sources:
        return None
    flow_key = {**_flow_key(flow), **_precomputed_key(config)}
    caches: list[TokenCache | None] = []
    for source in sources:
        source_key = _source_key(source)
        if source_key is None:
            caches.append(None)
            continue
        key = {"source": source_key, **flow_key}
        skip_bad = config.data.on_bad_sample == "skip"
        rows = functools.partial(open_source, source)
        # these processes tokenize while the other ranks of the node wait
        processes = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))
        caches.append(open_cache(folder, key, rows, preparation, skip_bad, processes))
    return CachedSamples(stream, caches)


def _source_key(source: SourceConfig) -> dict[str, Any] | None:
    """Everything that the rows of a source depend on; None if that is not known without reading them."""
    if source.streaming or source.kind == "python":
        return None
    keys = {name: value for name, value in dataclasses.asdict(source).items() if name not in _SHARES}
    if source.kind == "hub":
        from megatron_wrap.data.sources.tables import load_hub

        dataset = load_hub(source.path, source.subset, source.split, streaming=False)
        return {**keys, "fingerprint": dataset._fingerprint}
    return {**keys, "files": [_file_key(path) for path in _files(source)]}


def _files(source: SourceConfig) -> list[str]:
    folder = Path(os.path.expanduser(source.path))
    if folder.is_dir():
        return sorted(str(path) for path in folder.rglob("*") if path.is_file())
    return data_files(source)


def _file_key(path: str) -> list[Any]:
    absolute = os.path.abspath(os.path.expanduser(path))
    stat = os.stat(absolute)
    return [absolute, stat.st_size, stat.st_mtime_ns]


def _flow_key(flow: MegatronWrapTrainingFlowBase) -> dict[str, Any]:
    """Everything that the prepared form of a row depends on: the flow's code, options and tokenizer, and the code of
    `megatron_wrap.data`."""
    values, tokenizer = vars(flow.flow_config), flow.context.tokenizer
    code = sorted(Path(megatron_wrap.data.__file__).parent.rglob("*.py"))
    return {
        "flow": [f"{base.__module__}.{base.__qualname__} {_hash(_source(base))}" for base in type(flow).__mro__[:-1]],
        "options": {name: str(value) for name, value in values.items()},
        "seq_length": flow.seq_length,
        "vocab_size": flow.context.num_token_ids,
        "tokenizer": None if tokenizer is None else fingerprint(tokenizer, "samples"),
        "code": _hash("".join(path.read_text("utf-8") for path in code)),
    }


def _precomputed_key(config: RunConfig) -> dict[str, Any]:
    """The identity of the precomputed outputs of a reference model that prepared samples contain; empty without
    them."""
    reference = config.models.reference_or_teacher
    if reference is None or reference.precomputed is None:
        return {}
    return {"precomputed": _file_key(os.path.join(reference.precomputed, MANIFEST))}


def _source(flow_class: type) -> str:
    try:
        return inspect.getsource(flow_class)
    except (OSError, TypeError):  # defined in an interpreter
        return ""


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
