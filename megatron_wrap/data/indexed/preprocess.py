"""Converts files of text to Megatron-LM's `.bin` and `.idx` in worker processes; an interrupted run resumes.

Every few seconds, PREFIX.preprocess.json records how many rows of which input file were read and how many bytes of each
output were written. A run with the same settings resumes from there, and its files are those of a run without a
stop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from megatron_wrap.data.chat.text_tokens import lone_surrogate
from megatron_wrap.data.chat.tokenizer import end_token_id, fingerprint, load_tokenizer
from megatron_wrap.data.indexed.documents import Batch, InputFiles, Position, Texts, Unit, texts_of
from megatron_wrap.data.indexed.index_files import Documents, GrowingFiles, delete_unfinished, token_dtype, write_pair
from megatron_wrap.data.indexed.preprocess_record import CONTINUES, PreprocessProgress, Record
from megatron_wrap.data.sources.rows import BadSample
from megatron_wrap.errors import DataError
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.utils.atomic_write import named_write_errors
from megatron_wrap.utils.pools.processes import ProcessPool

_MESSAGES = 5


@dataclass(frozen=True)
class Encoded:
    """The documents of one batch.

    Attributes:
        documents: of each key.
        rows: rows of the batch.
        bad: number of rows that were left out.
        messages: about the first rows that were left out.
        text_bytes: size of the encoded texts in UTF-8.
    """

    documents: list[Documents]
    rows: int
    bad: int
    messages: list[str]
    text_bytes: int


class Encoder:
    """Converts a batch to token ids: those of `tokenizer(text, add_special_tokens=False)`, with the end of a document.

    Args:
        tokenizer: of transformers. With a fast one, texts are encoded in batches by the tokenizers library.
        keys: of the rows that are encoded.
        append_eod: add the eos token after the last sequence of each document.

    Raises:
        DataError: `append_eod`, and the tokenizer has no eos token.
    """

    def __init__(self, tokenizer: Any, keys: Sequence[str], append_eod: bool) -> None:
        self._keys = list(keys)
        self._eod = [end_token_id(tokenizer)] if append_eod else []
        self.dtype = token_dtype(len(tokenizer))
        by_library = tokenizer.is_fast and not getattr(tokenizer, "split_special_tokens", False)
        self._tokenizer, self._fast = tokenizer, _plain_copy(tokenizer) if by_library else None

    def __call__(self, batch: Batch) -> Encoded:
        """The documents of a batch, without those whose row cannot be used or that have no token in one of the keys."""
        good: list[tuple[str, list[Texts]]] = []
        messages: list[str] = []
        text_bytes = 0
        for where, document in texts_of(batch, self._keys):
            if isinstance(document, BadSample):
                messages.append(str(document))
                continue
            try:
                text_bytes += sum(len(text.encode()) for texts in document for text in texts)
                good.append((where, document))
            except UnicodeEncodeError as error:
                messages.append(f"{where}: {lone_surrogate(error)}")
        ids = iter(self._ids([text for _, document in good for texts in document for text in texts]))
        kept: list[list[list[list[int]]]] = []
        for where, document in good:
            encoded = [[next(ids) for _ in texts] for texts in document]
            empty = [key for key, sequences in zip(self._keys, encoded, strict=True) if not any(sequences)]
            if empty:
                messages.append(f"{where}: an empty document ({empty[0]!r} has no token)")
            else:
                kept.append(encoded)
        documents = [self._documents([encoded[number] for encoded in kept]) for number in range(len(self._keys))]
        return Encoded(documents, len(batch.rows), len(messages), messages[:_MESSAGES], text_bytes)

    def _documents(self, documents: list[list[list[int]]]) -> Documents:
        pieces: list[list[int]] = []
        lengths: list[int] = []
        sequences: list[int] = []
        for document in documents:
            filled = [ids for ids in document if ids]
            pieces += [*filled, self._eod]
            lengths += map(len, filled)
            lengths[-1] += len(self._eod)
            sequences.append(len(filled))
        arrays = [np.array(piece, self.dtype) for piece in pieces if piece]
        tokens = np.concatenate(arrays) if arrays else np.empty(0, self.dtype)
        return Documents(tokens, np.array(lengths, np.int32), np.array(sequences, np.int64))

    def _ids(self, texts: list[str]) -> Iterable[list[int]]:
        if self._fast is None:
            return (self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        encode = getattr(self._fast, "encode_batch_fast", self._fast.encode_batch)  # the first computes no offsets
        return (encoding.ids for encoding in encode(texts, add_special_tokens=False))


def _plain_copy(tokenizer: Any) -> Any:
    """The tokenizer of the tokenizers library as transformers calls it: without truncation and padding."""
    copy = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Inputs, outputs and settings; the names are those of Megatron-LM's preprocess_data.py.

    Attributes:
        input: files, patterns and folders. tokenizer: Hugging Face folder or hub id. output_prefix: of the files
        PREFIX_KEY_document.bin and .idx. json_keys: keys of JSON rows and columns of tables; each gets files of its
        own. append_eod: add the tokenizer's eos token to the end of each document. workers: processes that encode, at
        least 1; the files do not depend on it. partitions: number of parts over which documents are distributed
        round-robin; the files contain the parts concatenated. keep_sequential_samples: keep the order of the input in
        spite of `partitions`. max_documents: rows to read; None: all. suffixes: endings of file names to take from
        folders and patterns. text_unit: the unit of a document in files that are neither JSON nor tables.
        on_bad_document: whether a row that is empty or cannot be used ends the run, or is left out and counted.
    """

    input: Sequence[str]
    tokenizer: str
    output_prefix: str
    json_keys: Sequence[str] = ("text",)
    append_eod: bool = False
    workers: int = 1
    partitions: int = 1
    keep_sequential_samples: bool = False
    max_documents: int | None = None
    suffixes: Sequence[str] = ()
    text_unit: Unit = "file"
    on_bad_document: Literal["error", "skip"] = "error"

    @property
    def parts(self) -> int:
        """Number of parts over which documents are distributed."""
        return 1 if self.keep_sequential_samples else self.partitions

    def prefix(self, key: str) -> str:
        """Path of a key's files without .bin and .idx."""
        return f"{os.path.abspath(os.path.expanduser(self.output_prefix))}_{key}_document"


