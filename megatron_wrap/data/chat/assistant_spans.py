"""Finds the assistant's characters in a conversation rendered with a chat template."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from megatron_wrap.data.chat.templates import TemplateLimitError, bounded, rendered
from megatron_wrap.data.chat.text_tokens import Span, check_tokenizer
from megatron_wrap.data.sources.formats import message_list
from megatron_wrap.errors import DataError
from megatron_wrap.metrics.number_format import counted

# The pattern of transformers.utils.chat_template_utils.render_jinja_template.
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
ADD_MARKERS = (
    "put {% generation %} and {% endgeneration %} around the assistant's text in the tokenizer's chat template "
    "(chat_template.jinja)"
)
MARK = "Xq7TextOfOneTurn7qX"
"""Replacement for a message's text that shows where a template writes it; no template trims, escapes or compares it."""


def assistant_spans(
    tokenizer: Any, messages: Sequence[Any], tools: Any = None, first: int = 0
) -> tuple[str, list[Span], bool]:
    """The rendered conversation, the assistant's spans [begin, end) in characters, and whether a span is all text that
    a turn adds (True) or a generation block of the template (False). A message with "weight": 0, as in OpenAI's format
    for fine-tuning, has no span.

    Args:
        first: index of the first message whose span is returned.

    Raises:
        DataError: the messages are malformed, the template rejects them, or the boundaries cannot be found.
    """
    return bounded(lambda: _assistant_spans(Conversation(tokenizer, messages, tools), first))


def _assistant_spans(chat: "Conversation", first: int) -> tuple[str, list[Span], bool]:
    turns = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant" and index >= first]
    trained = [index for index in turns if _message_weight(chat.messages[index], index)]
    if not GENERATION_MARKER.search(chat.template):
        text = chat.text()
        return text, [chat.with_stop_token(text, _turn_span(chat, index, text)) for index in trained], True
    text, spans = chat.text_and_blocks()
    if turns and not spans:
        raise DataError(f"the chat template's generation blocks do not contain the assistant's turns; {ADD_MARKERS}")
    if first and trained:
        begin = _end_of_shown_text(chat, text, first - 1)
        spans = [span for span in spans if span[0] >= begin]
    for index in sorted(set(turns) - set(trained)):
        begin = _end_of_shown_text(chat, text, index - 1) if index else 0
        end = _end_of_shown_text(chat, text, index)
        spans = [span for span in spans if not begin <= span[0] <= end]
    return text, spans if trained else [], False


def render(tokenizer: Any, messages: Sequence[Any], tools: Any = None, add_generation_prompt: bool = False) -> str:
    """`tokenizer.apply_chat_template(messages, tokenize=False)`; DataError if the template rejects the messages."""
    chat = Conversation(tokenizer, messages, tools)
    return bounded(lambda: chat.text(add_generation_prompt=add_generation_prompt))


def last_assistant(messages: Sequence[Any]) -> int:
    """Index of the last message of the assistant; the number of messages if there is none. DataError if the messages
    are malformed."""
    turns = [index for index, message in enumerate(_normalized(messages)) if message["role"] == "assistant"]
    return turns[-1] if turns else len(messages)


