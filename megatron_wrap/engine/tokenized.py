"""The tokenized cache of a run's sources: what it depends on, and its samples by position."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import megatron_wrap.data
from megatron_wrap.config.schema import RunConfig
from megatron_wrap.config.sources import SourceConfig
from megatron_wrap.data.files import data_files
from megatron_wrap.data.precomputed import MANIFEST
from megatron_wrap.data.reader import Preparation
from megatron_wrap.data.sources import open_source
from megatron_wrap.data.stream import SampleStream
from megatron_wrap.data.token_cache import TokenCache, open_cache
from megatron_wrap.flow import MegatronWrapTrainingFlowBase

_SHARES = ("weight", "epochs", "samples")
"""Keys of a source that change how often its samples come, and not the samples."""
_MOST_PROCESSES = 16


class CachedSamples:
    """Prepared samples by position of a stream.

    Args:
        stream: the order of samples.
        caches: of each source; None: the source has none.
    """

    def __init__(self, stream: SampleStream, caches: Sequence[TokenCache | None]) -> None:
        self._stream, self._caches = stream, caches

    def get(self, position: int) -> Any:
        """See `PreparedSamples`."""
        cache, row = self._place(position)
        return cache.get(row)

    def lengths(self, position: int) -> Sequence[int]:
        """See `PreparedSamples`."""
        cache, row = self._place(position)
        return cache.lengths(row)

    def _place(self, position: int) -> tuple[TokenCache, int]:
        place = self._stream.row(position)
        cache = None if place is None else self._caches[place[0]]
        if place is None or cache is None:
            raise KeyError(position)
        return cache, place[1]


def cached_samples(
    config: RunConfig,
    sources: Sequence[SourceConfig],
    stream: SampleStream,
    flow: MegatronWrapTrainingFlowBase,
    preparation: Preparation,
) -> CachedSamples | None:
    """The samples of `megatron_wrap.data.cache_dir`, written now where they are missing; None without that key.

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
        caches.append(open_cache(folder, key, _opener(source), preparation, skip_bad, _processes()))
    return CachedSamples(stream, caches)


def _opener(source: SourceConfig) -> Any:
    return lambda: open_source(source)


def _processes() -> int:
    """Processes that tokenize while the other ranks of the node wait."""
    return min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))


def _source_key(source: SourceConfig) -> dict[str, Any] | None:
    """What the rows of a source depend on; None if that cannot be known without reading them."""
    if source.streaming or source.kind == "python":
        return None
    keys = {name: value for name, value in dataclasses.asdict(source).items() if name not in _SHARES}
    if source.kind == "hub":
        from megatron_wrap.data.tables import load_hub

        found = load_hub(source.path, source.subset, source.split, streaming=False)
        return {**keys, "fingerprint": getattr(found, "_fingerprint", None)}
    return {**keys, "files": [_file_key(path) for path in _files(source)]}


def _files(source: SourceConfig) -> list[str]:
    folder = Path(os.path.expanduser(source.path))
    if folder.is_dir():
        return sorted(str(path) for path in folder.rglob("*") if path.is_file())
    return data_files(source)


def _file_key(path: str) -> list[Any]:
    found = os.stat(os.path.expanduser(path))
    return [os.path.abspath(os.path.expanduser(path)), found.st_size, found.st_mtime_ns]


def _flow_key(flow: MegatronWrapTrainingFlowBase) -> dict[str, Any]:
    """What the prepared form of a row depends on: the flow's code, options and tokenizer, and this package's data
    code."""
    values = vars(flow.flow_config)
    own = Path(megatron_wrap.data.__file__).parent
    return {
        "flow": [f"{base.__module__}.{base.__qualname__} {_hash(_source(base))}" for base in type(flow).__mro__[:-1]],
        "options": {name: str(value) for name, value in values.items()},
        "seq_length": flow.seq_length,
        "vocab_size": flow.vocab_size,
        "tokenizer": tokenizer_key(flow.context.tokenizer),
        "code": _hash("".join(path.read_text("utf-8") for path in sorted(own.glob("*.py")))),
    }


def _precomputed_key(config: RunConfig) -> dict[str, Any]:
    """The precomputed outputs of a reference model that prepared samples contain; empty without them."""
    reference = config.models.second
    if reference is None or reference.precomputed is None:
        return {}
    return {"precomputed": _file_key(os.path.join(reference.precomputed, MANIFEST))}


def tokenizer_key(tokenizer: Any) -> str | None:
    """A hash of a tokenizer with its template."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = tokenizer.get_vocab() if backend is None else backend.to_str()
    parts = [type(tokenizer).__name__, vocabulary, tokenizer.chat_template, tokenizer.special_tokens_map]
    return _hash(json.dumps(parts, sort_keys=True, default=str))


def _source(flow_class: type) -> str:
    try:
        return inspect.getsource(flow_class)
    except (OSError, TypeError):  # defined in an interpreter
        return ""


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