def preprocess(
    settings: Preprocessing, report: Callable[[PreprocessProgress], None] = lambda _: None, record_seconds: float = 2.0
) -> PreprocessProgress:
    """Write the files of a preprocessing, or resume it. Complete files are left as they are.

    Args:
        report: called with the progress after each batch, and first with that of an earlier run.
        record_seconds: time between two records of the progress.

    Raises:
        DataError: an input, row or tokenizer cannot be used; the output is of other settings, or cannot be written.
    """
    inputs = InputFiles(settings.input, settings.json_keys, settings.suffixes, settings.text_unit)
    tokenizer = load_tokenizer(settings.tokenizer)
    encoder = Encoder(tokenizer, settings.json_keys, settings.append_eod)
    finals = [settings.prefix(key) + end for key in settings.json_keys for end in (".bin", ".idx")]
    vocabulary = {"tokenizer": settings.tokenizer, "sha256": fingerprint(tokenizer, "vocabulary")}
    record = Record(settings.output_prefix, finals, _dependencies(settings, inputs, tokenizer), vocabulary)
    progress = record.read()
    progress.total_bytes = inputs.total_bytes
    report(progress)
    if progress.complete:
        return progress
    pool = ProcessPool(encoder, settings.workers)  # forked before files are opened
    with contextlib.closing(pool), record.locked():
        outputs = _Outputs(settings, encoder.dtype, progress)
        with named_write_errors(settings.output_prefix, CONTINUES, DataError):
            if not progress.all_read:
                _encode(settings, inputs, pool, outputs, progress, record, report, record_seconds)
            if progress.documents == 0:
                outputs.delete()
                record.delete()
                first = f" ({progress.messages[0]})" if progress.messages else ""
                raise DataError(f"{', '.join(settings.input)}: {counted(progress.rows, 'row')} and no document{first}")
            outputs.finish()
            outputs.delete()
            progress.complete, progress.files = True, {}
            record.write(progress)
    return progress


def _encode(
    settings: Preprocessing,
    inputs: InputFiles,
    pool: ProcessPool[Batch, Encoded],
    outputs: _Outputs,
    progress: PreprocessProgress,
    record: Record,
    report: Callable[[PreprocessProgress], None],
    record_seconds: float,
) -> None:
    recorded, whole = time.monotonic(), True
    limit = None if settings.max_documents is None else settings.max_documents - progress.rows
    try:
        for batch, encoded in pool.map(_first_rows(inputs.read(Position(*progress.position)), limit)):
            if encoded.bad and settings.on_bad_document == "error":
                raise DataError(f"{encoded.messages[0]}; correct it, or leave such out with --on-bad-document skip")
            whole = False
            outputs.append(encoded, progress.documents)
            _count(progress, batch, encoded)
            whole = True
            if time.monotonic() - recorded >= record_seconds:
                progress.files = outputs.sync()
                record.write(progress)
                recorded = time.monotonic()
            report(progress)
        progress.all_read = True
    finally:  # also after Ctrl-C and a bad row, but not in the middle of a batch
        if progress.rows == 0:
            outputs.delete()
        elif whole:
            progress.files = outputs.sync()
            record.write(progress)


