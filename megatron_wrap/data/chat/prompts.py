"""Converts prompts for generation to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_wrap.config.checks.vocabulary import check_token_ids
from megatron_wrap.data.chat.assistant_spans import render
from megatron_wrap.data.chat.spans import encoded_text
from megatron_wrap.errors import DataError

KINDS = "a text, a list of messages or a list of token ids"


def prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """A prompt as text for people: a text unchanged, messages as one line `role: content` each."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def prompt_token_ids(tokenizer: Any, prompt: Any, vocab_size: int) -> list[int]:
    """The token ids of one prompt.

    Args:
        tokenizer: a Hugging Face tokenizer; may be None if the prompt is token ids.
        prompt: a text (with the special tokens that the tokenizer adds), a list of messages
            `{"role": ..., "content": ...}` (rendered with the chat template and its generation prompt), or a list of
            token ids.
        vocab_size: size of the model's vocabulary.

    Raises:
        DataError: unsupported type, empty prompt, id outside the vocabulary, no tokenizer or chat template, or a text
            that it cannot encode.
    """
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    if is_list and prompt and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
        ids = [int(token) for token in prompt]
    elif isinstance(prompt, str) or (is_list and prompt and all(isinstance(message, Mapping) for message in prompt)):
        if tokenizer is None:
            raise DataError(
                "wrap.generate: a prompt of text needs a tokenizer; set megatron_wrap.data.tokenizer, or give token ids"
            )
        if isinstance(prompt, str):
            ids = encoded_text(tokenizer, prompt)["input_ids"]
        else:
            text = render(tokenizer, prompt, add_generation_prompt=True)
            ids = encoded_text(tokenizer, text, add_special_tokens=False)["input_ids"]
    else:
        raise DataError(f"wrap.generate: a prompt is {KINDS}, not {str(prompt)[:60]!r}")
    if not ids:
        raise DataError(f"wrap.generate: the prompt {prompt!r} has no tokens; give at least one")
    check_token_ids("wrap.generate: a prompt", ids, vocab_size)
    return ids
