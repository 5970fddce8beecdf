"""PREFIX.preprocess.json: what `megatron-wrap preprocess` has written, with which settings and vocabulary."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_wrap.data.tokenizer import vocabulary_hash
from megatron_wrap.errors import DataError

_RECORD = ".preprocess.json"


@dataclass
class Progress:
    """What was written so far, of all runs of the same settings.

    Attributes:
        position: number of the next input file and of its next row, from 0.
        rows: that were read.
        documents: that were written.
        left_out: rows that could not be used.
        tokens: of all keys, with the ends of documents.
        text_bytes: of all keys, in UTF-8.
        done_bytes: of the input files, as they are on the disk.
        total_bytes: of all input files.
        files: bytes of the growing files of each key and part.
        messages: about the first rows that were left out.
        complete: the final files are there.
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
        settings: what the bytes of the files depend on.
        vocabulary: name of the tokenizer, and the hash of its vocabulary, which `check_vocabulary` compares.
    """

    def __init__(
        self, prefix: str, finals: Sequence[str], settings: Mapping[str, Any], vocabulary: Mapping[str, str]
    ) -> None:
        self._path = Path(os.path.abspath(os.path.expanduser(prefix)) + _RECORD)
        self._finals, self._settings, self._vocabulary = list(finals), settings, vocabulary

    def read(self) -> Progress:
        """What earlier runs have written.

        Raises:
            DataError: the output is of other settings or inputs, or the final files are there without a record.
        """
        present = [path for path in self._finals if os.path.exists(path)]
        if not self._path.is_file():
            if present:
                raise DataError(f"{present[0]}: exists already; delete it, or give another --output-prefix")
            return Progress()
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            progress = Progress(**found["progress"])
            differing = [name for name, value in self._settings.items() if found["settings"][name] != value]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self._path}: not a record of preprocess ({error}); delete it to begin anew") from error
        if differing:
            name = differing[0]
            raise DataError(
                f"{self._path}: was written with another {name}; give the same to continue, or delete it and the files "
                "of this prefix to begin anew"
            )
        if progress.complete and len(present) < len(self._finals):
            missing = next(path for path in self._finals if path not in present)
            raise DataError(f"{missing}: missing, and {self._path} records it as complete; delete that to begin anew")
        progress.position = (progress.position[0], progress.position[1])
        return progress

    def write(self, progress: Progress) -> None:
        """Replace the record, in one step."""
        unfinished = self._path.with_name(self._path.name + ".new")
        content = {"settings": self._settings, "vocabulary": self._vocabulary, "progress": dataclasses.asdict(progress)}
        unfinished.write_text(json.dumps(content, indent=1), encoding="utf-8")
        unfinished.replace(self._path)

    def delete(self) -> None:
        """Remove the record."""
        self._path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """No second process writes the same files.

        Raises:
            DataError: another does, or the folder cannot be written.
        """
        with named_write_errors(str(self._path)):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = open(self._path.with_suffix(".lock"), "w")  # noqa: SIM115 - closed below
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(f"{self._path}: another process writes the files of this prefix; wait for it") from None
            try:
                yield
            finally:
                os.unlink(lock.name)


@contextlib.contextmanager
def named_write_errors(path: str) -> Iterator[None]:
    """Turns an error of the operating system into a DataError with this path."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}; the same command continues") from error


def check_vocabulary(prefixes: Iterable[str], tokenizer: Any) -> None:
    """Refuse tokens of another vocabulary; files without a record are not checked.

    Args:
        prefixes: of .bin and .idx files; `~` is the home folder.
        tokenizer: of the run.

    Raises:
        DataError: the record beside the files names another vocabulary.
    """
    expected = vocabulary_hash(tokenizer)
    for prefix in prefixes:
        found = _vocabulary_of(os.path.abspath(os.path.expanduser(prefix)))
        if found is not None and found.get("sha256") != expected:
            raise DataError(
                f"{prefix}: was tokenized with {found.get('tokenizer')}, whose vocabulary is not that of this run's "
                f"tokenizer {tokenizer.name_or_path}; set megatron_wrap.data.tokenizer to the former, or preprocess "
                "the text with the latter"
            )


def _vocabulary_of(prefix: str) -> Mapping[str, str] | None:
    """Of the record of PREFIX_KEY_document, where PREFIX and KEY may have `_` too."""
    for place in (place for place, letter in enumerate(prefix) if letter == "_"):
        path = Path(prefix[:place] + _RECORD)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(path.read_text(encoding="utf-8"))
            if prefix in [f"{prefix[:place]}_{key}_document" for key in content["settings"]["json_keys"]]:
                return dict(content["vocabulary"])
    return None