def _count(progress: PreprocessProgress, batch: Batch, encoded: Encoded) -> None:
    progress.position, progress.done_bytes = batch.end, batch.done_bytes
    progress.rows += encoded.rows
    progress.documents += len(encoded.documents[0].sequences)
    progress.left_out += encoded.bad
    progress.tokens += sum(len(documents.tokens) for documents in encoded.documents)
    progress.text_bytes += encoded.text_bytes
    progress.messages = [*progress.messages, *encoded.messages][:_MESSAGES]


def _first_rows(batches: Iterator[Batch], limit: int | None) -> Iterator[Batch]:
    for batch in batches:
        if limit is not None and len(batch.rows) >= limit:
            if limit > 0:
                yield dataclasses.replace(batch, numbers=batch.numbers[:limit], rows=batch.rows[:limit])
            return
        limit = None if limit is None else limit - len(batch.rows)
        yield batch


class _Outputs:
    """The growing files of each key and part."""

    def __init__(self, settings: Preprocessing, dtype: np.dtype, progress: PreprocessProgress) -> None:
        self._keys, self._parts = list(settings.json_keys), settings.parts
        self._prefixes = [settings.prefix(key) for key in self._keys]
        self._files: dict[str, list[GrowingFiles]] = {}
        for key, prefix in zip(self._keys, self._prefixes, strict=True):
            if progress.all_read and os.path.exists(prefix + ".bin") and os.path.exists(prefix + ".idx"):
                continue  # the run was stopped after these were finished
            positions = progress.files.get(key, [(0, 0, 0)] * self._parts)
            named = zip(self._names(prefix), positions, strict=True)
            self._files[key] = [GrowingFiles(name, dtype, position) for name, position in named]

    def append(self, encoded: Encoded, written: int) -> None:
        """Add the documents of a batch, which follow `written` others."""
        for key, documents in zip(self._keys, encoded.documents, strict=True):
            if self._parts == 1:
                self._files[key][0].append(documents)
                continue
            lengths = np.split(documents.lengths, np.cumsum(documents.sequences)[:-1])
            tokens = np.split(documents.tokens, np.cumsum([int(part.sum()) for part in lengths])[:-1])
            for part, file in enumerate(self._files[key]):
                chosen = slice((part - written) % self._parts, None, self._parts)
                if len(documents.sequences[chosen]):
                    dealt = np.concatenate(tokens[chosen]), np.concatenate(lengths[chosen])
                    file.append(Documents(*dealt, documents.sequences[chosen]))

    def sync(self) -> dict[str, list[tuple[int, int, int]]]:
        """Flush all files; returns the position of each file of each key."""
        return {key: [file.sync() for file in files] for key, files in self._files.items()}

    def finish(self) -> None:
        """Write the final files."""
        for key, prefix in zip(self._keys, self._prefixes, strict=True):
            if key in self._files:
                write_pair([file.close() for file in self._files[key]], prefix)

    def delete(self) -> None:
        """Remove the growing files."""
        for name in (name for prefix in self._prefixes for name in self._names(prefix)):
            delete_unfinished(name)

    def _names(self, prefix: str) -> list[str]:
        return [prefix if self._parts == 1 else f"{prefix}.{part}" for part in range(self._parts)]


def _dependencies(settings: Preprocessing, inputs: InputFiles, tokenizer: Any) -> dict[str, Any]:
    """Everything that the bytes of the files depend on."""
    content = hashlib.sha256()
    for path, size in zip(inputs.paths, inputs.sizes, strict=True):
        content.update(f"{os.path.abspath(path)}\0{size}\0{os.stat(path).st_mtime_ns}\n".encode())
    return {
        "input": content.hexdigest(),
        "tokenizer": fingerprint(tokenizer, "encoding"),
        "json_keys": list(settings.json_keys),
        "append_eod": settings.append_eod,
        "partitions": settings.parts,
        "max_documents": settings.max_documents,
        "text_unit": settings.text_unit,
    }
