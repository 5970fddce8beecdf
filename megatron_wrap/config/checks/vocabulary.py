"""The vocabulary size of a run's model."""

from collections.abc import Sized

from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.errors import ConfigError

_MUCH_SMALLER = 0.75
"""Share of a model's vocabulary; published models are padded by less."""


def small_tokenizer(arch: ArchConfig, tokenizer: Sized | None) -> str | None:
    """A warning if a model has many more entries in its vocabulary than the tokenizer, which are never trained."""
    if tokenizer is None or arch.vocab_size is None or len(tokenizer) >= _MUCH_SMALLER * arch.vocab_size:
        return None
    return (
        f"the tokenizer has {len(tokenizer):,} entries and the model {arch.vocab_size:,}: is it the model's tokenizer? "
        "For a new model set megatron_lm.model.arch.vocab_size: null, which takes the tokenizer's size"
    )


def model_vocab_size(arch: ArchConfig, tokenizer: Sized | None) -> int:
    """Entries of the vocabulary without padding: as given, else those of the run's Hugging Face tokenizer.

    Raises:
        ConfigError: neither is known, or the tokenizer has more entries than the model.
    """
    if tokenizer is None:
        if arch.vocab_size is None:
            raise ConfigError(
                "megatron_lm.model.arch.vocab_size is null and there is no tokenizer to take it from; set it, or "
                "megatron_wrap.data.tokenizer"
            )
        return arch.vocab_size
    entries = len(tokenizer)
    if arch.vocab_size is not None and entries > arch.vocab_size:
        raise ConfigError(
            f"the tokenizer has {entries} entries, but megatron_lm.model.arch.vocab_size is {arch.vocab_size}; set it "
            f"to {entries} or larger, or use the model's own tokenizer"
        )
    return entries if arch.vocab_size is None else arch.vocab_size
