"""Batches of documents to token ids, in processes of their own, in the order of the batches."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from megatron_wrap.data.documents import Batch, Texts, texts_of
from megatron_wrap.data.index_writer import token_dtype
from megatron_wrap.data.rows import BadSample
from megatron_wrap.data.tokenizer import end_token_id
from megatron_wrap.errors import DataError

_AHEAD = 2
"""Batches that a worker has at the same time: it computes one while the next is on its way."""
_MESSAGES = 5


@dataclass
class Encoded:
    """The documents of one batch; the arrays are lists with one array for each key.

    Attributes:
        tokens: those of all documents, one behind the other.
        lengths: tokens of each sequence.
        sequences: sequences of each document.
        rows: rows of the batch.
        bad: number of rows that were left out, with the first of their messages.
        text_bytes: of the texts that were encoded, in UTF-8.
    """

    tokens: list[np.ndarray]
    lengths: list[np.ndarray]
    sequences: list[np.ndarray]
    rows: int
    bad: int
    text_bytes: int
    messages: list[str] = field(default_factory=list)


class Encoder:
    """Turns a batch into token ids: those of `tokenizer(text, add_special_tokens=False)`, with the end of a document.

    Args:
        tokenizer: of transformers. With a fast one, texts are encoded in batches by the tokenizers library.
        keys: of the rows that are encoded.
        append_eod: add the eos token behind the last sequence of each document.

    Raises:
        DataError: `append_eod`, and the tokenizer has no eos token.
    """

    def __init__(self, tokenizer: Any, keys: Sequence[str], append_eod: bool) -> None:
        self._keys = list(keys)
        self._eod = [end_token_id(tokenizer)] if append_eod else []
        self.dtype = token_dtype(len(tokenizer))
        by_library = tokenizer.is_fast and not getattr(tokenizer, "split_special_tokens", False)
        self._tokenizer, self._fast = tokenizer, _own_copy(tokenizer) if by_library else None

    def __call__(self, batch: Batch) -> Encoded:
        """The documents of a batch, without those whose row cannot be used or that have no token in one of the keys."""
        good: list[tuple[str, list[Texts]]] = []
        messages: list[str] = []
        text_bytes = 0
        for where, found in texts_of(batch, self._keys):
            if isinstance(found, BadSample):
                messages.append(str(found))
                continue
            try:
                text_bytes += sum(len(text.encode()) for texts in found for text in texts)
                good.append((where, found))
            except UnicodeEncodeError as error:
                surrogate = ascii(error.object[error.start])
                messages.append(f"{where}: contains the lone surrogate {surrogate}, which is no character; correct it")
        ids = iter(self._ids([text for _, document in good for texts in document for text in texts]))
        documents = [(where, [[next(ids) for _ in texts] for texts in document]) for where, document in good]
        kept = []
        for where, document in documents:
            empty = [key for key, sequences in zip(self._keys, document, strict=True) if not any(sequences)]
            if empty:
                messages.append(f"{where}: an empty document ({empty[0]!r} has no token)")
            else:
                kept.append(document)
        columns = [self._columns([document[place] for document in kept]) for place in range(len(self._keys))]
        tokens, lengths, sequences = (list(arrays) for arrays in zip(*columns, strict=True))
        bad = len(messages)
        return Encoded(tokens, lengths, sequences, len(batch.rows), bad, text_bytes, messages[:_MESSAGES])

    def _columns(self, documents: list[list[list[int]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
        return tokens, np.array(lengths, np.int32), np.array(sequences, np.int64)

    def _ids(self, texts: list[str]) -> Iterable[list[int]]:
        if self._fast is None:
            return (self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        encode = getattr(self._fast, "encode_batch_fast", self._fast.encode_batch)  # the first computes no offsets
        return (encoding.ids for encoding in encode(texts, add_special_tokens=False))


class EncodingPool:
    """Worker processes that encode batches; results come in the order of the batches, whatever the number of workers.

    The processes are forked, so make a pool before files are opened and threads started. They end with `close`, and
    when this process ends, however it ends. A worker takes one core: the library's own threads are off.

    Args:
        encoder: of each worker.
        count: of workers, at least 1.
    """

    def __init__(self, encoder: Callable[[Batch], Encoded], count: int) -> None:
        context = multiprocessing.get_context("fork")
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._waiting: list[queue.SimpleQueue[Batch | None]] = []
        for _ in range(count):
            here, there = context.Pipe()
            self._connections.append(here)
            process = context.Process(target=_work, args=(encoder, there, list(self._connections)), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
        for connection in self._connections:  # threads are here, because those of a worker would slow its allocations
            waiting: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
            threading.Thread(target=_send, args=(connection, waiting), daemon=True).start()
            self._waiting.append(waiting)

    def map(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, Encoded]]:
        """Each batch, without its rows' content, and its documents.

        Raises:
            DataError: a worker was killed, or an input cannot be read any further.
        """
        running: deque[tuple[int, Batch]] = deque()
        exhausted, sent = False, 0
        while True:
            while not exhausted and len(running) < _AHEAD * len(self._connections):
                batch = next(batches, None)
                if batch is None:
                    exhausted = True
                    break
                worker = sent % len(self._connections)
                self._waiting[worker].put(batch)
                running.append((worker, batch))
                sent += 1
            if not running:
                return
            worker, batch = running.popleft()
            result = self._receive(worker)
            if isinstance(result, BaseException):
                raise result
            yield batch, result

    def close(self) -> None:
        """End the workers."""
        for process in self._processes:
            process.terminate()
            process.join()
        for waiting in self._waiting:
            waiting.put(None)
        for connection in self._connections:
            connection.close()

    def _receive(self, worker: int) -> Any:
        try:
            return self._connections[worker].recv()
        except (EOFError, OSError) as error:
            self._processes[worker].join(5)
            raise DataError(
                f"worker {worker} ended with exit code {self._processes[worker].exitcode}, perhaps for want of memory; "
                "the same command continues"
            ) from error


def _work(encoder: Callable[[Batch], Encoded], connection: Connection, others: list[Connection]) -> None:
    """Encodes batches until the other end of `connection` is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the one that writes ends the others
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for other in others:  # else the pipes stay open when the process that writes is killed
        other.close()
    while True:
        try:
            batch = connection.recv()
        except (EOFError, OSError):
            return
        result: Encoded | BaseException
        try:
            result = encoder(batch)
        except DataError as error:
            result = error
        except Exception:
            result = RuntimeError(f"a worker failed:\n{traceback.format_exc()}")
        try:
            connection.send(result)
        except OSError:
            return


def _send(connection: Connection, waiting: queue.SimpleQueue[Batch | None]) -> None:
    """Sends batches while the results of earlier ones are received, so that no two sends wait for each other."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they interrupt the main thread, as Ctrl-C should
    while (batch := waiting.get()) is not None:
        try:
            connection.send(batch)
        except OSError:  # the worker was killed, which `_receive` reports
            return


def _own_copy(tokenizer: Any) -> Any:
    """The tokenizer of the tokenizers library as transformers calls it: without truncation and padding."""
    own = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    own.no_truncation()
    own.no_padding()
    return own
