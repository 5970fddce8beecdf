"""Tokens of a text and the characters that each one represents; masks of the tokens in spans of characters; texts that
no tokenizer can encode."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megatron_wrap.data.chat.tokenizer import is_failure
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


Span = tuple[int, int]
"""Begin and end (exclusive)."""


@dataclass(frozen=True)
class TextTokens:
    """The tokens of a text without added special tokens; `extents[i]` is the character span of token i."""

    text: str
    input_ids: list[int]
    extents: list[Span] | None
    """Character span of each token; None for tokenizers without offsets (slow tokenizers, written in Python)."""

    @classmethod
    def of(cls, tokenizer: Any, text: str) -> TextTokens:
        """Tokenize `text`; special tokens in it are recognized, as in apply_chat_template.

        Raises:
            DataError: `tokenizer` is None, or as `encoded_text`.
        """
        check_tokenizer(tokenizer)
        if not tokenizer.is_fast:
            return cls(text, _ids(tokenizer, text), None)
        encoded = encoded_text(tokenizer, text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = list(encoded["input_ids"]), list(encoded["offset_mapping"])
        if any(before[1] < after[0] for before, after in pairwise([(0, 0), *offsets, (len(text), len(text))])):
            offsets = _untrimmed(offsets, tokenizer.convert_ids_to_tokens(ids), len(text))
        return cls(text, ids, offsets)


def check_tokenizer(tokenizer: Any) -> None:
    """Raise a DataError if text is to be tokenized without a tokenizer."""
    if tokenizer is None:
        raise DataError(
            "a sample of text or messages needs a tokenizer; set megatron_wrap.data.tokenizer to a Hugging Face "
            "folder, or give input_ids"
        )


def encoded_text(tokenizer: Any, text: str, **options: Any) -> Any:
    """`tokenizer(text, **options)`.

    Raises:
        DataError: `check_text` refuses the text, or the tokenizer fails.
    """
    check_text(text)
    try:
        return tokenizer(text, **options)
    except BaseException as error:  # a tokenizer is a program that its folder's files define
        if not is_failure(error):
            raise
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(
            f"the tokenizer {name} fails with a text of {len(text):,} characters ({reason}); correct the text or the "
            "tokenizer's files"
        ) from error


def mask_of_spans(
    tokenizer: Any, tokens: TextTokens, spans: list[Span], cut_after_end_token: bool = False
) -> list[int]:
    """A list with 1 for each token that contains a character of a span, else 0; same length as `tokens.input_ids`.

    Args:
        cut_after_end_token: exclude white space after the last special token of a span, such as ChatML's line feed
            after <|im_end|>, which belongs to no turn.

    Raises:
        DataError: the tokenizer has no offsets and a token crosses the boundary of a span.
    """
    mask = [0] * len(tokens.input_ids)
    end_ids = possible_end_ids(tokenizer) if cut_after_end_token else set()
    for span in spans:
        inside = _tokens_in(tokenizer, tokens, span)
        if cut_after_end_token:
            inside = inside[: _length_to_end_token(tokenizer, tokens, span, inside, end_ids)]
        for position in inside:
            mask[position] = 1
    return mask


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(encoded_text(tokenizer, text, add_special_tokens=False)["input_ids"])


def _untrimmed(offsets: list[Span], pieces: list[str], length: int) -> list[Span]:
    """Offsets extended by the spaces that a byte-level tokenizer with `trim_offsets` excludes.

    A gap between two tokens belongs to the second one, except for spaces at the end of the first one.
    """
    extents: list[Span] = []
    covered = 0
    begins = [begin for begin, _ in offsets[1:]] + [length]
    for (begin, end), piece, next_begin in zip(offsets, pieces, begins, strict=True):
        # Byte-level vocabularies write a space as Ġ. A token of only spaces has offsets (end, end), after its gap.
        trailing = len(piece) - len(piece.rstrip("Ġ")) if piece.strip("Ġ") else 0
        end = max(covered, end, min(end + trailing, next_begin))
        extents.append((min(begin, covered), end))
        covered = end
    return extents


def _tokens_in(tokenizer: Any, tokens: TextTokens, span: Span) -> list[int]:
    """Positions of the tokens that contain a character of `span`, or have no characters and lie inside it."""
    begin, end = span
    if begin >= end:
        return []
    if tokens.extents is not None:
        inside = []
        position = bisect_left(tokens.extents, begin, key=lambda extent: extent[1])
        while position < len(tokens.extents) and tokens.extents[position][0] < end:
            first, last = tokens.extents[position]
            if last > begin or first == last:
                inside.append(position)
            position += 1
        return inside
    return list(range(_tokens_before(tokenizer, tokens, begin), _tokens_before(tokenizer, tokens, end)))


def _tokens_before(tokenizer: Any, tokens: TextTokens, length: int) -> int:
    """Number of tokens in the first `length` characters of the text, for tokenizers without offsets."""
    prefix = _ids(tokenizer, tokens.text[:length])
    if prefix != tokens.input_ids[: len(prefix)]:
        raise DataError(
            f"the tokenizer {type(tokenizer).__name__} has no character offsets, and a token crosses the end of "
            f"{tokens.text[max(0, length - 20) : length]!r}, so the turns cannot be separated; use its fast version"
        )
    return len(prefix)


def possible_end_ids(tokenizer: Any) -> set[int]:
    """Ids of special and added tokens, except the unknown token, which replaces any rare character."""
    return (set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)) - {tokenizer.unk_token_id}


def _length_to_end_token(tokenizer: Any, tokens: TextTokens, span: Span, inside: list[int], end_ids: set[int]) -> int:
    """Number of tokens in `inside` up to the last end token, if only white space follows it in the span; else all."""
    for count in range(len(inside), 0, -1):
        position = inside[count - 1]
        if tokens.input_ids[position] not in end_ids:
            continue
        if tokens.extents is not None:
            rest = tokens.text[tokens.extents[position][1] : span[1]]
        else:
            rest = tokenizer.decode([tokens.input_ids[later] for later in inside[count:]])
        return len(inside) if rest.strip() else count
    return len(inside)