class Conversation:
    """Validated messages with the chat template that renders them.

    Raises:
        DataError: malformed messages, or a tokenizer without a chat template.
    """

    def __init__(self, tokenizer: Any, messages: Sequence[Any], tools: Any = None) -> None:
        self.messages = _normalized(messages)
        self.template = _chat_template(tokenizer, tools)
        self._tools = tools
        self._tokenizer = tokenizer

    def special_token_end(self, text: str) -> int:
        """End of the last special or added token in `text`, in characters; 0 if there is none."""
        return max((text.rfind(token) + len(token) for token in self._tokens() if token in text), default=0)

    def token_length(self, text: str, position: int) -> int:
        """Length of the longest special or added token that begins at `position` of `text`; 0 if none does."""
        return max((len(token) for token in self._tokens() if text.startswith(token, position)), default=0)

    def _tokens(self) -> set[str]:
        added = (str(token) for token in self._tokenizer.added_tokens_decoder.values())
        return {token for token in (*self._tokenizer.all_special_tokens, *added) if token}

    def with_stop_token(self, text: str, span: Span) -> Span:
        """The span, extended by the special token after it if it contains none itself. The templates of GLM-4.5 do not
        close a turn, so the model ends it with the token that begins the next one."""
        begin, end = span
        special = [token for token in self._tokenizer.all_special_tokens if token]
        if any(token in text[begin:end] for token in special):
            return span
        following = [token for token in special if text.startswith(token, end)]
        return begin, end + max(map(len, following), default=0)

    def text(
        self,
        count: int | None = None,
        add_generation_prompt: bool = False,
        marked: int | None = None,
        mark_names: bool = False,
    ) -> str:
        """The first `count` messages rendered (None: all). MARK replaces the text of message `marked`, and with
        `mark_names` also the names of the tools that it calls, which a template may repeat in their answers."""
        shown = self.messages[:count]
        if marked is not None:
            shown = [
                _marked(message, mark_names) if index == marked else message for index, message in enumerate(shown)
            ]
        return self._render(shown, add_generation_prompt)[0]

    def text_and_blocks(self) -> tuple[str, list[Span]]:
        """The conversation rendered, and the spans of the template's generation blocks."""
        return self._render(self.messages, with_spans=True)

    def _render(
        self, conversation: list[dict], add_generation_prompt: bool = False, with_spans: bool = False
    ) -> tuple[str, list[Span]]:
        try:
            return self._rendered(conversation, add_generation_prompt, with_spans)
        except TemplateLimitError:
            raise
        except Exception as error:  # a template is a program and can raise jinja's and Python's errors
            as_text = [_with_text_arguments(message) for message in conversation]
            if as_text != conversation:
                # DeepSeek's templates take the arguments of tool calls as JSON text, others as a mapping
                with suppress(Exception):
                    return self._rendered(as_text, add_generation_prompt, with_spans)
            raise DataError(
                f"the chat template rejects {_roles(conversation)}: {error or type(error).__name__}; "
                "change the conversation or the tokenizer's chat template"
            ) from error

    def _rendered(
        self, conversation: list[dict], add_generation_prompt: bool, with_spans: bool
    ) -> tuple[str, list[Span]]:
        return rendered(
            self.template,
            conversation,
            with_spans,
            tools=self._tools,
            add_generation_prompt=add_generation_prompt,
            **self._tokenizer.special_tokens_map,
        )


def _turn_span(chat: Conversation, index: int, text: str) -> Span:
    """The span in `text`, the whole conversation, that message `index` adds after its generation prompt."""
    try:
        prompt = chat.text(index, add_generation_prompt=True)
        upto = chat.text(index + 1)
        if upto.startswith(prompt) and text.startswith(upto):
            return len(prompt), len(upto)
        begin = _begin(chat, index, text, prompt)
        end = _end(chat, index, text, upto)
    except DataError as error:
        raise DataError(
            f"the assistant's turns cannot be found, because the chat template cannot render only the first {index} or "
            f"{counted(index + 1, 'message')} ({error}); {ADD_MARKERS}"
        ) from error
    if begin is None:
        reason = f"the template does not begin message {index} with its generation prompt"
    elif end is None or end < begin:
        reason = f"the template renders the first {counted(index + 1, 'message')} differently if others follow"
    else:
        return begin, end
    raise DataError(f"the assistant's turns cannot be found: {reason}; {ADD_MARKERS}")


# ---- templates that render earlier messages differently once others follow: thoughts are dropped, tools move


def _begin(chat: Conversation, index: int, text: str, prompt: str) -> int | None:
    """Position in `text` at which message `index` begins: after the part of its `prompt` (the messages before it, and
    the generation prompt) that follows the text of the message before it. A generation prompt may contain text that
    belongs to the turn, such as DeepSeek-R1's <think>."""
    before, lead = 0, prompt
    for earlier in reversed(range(index)):
        ends = _end_of_text(chat, text, earlier), _end_of_text(chat, prompt, earlier, index, add_generation_prompt=True)
        if ends[0] is not None and ends[1] is not None:
            before, lead = ends[0], prompt[ends[1] :]
            break
    if text.startswith(lead, before):
        return before + len(lead)
    content = chat.text(marked=index, mark_names=True).find(MARK)
    common = _common_beginning(text[before:content], lead)
    return content if before + len(common) == content and chat.special_token_end(common) else None


