"""Trains a byte-level BPE tokenizer on documents and saves it as a Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from megatron_wrap.data.indexed.documents import InputFiles, texts_of
from megatron_wrap.data.sources.rows import BadSample
from megatron_wrap.errors import ConfigError, DataError
from megatron_wrap.metrics.number_format import counted

END_OF_TEXT = "<|endoftext|>"
_BYTES = 256


def train_tokenizer(
    inputs: InputFiles,
    keys: Sequence[str],
    folder: str | Path,
    *,
    vocab_size: int,
    special_tokens: Sequence[str] = (END_OF_TEXT,),
    min_frequency: int = 2,
    max_documents: int | None = None,
    on_bad_document: Literal["error", "skip"] = "error",
    show_progress: bool = False,
) -> int:
    """Train a byte-level BPE like GPT-2's (Radford et al., 2019, section 2.2) and save it.

    Every text can be encoded, because the 256 bytes are tokens. The same documents give the same files.

    Args:
        keys: of the rows; their texts are used.
        folder: gets tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer reads.
        vocab_size: number of tokens with the special ones, which have the first ids; fewer if the documents have no
            more pairs that occur `min_frequency` times.
        special_tokens: the first is the beginning and end of a document and the token for padding.
        max_documents: rows to read; None: all.

    Returns:
        The number of tokens.

    Raises:
        DataError: a document cannot be used, or there is none. ConfigError: `vocab_size` is too small.
    """
    from tokenizers import ByteLevelBPETokenizer, Tokenizer
    from transformers import PreTrainedTokenizerFast

    if vocab_size < _BYTES + len(special_tokens):
        raise ConfigError(
            f"vocab_size {vocab_size} is below the {_BYTES} bytes and {len(special_tokens)} special tokens; give "
            f"{_BYTES + len(special_tokens)} or more"
        )
    if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise DataError(f"{folder}: exists already and is not empty; delete it, or give another --output")
    trained = ByteLevelBPETokenizer(add_prefix_space=False)
    trained.train_from_iterator(
        _texts(inputs, keys, max_documents, on_bad_document),
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(special_tokens),
        show_progress=show_progress,
    )
    tokenizer = Tokenizer.from_str(trained.to_str())
    end = special_tokens[0]
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=end, eos_token=end, unk_token=end, pad_token=end,
        additional_special_tokens=list(special_tokens[1:]), clean_up_tokenization_spaces=False,
    )  # fmt: skip
    wrapped.save_pretrained(str(folder))
    return int(tokenizer.get_vocab_size())


def _texts(
    inputs: InputFiles, keys: Sequence[str], limit: int | None, on_bad: Literal["error", "skip"]
) -> Iterator[str]:
    rows = documents = 0
    for batch in inputs.read():
        for _, document in texts_of(batch, keys):
            if limit is not None and rows >= limit:
                break
            rows += 1
            if isinstance(document, BadSample):
                if on_bad == "error":
                    raise DataError(f"{document}; correct it, or leave such out with --on-bad-document skip")
                continue
            documents += 1
            yield from (text for texts in document for text in texts)
    if documents == 0:
        raise DataError(f"{', '.join(inputs.paths[:3])}: {counted(rows, 'row')} and no document")
