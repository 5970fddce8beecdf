"""The usual mistakes in fine-tuning data: a table of them, and the checks that find them in one encoded sample."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_wrap.config import RunConfig
from megatron_wrap.config.schema import derived
from megatron_wrap.data.chat.assistant_spans import render
from megatron_wrap.data.chat.encode import are_equal_answers
from megatron_wrap.data.chat.text_tokens import possible_end_ids
from megatron_wrap.errors import DataError


@dataclass(frozen=True)
class Mistake:
    """A kind of mistake."""

    title: str
    advice: str
    serious: bool = True
    """Whether the mistake is serious; False: it is often on purpose, so only worth a look."""
    set_already: str = ""
    """The advice if the run has already set what `advice` would suggest."""


MISTAKES: Mapping[str, Mistake] = {
    "refused": Mistake(
        "cannot be used",
        "correct these rows, or set megatron_wrap.data.on_bad_sample: skip",
        set_already="left out (on_bad_sample: skip)",
    ),
    "nothing_trained": Mistake(
        "no token is trained", "the sample costs time and teaches nothing: look for its answer, or for truncation"
    ),
    "equal_answers": Mistake(
        "the chosen and the rejected answer are the same", "the pair expresses no preference: remove it"
    ),
    "everything_trained": Mistake(
        "every token of a conversation is trained",
        "questions are learned as well: set loss_on: assistant, or loss_on: all",
    ),
    "double_bos": Mistake(
        "begins with two bos tokens", "remove bos from the text, or from the chat template: the tokenizer adds one"
    ),
    "missing_eos": Mistake(
        "the last trained token ends nothing",
        "the model does not learn to stop: append the eos token, or include it in the template's generation block",
    ),
    "empty_answer": Mistake("an assistant's turn is empty", "the model learns to answer nothing: remove the turn"),
    "dropped_parts": Mistake(
        "the chat template drops tool_calls, tools or the content of a message",
        "the model never sees them: use a tokenizer whose template (chat_template.jinja) renders them",
    ),
    "answer_cut": Mistake(
        "truncation removes trained tokens at the end",
        "raise seq_length, or leave long samples out with max_length",
        set_already="raise seq_length, or lower max_length to at most seq_length",
    ),
    "dropped_text": Mistake(
        "the chat template leaves out text of a message",
        "it is not trained: thoughts of earlier turns (Qwen3, DeepSeek) and system texts (Mistral, at the end only)",
        serious=False,
    ),
    "truncated": Mistake(
        "longer than seq_length",
        "raise seq_length, or leave them out with max_length",
        serious=False,
        set_already="raise seq_length, or lower max_length to at most seq_length",
    ),
    "too_long": Mistake("longer than max_length of the source", "left out as configured", serious=False),
    "duplicate": Mistake("the same tokens as an earlier sample", "remove duplicates from the data", serious=False),
    "weight_zero": Mistake("weight 0", "read, but not trained, as configured", serious=False),
}
"""Key -> mistake, in the order of reports."""


def advice_of(key: str, config: RunConfig) -> str:
    """The advice about a mistake in a run, without what the run has already set."""
    sources = [*derived.training_sources(config), *(s for group in config.data.validation.values() for s in group)]
    already = {
        "refused": config.data.on_bad_sample == "skip",
        **dict.fromkeys(("answer_cut", "truncated"), any(source.max_length is not None for source in sources)),
    }
    mistake = MISTAKES[key]
    return mistake.set_already if already.get(key) else mistake.advice


Kind = Literal["trained", "other", "cut"]
"""Kind of a token: it has a loss, it is only read, or truncation removes it."""


@dataclass(frozen=True)
class Tokens:
    """One sequence of a sample, before truncation."""

    input_ids: list[int]
    kinds: list[Kind]
    """Kind of each token; the first token that is kept is never trained, because nothing precedes it."""
    length: int
    """Tokens that the model reads, padding excluded."""

    def count(self, kind: Kind) -> int:
        """Number of tokens of this kind."""
        return self.kinds.count(kind)


class Checks:
    """The checks of a run.

    Args:
        tokenizer: of the run; None: no checks that need its special tokens or its text.
        all_trained: the run trains all tokens of a conversation on purpose.
    """

    def __init__(self, tokenizer: Any, all_trained: bool = False) -> None:
        self._tokenizer = tokenizer
        self._all_trained = all_trained
        self._ends = possible_end_ids(tokenizer) if tokenizer is not None else set()

    def of(self, sample: Any, sequences: Sequence[Tokens]) -> tuple[str, ...]:
        """Keys of the mistakes of one sample, in the order of `MISTAKES`."""
        mistakes = {key for tokens in sequences for key in self._of_tokens(tokens)}
        if all("trained" not in tokens.kinds for tokens in sequences):
            no_weight = isinstance(sample, Mapping) and sample.get("weight") == 0
            mistakes.add("weight_zero" if no_weight else "nothing_trained")
        if are_equal_answers(sequences):
            mistakes.add("equal_answers")
        if isinstance(sample, Mapping):
            if not self._all_trained and "messages" in sample and all(map(_all_trained, sequences)):
                mistakes.add("everything_trained")
            mistakes |= self._of_messages(sample, sequences)
        return tuple(key for key in MISTAKES if key in mistakes)

    def _of_tokens(self, tokens: Tokens) -> Iterator[str]:
        ids, kinds = tokens.input_ids, tokens.kinds
        if "cut" in kinds:
            yield "truncated"
        bos = getattr(self._tokenizer, "bos_token_id", None)
        if bos is not None and ids[:2] == [bos, bos]:
            yield "double_bos"
        trained = [position for position, kind in enumerate(kinds) if kind == "trained"]
        if (
            trained
            and self._tokenizer is not None
            and not self._ends & set(_last_visible(self._tokenizer, ids, trained))
        ):
            yield "answer_cut" if "cut" in kinds[trained[-1] + 1 :] else "missing_eos"

    def _of_messages(self, sample: Mapping[str, Any], sequences: Sequence[Tokens]) -> set[str]:
        mistakes = set()
        messages = [message for conversation in conversations(sample) for message in conversation]
        if any(message.get("role") == "assistant" and _is_empty(message) for message in messages):
            mistakes.add("empty_answer")
        if dropped_parts(self._tokenizer, sample):
            return mistakes | {"dropped_parts"}
        texts = [message["content"] for message in messages if isinstance(message.get("content"), str)]
        if texts and self._tokenizer is not None and not self._shows(texts, sequences):
            mistakes.add("dropped_text")
        return mistakes

    def _shows(self, texts: Sequence[str], sequences: Sequence[Tokens]) -> bool:
        """Whether the sequences contain each text, white space ignored; True if tokens cannot be converted to their
        text."""
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        if unknown is not None and any(unknown in tokens.input_ids for tokens in sequences):
            return True
        decoded = [
            self._tokenizer.decode(tokens.input_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            for tokens in sequences
        ]
        shown = compact("".join(decoded))
        return all(compact(text) in shown for text in texts)


def _all_trained(tokens: Tokens) -> bool:
    return len(tokens.kinds) > 1 and all(kind != "other" for kind in tokens.kinds[1:]) and "trained" in tokens.kinds


def _last_visible(tokenizer: Any, ids: Sequence[int], trained: Sequence[int]) -> Iterator[int]:
    """Ids of the last trained token and of those before it, up to the last one that is not only white space."""
    for position in reversed(trained):
        yield ids[position]
        if tokenizer.decode([ids[position]]).strip():
            return


def _is_empty(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    if message.get("weight") == 0:
        return False
    return not message.get("tool_calls") and (content is None or (isinstance(content, str) and not content.strip()))


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
