"""Encodes batches of documents to token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_wrap.data.chat.text_limits import lone_surrogate
from megatron_wrap.data.chat.tokenizer import end_token_id
from megatron_wrap.data.indexed.index_writer import Documents, token_dtype
from megatron_wrap.data.preprocess.documents import Batch, Texts, texts_of
from megatron_wrap.data.sources.rows import BadSample

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
