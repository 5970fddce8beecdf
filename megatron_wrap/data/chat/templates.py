"""Renders a conversation with a chat template as transformers does, within limits."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import chain, islice
from typing import Any

from megatron_wrap.data.chat import template_limits
from megatron_wrap.data.chat.spans import Span
from megatron_wrap.data.chat.template_calls import FILTERS, bounded_filter, method_of, size_of_result, weight
from megatron_wrap.data.chat.template_limits import LimitExceeded, Result, within_limits
from megatron_wrap.errors import ConfigError, DataError

_BLOCK_CHUNKS = 1000
_MAX_BITS = 4096
"""Of an integer that a template computes."""


class TemplateLimitError(DataError):
    """A chat template takes too much time or memory for a conversation."""


def rendered(
    template: str, conversation: list[dict[str, Any]], with_spans: bool, **variables: Any
) -> tuple[str, list[Span]]:
    """The conversation as text, and the spans of the template's generation blocks if `with_spans`.

    Args:
        variables: more arguments of transformers' `render_jinja_template`.

    Raises:
        TemplateLimitError: it has more than MAX_CHARACTERS characters.
        Exception: the template rejects the conversation; a template is a program and can raise jinja's and Python's
            errors.
    """
    # Not apply_chat_template, which returns the generation blocks only as a token mask. With tokenizers that trim white
    # space, the mask covers the rest of the conversation if the last character of a block is in no token.
    texts, spans = _render_function()(
        conversations=[conversation], chat_template=template, return_assistant_tokens_mask=with_spans, **variables
    )
    return texts[0], [(begin, end) for begin, end in spans[0]] if with_spans else []


def bounded(work: Callable[[], Result]) -> Result:
    """`work()`, the renderings of one row.

    Raises:
        TemplateLimitError: it takes longer than MAX_RENDER_SECONDS of computing time, or more memory than
            MAX_RENDER_BYTES.
        ConfigError: MAX_STOPPED_IN_A_ROW calls in a row did so, so no row is at fault.
    """
    try:
        return within_limits(work)
    except LimitExceeded:
        _compiled.cache_clear()  # a block may have been left open
        taken = (
            f"the chat template takes more than {template_limits.MAX_RENDER_SECONDS:g} s of computing time or "
            f"{template_limits.MAX_RENDER_BYTES >> 20} MiB of memory for"
        )
        count = template_limits.stopped_in_a_row()
        if count >= template_limits.MAX_STOPPED_IN_A_ROW:
            raise ConfigError(f"{taken} each of {count} conversations in a row; correct it") from None
        raise TemplateLimitError(f"{taken} this conversation; correct the template or the conversation") from None


@lru_cache(maxsize=1)
def _render_function() -> Callable[..., Any]:
    """transformers' `render_jinja_template`, in which templates are compiled by `_compiled`."""
    from transformers.utils import chat_template_utils

    theirs: Any = chat_template_utils.render_jinja_template
    names = {**vars(chat_template_utils), "_compile_jinja_template": _compiled}
    function = types.FunctionType(theirs.__code__, names, theirs.__name__, theirs.__defaults__, theirs.__closure__)
    return functools.partial(function, **(theirs.__kwdefaults__ or {}))


@lru_cache(maxsize=128)
def _compiled(template: str) -> Any:
    """The template in an environment with transformers' extensions, filters and globals."""
    from transformers.utils import chat_template_utils

    theirs = chat_template_utils._compile_jinja_template("").environment
    extensions = [type(extension) for extension in theirs.extensions.values()]
    ours = _environment_class()(
        trim_blocks=theirs.trim_blocks, lstrip_blocks=theirs.lstrip_blocks, extensions=extensions
    )
    ours.filters.update(theirs.filters)
    ours.filters.update({name: bounded_filter(name, ours.filters[name], _check_call) for name in FILTERS})
    ours.globals.update(theirs.globals)
    return ours.from_string(template)


@lru_cache(maxsize=1)
def _environment_class() -> Any:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class BoundedTemplate(jinja2.Template):
        """Its `generate` ends at MAX_CHARACTERS."""

        def generate(self, *args: Any, **kwargs: Any) -> Iterator[str]:
            # one by one: the extension of generation blocks counts the characters before a block
            size = 0
            for chunk in super().generate(*args, **kwargs):
                size += len(chunk)
                _check_size(size)
                yield chunk

    class BoundedEnvironment(ImmutableSandboxedEnvironment):
        """Its templates end at MAX_CHARACTERS and compute no larger products, powers and texts: these are single
        instructions that no limit of time can stop."""

        template_class = BoundedTemplate
        intercepted_binops = frozenset(("*", "**", "%"))

        @staticmethod
        def concat(chunks: Iterable[str]) -> str:
            return "".join(chain.from_iterable(_blocks(chunks)))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if _is_large(operator, left, right) or _is_large(operator, right, left):
                raise TemplateLimitError(f"the chat template computes a value that is too large with {operator!r}")
            if operator == "%" and isinstance(left, str):
                _check_call("%", size_of_result("%", left, (right,)))
            return super().call_binop(context, operator, left, right)

        def call(__self, __context: Any, __function: Any, *args: Any, **kwargs: Any) -> Any:
            # as in jinja2, no name of a parameter is one that a template may use
            if (method := method_of(__function)) is not None:
                name, text = method
                _check_call(name, size_of_result(name, text, [*args, *kwargs.values()]))
            return super().call(__context, __function, *args, **kwargs)

    return BoundedEnvironment


def _blocks(chunks: Iterable[str]) -> Iterator[list[str]]:
    """Blocks of chunks, which are references to few texts and take no memory of their own."""
    iterator, size = iter(chunks), 0
    while block := list(islice(iterator, _BLOCK_CHUNKS)):
        size += sum(map(len, block))
        _check_size(size)
        yield block


def _check_size(size: int) -> None:
    if size > template_limits.MAX_CHARACTERS:
        raise TemplateLimitError(
            f"the chat template renders more than {template_limits.MAX_CHARACTERS:,} characters for this conversation; "
            "correct the template, or divide the conversation"
        )


def _check_call(name: str, size: int) -> None:
    if size > template_limits.MAX_CHARACTERS:
        raise TemplateLimitError(f"the chat template computes a text that is too large with {name!r}")


def _is_large(operator: str, left: Any, right: Any) -> bool:
    if not isinstance(right, int):
        return False
    if not isinstance(left, int):
        return hasattr(left, "__len__") and operator == "*" and weight(left) * right > template_limits.MAX_CHARACTERS
    bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
    return bits > _MAX_BITS
