"""Finds the assistant's characters in a conversation rendered with a chat template."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_wrap.data.spans import Span
from megatron_wrap.errors import DataError

# The pattern of transformers.utils.chat_template_utils.render_jinja_template.
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
ADD_MARKERS = (
    "put {% generation %} and {% endgeneration %} around the assistant's text in the tokenizer's chat template "
    "(chat_template.jinja)"
)


def assistant_spans(tokenizer: Any, messages: Sequence[Any], tools: Any = None) -> tuple[str, list[Span], bool]:
    """The rendered conversation, the assistant's spans [begin, end) in characters, and whether a span is all text that
    a turn adds (True) or a generation block of the template (False).

    Raises:
        DataError: the messages are malformed, the template rejects them, or the boundaries cannot be found.
    """
    conversation = _normalized(messages)
    template = _chat_template(tokenizer, tools)
    turns = [index for index, message in enumerate(conversation) if message["role"] == "assistant"]
    if not GENERATION_MARKER.search(template):
        text, _ = _render(tokenizer, conversation, tools, template)
        return text, [_turn_span(tokenizer, conversation, tools, template, index, text) for index in turns], True
    text, spans = _render(tokenizer, conversation, tools, template, with_spans=True)
    if turns and not spans:
        raise DataError(f"the chat template's generation blocks do not contain the assistant's turns; {ADD_MARKERS}")
    return text, spans, False


def render(tokenizer: Any, messages: Sequence[Any], tools: Any = None, add_generation_prompt: bool = False) -> str:
    """`tokenizer.apply_chat_template(messages, tokenize=False)`; DataError if the template rejects the messages."""
    template = _chat_template(tokenizer, tools)
    return _render(tokenizer, _normalized(messages), tools, template, add_generation_prompt)[0]


def _turn_span(tokenizer: Any, conversation: list[dict], tools: Any, template: str, index: int, text: str) -> Span:
    """The span that message `index` adds after its generation prompt, from two rendered prefixes."""
    try:
        prompt, _ = _render(tokenizer, conversation[:index], tools, template, add_generation_prompt=True)
        upto, _ = _render(tokenizer, conversation[: index + 1], tools, template)
    except DataError as error:
        raise DataError(
            f"the assistant's turns cannot be found, because the chat template cannot render only the first {index} or "
            f"{index + 1} messages ({error}); {ADD_MARKERS}"
        ) from error
    if not upto.startswith(prompt):
        reason = f"the template does not begin message {index} with its generation prompt"
    elif not text.startswith(upto):
        reason = f"the template renders the first {index + 1} messages differently if others follow"
    else:
        return len(prompt), len(upto)
    raise DataError(f"the assistant's turns cannot be found: {reason}; {ADD_MARKERS}")


def _normalized(messages: Sequence[Any]) -> list[dict]:
    """Validated copies without None values, as in apply_chat_template."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise DataError(f'"messages" must be a list of messages, not {type(messages).__name__}')
    if len(messages) == 0:
        raise DataError('"messages" is empty; a conversation has at least one message')
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f'message {index} must be {{"role": ..., "content": ...}}, not {str(message)[:60]}')
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _chat_template(tokenizer: Any, tools: Any) -> str:
    try:
        return tokenizer.get_chat_template(None, tools)
    except ValueError as error:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise DataError(
            f"{name}: samples with messages need a chat template; put a chat_template.jinja into the tokenizer's folder"
        ) from error


def _render(
    tokenizer: Any,
    conversation: list[dict],
    tools: Any,
    template: str,
    add_generation_prompt: bool = False,
    with_spans: bool = False,
) -> tuple[str, list[Span]]:
    # Not apply_chat_template, which returns the generation blocks only as a token mask. With tokenizers that trim white
    # space, the mask covers the rest of the conversation if the last character of a block belongs to no token.
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered: Any = render_jinja_template(
            conversations=[conversation],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=with_spans,
            add_generation_prompt=add_generation_prompt,
            **tokenizer.special_tokens_map,
        )
    except Exception as error:  # a template is a program and can raise jinja's and Python's errors
        raise DataError(
            f"the chat template rejects {_roles(conversation)}: {error or type(error).__name__}; "
            "change the conversation or the tokenizer's chat template"
        ) from error
    texts, spans = rendered
    return texts[0], [(begin, end) for begin, end in spans[0]] if with_spans else []


def _roles(conversation: list[dict]) -> str:
    roles = [message["role"] for message in conversation]
    shown = ", ".join(roles[:6]) + (", ..." if len(roles) > 6 else "")
    return f"the conversation ({shown})" if roles else "an empty conversation"
