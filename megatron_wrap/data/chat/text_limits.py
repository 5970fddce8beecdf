"""Texts that no tokenizer can encode."""

from __future__ import annotations

from megatron_wrap.errors import DataError

MAX_CHARACTERS = 1 << 25
"""Largest number of characters of a text that is tokenized or that a chat template renders. Tokenization takes about
300 bytes for each token."""


def check_text(text: str) -> None:
    """Refuse a text that no tokenizer can encode.

    Raises:
        DataError: it contains a lone surrogate, or more than MAX_CHARACTERS characters.
    """
    if len(text) > MAX_CHARACTERS:
        raise DataError(
            f"a text of {len(text):,} characters, more than the {MAX_CHARACTERS:,} that a sample may have; divide it"
        )
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(lone_surrogate(error)) from None


def lone_surrogate(error: UnicodeEncodeError) -> str:
    """The message about a text that UTF-8 cannot represent."""
    return f"contains the lone surrogate {error.object[error.start]!a}, which is no character; correct it"
