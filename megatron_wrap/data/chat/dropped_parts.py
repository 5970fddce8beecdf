"""Finds parts of a conversation that a chat template drops: a template renders the parts of a message that it knows,
and omits others without an error."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_wrap.data.chat.assistant_spans import render
from megatron_wrap.errors import DataError

PARTS: Mapping[str, str] = {
    "content": "the content of a message",
    "tool_calls": "tool_calls",
    "tools": "the descriptions of tools",
}
"""Part -> its name in messages."""
_END_OF_THOUGHTS = "</think>"


def dropped_parts(tokenizer: Any, sample: Any) -> set[str]:
    """Keys of `PARTS` that the chat template drops from a sample's conversation: the text of a message except thoughts,
    the name of a called function, the name of a described function. Empty if there are no messages, or the template
    rejects them."""
    if tokenizer is None or not isinstance(sample, Mapping):
        return set()
    tools = sample.get("tools")
    return {part for messages in conversations(sample) for part in _dropped(tokenizer, messages, tools)}


def _dropped(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Any) -> set[str]:
    try:
        shown = compact(render(tokenizer, messages, tools))
    except DataError:
        return set()
    names = {
        "content": [text for message in messages for text in _texts(message)],
        "tool_calls": [name for message in messages for name in _names(message.get("tool_calls"))],
        "tools": list(_names(tools)),
    }
    return {part for part, texts in names.items() if not all(_is_in(text, shown) for text in texts)}


def _is_in(text: str, shown: str) -> bool:
    """Whether a rendered conversation contains a text unchanged, or as JSON, as Llama 3.1 renders the answers of
    tools."""
    return compact(text) in shown or compact(json.dumps(text, ensure_ascii=False)[1:-1]) in shown


def conversations(sample: Mapping[str, Any]) -> Iterator[list[Mapping[str, Any]]]:
    """The conversations of a sample: its `messages`, or its prompt with each answer."""

    def part(key: str) -> list[Mapping[str, Any]]:
        value = sample.get(key)
        is_chat = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
        return list(value) if is_chat and all(isinstance(message, Mapping) for message in value) else []  # type: ignore[union-attr,arg-type]

    yield from filter(None, [part("messages")])
    prompt = part("prompt")
    yield from ([*prompt, *part(key)] for key in ("completion", "chosen", "rejected") if part(key))


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else None
        if isinstance(text, str):
            yield text.rpartition(_END_OF_THOUGHTS)[2]


def _names(functions: Any) -> Iterator[str]:
    for entry in functions if isinstance(functions, Sequence) and not isinstance(functions, str) else ():
        function = entry.get("function", entry) if isinstance(entry, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            yield name


def compact(text: str) -> str:
    """The text without white space, in Unicode's normalized form."""
    return "".join(unicodedata.normalize("NFKC", text).split())
