"""PREFIX.preprocess.json: the progress, settings and vocabulary of `megatron-wrap preprocess`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_wrap.data.chat.tokenizer import fingerprint
from megatron_wrap.errors import DataError
from megatron_wrap.utils.atomic_write import named_write_errors, write_atomically

_RECORD = ".preprocess.json"
CONTINUES = "the same command continues"


@dataclass
class PreprocessProgress:
    """Totals over all runs with the same settings.

    Attributes:
        position: index of the next input file and of its next row.
        rows: rows read.
        documents: documents written.
        left_out: rows that could not be used.
        tokens: tokens of all keys, with the ends of documents.
        text_bytes: size of the texts of all keys in UTF-8.
        done_bytes: stored bytes of the input files up to `position`.
        total_bytes: stored bytes of all input files.
        files: sizes of the growing files of each key and part.
        messages: about the first rows that were left out.
        all_read: whether the inputs were read to their end.
        complete: whether the final files were written.
    """

    position: tuple[int, int] = (0, 0)
    rows: int = 0
    documents: int = 0
    left_out: int = 0
    tokens: int = 0
    text_bytes: int = 0
    done_bytes: int = 0
    total_bytes: int = 0
    files: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    all_read: bool = False
    complete: bool = False


class Record:
    """The file PREFIX.preprocess.json.

    Args:
        prefix: of the output.
        finals: the files of a complete run.
        settings: everything that the bytes of the files depend on.
        vocabulary: name of the tokenizer, and the fingerprint of its vocabulary, which `check_vocabulary` compares.
    """

    def __init__(
        self, prefix: str, finals: Sequence[str], settings: Mapping[str, Any], vocabulary: Mapping[str, str]
    ) -> None:
        self._path = Path(os.path.abspath(os.path.expanduser(prefix)) + _RECORD)
        self._finals, self._settings, self._vocabulary = list(finals), settings, vocabulary

    def read(self) -> PreprocessProgress:
        """The progress of earlier runs.

        Raises:
            DataError: the output is of other settings or inputs, or the final files exist without a record.
        """
        present = [path for path in self._finals if os.path.exists(path)]
        if not self._path.is_file():
            if present:
                raise DataError(f"{present[0]}: exists already; delete it, or give another --output-prefix")
            return PreprocessProgress()
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            progress = PreprocessProgress(**content["progress"])
            differing = [name for name, value in self._settings.items() if content["settings"][name] != value]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self._path}: not a record of preprocess ({error}); delete it to start again") from error
        if differing:
            name = differing[0]
            raise DataError(
                f"{self._path}: was written with another {name}; give the same to continue, or delete it and the files "
                "of this prefix to start again"
            )
        if progress.complete and len(present) < len(self._finals):
            missing = next(path for path in self._finals if path not in present)
            raise DataError(f"{missing}: missing, and {self._path} records it as complete; delete that to start again")
        progress.position = (progress.position[0], progress.position[1])
        return progress

    def write(self, progress: PreprocessProgress) -> None:
        """Replace the record."""
        content = {"settings": self._settings, "vocabulary": self._vocabulary, "progress": dataclasses.asdict(progress)}
        write_atomically(self._path, json.dumps(content, indent=1))

    def delete(self) -> None:
        """Remove the record."""
        self._path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock on the files of this prefix.

        Raises:
            DataError: another process holds the lock, or the folder cannot be written.
        """
        from filelock import FileLock, Timeout

        lock = FileLock(self._path.with_suffix(".lock"))
        with named_write_errors(self._path, CONTINUES, DataError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                raise DataError(f"{self._path}: another process writes the files of this prefix; wait for it") from None
        try:
            yield
        finally:
            os.unlink(lock.lock_file)
            lock.release()


def check_vocabulary(prefixes: Iterable[str], tokenizer: Any) -> None:
    """Refuse tokens of another vocabulary; files without a record are not checked.

    Args:
        prefixes: of .bin and .idx files; `~` is the home folder.
        tokenizer: of the run.

    Raises:
        DataError: the record beside the files names another vocabulary.
    """
    expected = fingerprint(tokenizer, "vocabulary")
    for prefix in prefixes:
        vocabulary = _vocabulary_of(os.path.abspath(os.path.expanduser(prefix)))
        if vocabulary is not None and vocabulary.get("sha256") != expected:
            named = vocabulary.get("tokenizer")
            raise DataError(
                f"{prefix}: was tokenized with {named}, whose vocabulary is not that of the run's "
                f"tokenizer {tokenizer.name_or_path}; set megatron_wrap.data.tokenizer to the former, or preprocess "
                "the text with the latter"
            )


def _vocabulary_of(prefix: str) -> Mapping[str, str] | None:
    """The vocabulary in the record of PREFIX_KEY_document, where PREFIX and KEY may contain `_`; None without a
    record."""
    for end in (index for index, letter in enumerate(prefix) if letter == "_"):
        path = Path(prefix[:end] + _RECORD)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(path.read_text(encoding="utf-8"))
            if prefix in [f"{prefix[:end]}_{key}_document" for key in content["settings"]["json_keys"]]:
                return dict(content["vocabulary"])
    return None