def _end(chat: Conversation, index: int, text: str, upto: str) -> int | None:
    """Position in `text` at which message `index` ends: after the text that closes it in `upto`, the conversation up to
    it. At the end of `upto` a template may also write a token that closes the conversation, as Phi-3's does, or another
    end-of-turn token, as those of gpt-oss (<|return|> instead of <|end|>) and OLMo 3 do."""
    end, end_upto = _end_of_text(chat, text, index), _end_of_text(chat, upto, index, index + 1)
    if end is None or end_upto is None:
        return None
    closing = upto[end_upto:]
    if text.startswith(closing, end):
        return end + len(closing)
    common = _common_beginning(text[end:], closing)
    shared = chat.special_token_end(common)
    for before in range(len(common), -1, -1) if not shared else ():  # another token after the same text
        length = chat.token_length(text, end + before) if chat.token_length(closing, before) else 0
        if length:
            shared = before + length
            break
    return end + shared if shared else None


def _end_of_text(
    chat: Conversation, text: str, index: int, count: int | None = None, add_generation_prompt: bool = False
) -> int | None:
    """Position at which the text of message `index` ends in `text`, which is the first `count` messages rendered (None:
    all); None if the template does not render that text, or renders later messages differently with it."""
    _, mark, tail = chat.text(count, add_generation_prompt, marked=index).rpartition(MARK)
    return len(text) - len(tail) if mark and text.endswith(tail) else None


def _common_beginning(text: str, other: str) -> str:
    length = next((index for index, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), None)
    return min(text, other, key=len) if length is None else text[:length]


def _end_of_shown_text(chat: Conversation, text: str, index: int) -> int:
    end = _end_of_text(chat, text, index)
    if end is None:
        raise DataError(
            f"the chat template does not show message {index} unchanged, so the turns around it cannot be separated"
        )
    return end


def _marked(message: dict, names: bool) -> dict:
    """The message with MARK instead of its text, and instead of the arguments (and names) of its tool calls."""
    changed = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        changed["content"] = [{**part, "text": MARK} if "text" in part else part for part in content]
    elif (isinstance(content, str) and _may_have_text(message)) or not message.get("tool_calls"):
        changed["content"] = MARK

    def marked(called: Mapping) -> dict:
        arguments = MARK if isinstance(called.get("arguments"), str) else {MARK: MARK}
        return {**({"name": MARK} if names else {}), "arguments": arguments}

    if message.get("tool_calls"):
        changed["tool_calls"] = [_changed_call(call, marked) for call in message["tool_calls"]]
    return changed


def _may_have_text(message: dict) -> bool:
    """Whether a template accepts a text as the message's content. That of gpt-oss refuses one together with the
    thoughts of a call."""
    return bool(message["content"]) or "thinking" not in message


def _changed_call(call: Any, change: Callable[[Mapping], dict]) -> Any:
    """The tool call with `change` applied to its function, which has a name and arguments."""
    if not isinstance(call, Mapping):
        return call
    if "function" in call:
        return {**call, "function": _changed_call(call["function"], change)}
    return {**call, **change(call)}


# ---- messages and templates


def _with_text_arguments(message: dict) -> dict:
    """The message with the arguments of its tool calls as JSON text."""

    def as_text(called: Mapping) -> dict:
        arguments = called.get("arguments")
        return {"arguments": json.dumps(arguments, ensure_ascii=False)} if isinstance(arguments, Mapping) else {}

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_changed_call(call, as_text) for call in calls]} if calls else message


def _normalized(messages: Sequence[Any]) -> list[dict]:
    """Validated copies without None values, as in apply_chat_template."""
    return [{key: value for key, value in message.items() if value is not None} for message in message_list(messages)]


def _message_weight(message: dict, index: int) -> int:
    """Weight of an assistant's message: 0 if it has no loss, else 1.

    Raises:
        DataError: it has another weight.
    """
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise DataError(
            f'message {index} has "weight" {weight!r}, which must be 0 or 1; the weight of a whole sample stands '
            'next to "messages"'
        )
    return int(weight)


def _chat_template(tokenizer: Any, tools: Any) -> str:
    check_tokenizer(tokenizer)
    try:
        return str(tokenizer.get_chat_template(None, tools))
    except ValueError as error:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise DataError(
            f"{name}: samples with messages need a chat template; put a chat_template.jinja into the tokenizer's folder"
        ) from error


def _roles(conversation: list[dict]) -> str:
    roles = [message["role"] for message in conversation]
    shown = ", ".join(roles[:6]) + (", ..." if len(roles) > 6 else "")
    return f"the conversation ({shown})" if roles else "an empty conversation"
