"""The vocabulary size of a run's model, and the comparison of token ids with it."""

from collections.abc import Sequence, Sized
from typing import Any

from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.errors import ConfigError, DataError

_MUCH_SMALLER = 0.75
"""Smallest share of a model's vocabulary that its tokenizer normally has; published models are padded by less."""
_OF_MOCK_DATA = 4096
"""Vocabulary size of mock data, which alone has neither a size nor a tokenizer (`config.checks.model`)."""


def small_tokenizer(arch: ArchConfig, tokenizer: Sized | None) -> str | None:
    """A warning if a model has many more entries in its vocabulary than the tokenizer, which are never trained."""
    if tokenizer is None or arch.vocab_size is None or len(tokenizer) >= _MUCH_SMALLER * arch.vocab_size:
        return None
    return (
        f"the tokenizer has {len(tokenizer):,} entries and the model {arch.vocab_size:,}: is it the model's tokenizer? "
        "For a new model set megatron_lm.model.arch.vocab_size: null, which takes the tokenizer's size"
    )


def model_vocab_size(arch: ArchConfig, tokenizer: Sized | None, hf_path: str | None = None) -> int:
    """Entries of the vocabulary without padding: as configured, else of the Hugging Face tokenizer, else of mock data.

    Args:
        hf_path: the folder that the weights are from; the vocabulary of its model grows to the tokenizer's.

    Raises:
        ConfigError: the tokenizer has more entries than the model, which is not from a folder.
    """
    if tokenizer is None:
        return _OF_MOCK_DATA if arch.vocab_size is None else arch.vocab_size
    entries = len(tokenizer)
    if arch.vocab_size is not None and entries > arch.vocab_size:
        if hf_path is not None:
            return entries
        raise ConfigError(
            f"the tokenizer has {entries} entries, but megatron_lm.model.arch.vocab_size is {arch.vocab_size}; set it "
            f"to {entries} or larger, or use the model's own tokenizer"
        )
    return entries if arch.vocab_size is None else arch.vocab_size


def check_token_ids(name: str, ids: Any, vocab_size: int) -> None:
    """Compare token ids with the vocabulary. The padding of the vocabulary has no ids: a model split over processes
    would read another row for such an id, and return a meaningless probability.

    Args:
        name: what has the ids, the beginning of the message.
        ids: a list of integers, or an integer array or tensor on the CPU, of any shape.
        vocab_size: without padding.

    Raises:
        DataError: an id is negative, or not below `vocab_size`.
    """
    flat = ids if isinstance(ids, Sequence) else ids.reshape(-1)
    if not len(flat):
        return
    smallest, largest = (min(flat), max(flat)) if isinstance(flat, Sequence) else (int(flat.min()), int(flat.max()))
    if smallest < 0 or largest >= vocab_size:
        raise DataError(
            f"{name} has the token id {smallest if smallest < 0 else largest}, but the vocabulary has the ids 0 to "
            f"{vocab_size - 1}; give ids of this model's tokenizer"
        )
