"""The characters of a rendered conversation that the assistant writes, as its chat template says."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_wrap.data.spans import Span
from megatron_wrap.errors import DataError

# As transformers.utils.chat_template_utils.render_jinja_template looks for the keyword.
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
ADD_MARKERS = (
    "put {% generation %} and {% endgeneration %} around what the assistant writes in the tokenizer's chat template "
    "(chat_template.jinja)"
)


def assistant_spans(tokenizer: Any, messages: Sequence[Any], tools: Any = None) -> tuple[str, list[Span], bool]:
    """The rendered conversation, the spans [begin, end) of it that the assistant writes, and whether these are all that
    a turn adds (True) or the template's own generation blocks (False). Characters, not tokens.

    Raises:
        DataError: the messages are malformed, the template refuses them, or its boundaries cannot be found.
    """
    conversation = _normalized(messages)
    template = _chat_template(tokenizer, tools)
    is_assistant = [message["role"] == "assistant" for message in conversation]
    if not GENERATION_MARKER.search(template):
        text, _ = _render(tokenizer, conversation, tools, template)
        turns = [index for index, yes in enumerate(is_assistant) if yes]
        return text, [_turn_span(tokenizer, conversation, tools, template, index, text) for index in turns], True
    text, spans = _render(tokenizer, conversation, tools, template, with_spans=True)
    if any(is_assistant) and not spans:
        raise DataError(
            f"the chat template has generation blocks, but none around the assistant's turns here; {ADD_MARKERS}"
        )
    return text, spans, False


def render(tokenizer: Any, messages: Sequence[Any], tools: Any = None, add_generation_prompt: bool = False) -> str:
    """The text of `tokenizer.apply_chat_template(messages, tokenize=False)`; DataError when the template refuses."""
    template = _chat_template(tokenizer, tools)
    return _render(tokenizer, _normalized(messages), tools, template, add_generation_prompt)[0]


def _turn_span(tokenizer: Any, conversation: list[dict], tools: Any, template: str, index: int, text: str) -> Span:
    """What message `index` adds behind the prompt for it: from the end of one rendered prefix to that of the next."""
    try:
        prompt, _ = _render(tokenizer, conversation[:index], tools, template, add_generation_prompt=True)
        upto, _ = _render(tokenizer, conversation[: index + 1], tools, template)
    except DataError as error:
        raise DataError(
            f"the chat template does not render the first {index} or {index + 1} messages alone, which is how the "
            f"assistant's turns are found ({error}); {ADD_MARKERS}"
        ) from error
    if not upto.startswith(prompt):
        what = f"the generation prompt for message {index} is not how the template begins that message"
    elif not text.startswith(upto):
        what = f"the template renders the first {index + 1} messages differently once others follow"
    else:
        return len(prompt), len(upto)
    raise DataError(f"the assistant's turns cannot be found by rendering prefixes: {what}; {ADD_MARKERS}")


def _normalized(messages: Sequence[Any]) -> list[dict]:
    """Checked copies without None values, which apply_chat_template drops too."""
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
            f"{name}: no chat template for samples with messages; put a chat_template.jinja into the tokenizer's folder"
        ) from error


def _render(
    tokenizer: Any,
    conversation: list[dict],
    tools: Any,
    template: str,
    add_generation_prompt: bool = False,
    with_spans: bool = False,
) -> tuple[str, list[Span]]:
    # The function under apply_chat_template: that gives the generation blocks only as a token mask, which marks all the
    # rest of the conversation when a block's last character has no token (tokenizers that trim white space).
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
    except Exception as error:  # a template is a program: jinja's errors, and any of Python's from within it
        raise DataError(
            f"the chat template refuses {_roles(conversation)}: {error or type(error).__name__}; "
            "change the conversation or the tokenizer's chat template"
        ) from error
    texts, spans = rendered
    return texts[0], [(begin, end) for begin, end in spans[0]] if with_spans else []


def _roles(conversation: list[dict]) -> str:
    roles = [message["role"] for message in conversation]
    shown = ", ".join(roles[:6]) + (", ..." if len(roles) > 6 else "")
    return f"the conversation ({shown})" if roles else "an empty conversation"
