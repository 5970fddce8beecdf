"""Conversations with a model, and completions of a file of prompts, on any layout. Collective: every rank calls, global
rank 0 reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megatron_wrap.core.wrap import MegatronWrap
from megatron_wrap.errors import ConfigError, DataError
from megatron_wrap.generation.generate import Completion, fitting_max_new_tokens, generate
from megatron_wrap.generation.sampling import SamplingRule
from megatron_wrap.parallel.collectives import broadcast_object
from megatron_wrap.utils.progress import WorkProgress

RESET = "/reset"
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Character to which a tokenizer decodes the first bytes of an incomplete character."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of the generation of completions, with the names of `wrap.generate`."""

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0
    batch_size: int = 8


class Conversation:
    """A conversation with a model: messages with a chat template; without one, each text is completed by itself.

    Args:
        wrap: a run with a model and a tokenizer.
        system: content of a system message; None: there is none.

    Raises:
        ConfigError: the model has no tokenizer, or a system message and no chat template.
    """

    def __init__(self, wrap: MegatronWrap, sampling: Sampling, system: str | None = None) -> None:
        self._wrap, self._sampling = wrap, sampling
        self.has_template = _has_template(wrap.tokenizer, system)
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[dict[str, Any]] = []
        self._num_turns = 0

    def reset(self) -> None:
        """Forget all turns."""
        self._messages = []

    def answer(self, text: str, write: Callable[[str], object] | None = None) -> str:
        """The model's answer to the user's next message. Collective.

        Args:
            text: content of the message, equal on every rank.
            write: receives the parts of the answer as they are generated.

        Raises:
            DataError: the conversation does not fit the model's context, or its template refuses it; the turn is
                forgotten.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        prompt = [*self._system, *messages] if self.has_template else text
        stream = None if write is None else _TextStream(self._wrap.tokenizer, write)
        # the same question twice has two answers
        sampling = replace(self._sampling, seed=self._sampling.seed + self._num_turns, batch_size=1)
        update = None if stream is None else stream.update
        [completion] = _completions(self._wrap, [prompt], sampling, on_tokens=update)
        answer = completion["text"] or ""
        if stream is not None:
            stream.finish(answer)
        self._num_turns += 1
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        return answer


class _TextStream:
    """Writes the text of a growing list of tokens, as far as its characters are complete."""

    def __init__(self, tokenizer: Any, write: Callable[[str], object]) -> None:
        self._tokenizer, self._write = tokenizer, write
        self._written = ""

    def update(self, index: int, token_ids: list[int]) -> None:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        if not text.endswith(_INCOMPLETE):
            self.finish(text)

    def finish(self, text: str) -> None:
        if text.startswith(self._written):
            self._write(text[len(self._written) :])
            self._written = text


def talk(conversation: Conversation, read: Callable[[], str | None], write: Callable[[str], object], rank: int) -> None:
    """Answer messages until `read` returns None. Collective.

    Args:
        read: returns the next message, or None at the end; called on global rank 0.
        write: receives answers and error messages as text; called on global rank 0.
        rank: global rank of this process.
    """
    while (text := broadcast_object(read() if rank == 0 else None, source_rank=0)) is not None:
        if text.strip() == RESET:
            conversation.reset()
        elif text.strip():
            try:
                conversation.answer(text, write if rank == 0 else None)
            except DataError as error:  # on every rank
                if rank == 0:
                    write(
                        f"error: {error}" + (f"; {RESET} forgets the conversation" if conversation.has_template else "")
                    )
            if rank == 0:
                write("\n")


def complete_rows(
    wrap: MegatronWrap, rows: list[dict[str, Any]], sampling: Sampling, system: str | None = None
) -> list[dict[str, Any]]:
    """The rows of `read_prompts`, each with the text of its `completion` and its `finish_reason` (see `wrap.generate`).
    Collective.

    Args:
        rows: result of `read_prompts`, equal on every rank.
        system: content of a system message for rows of messages without one.

    Raises:
        DataError: a row cannot be completed.
    """
    _has_template(wrap.tokenizer, system)
    prompts = [_with_system(row["messages"] if "messages" in row else row["prompt"], system) for row in rows]
    completions: list[Completion] = []
    if prompts:
        with WorkProgress("chat", len(prompts), "prompt") as progress:
            completions = _completions(wrap, prompts, sampling, progress=progress)
    return [
        {**row, "completion": completion["text"], "finish_reason": completion["finish_reason"]}
        for row, completion in zip(rows, completions, strict=True)
    ]


def _completions(wrap: MegatronWrap, prompts: list[Any], sampling: Sampling, **reporting: Any) -> list[Completion]:
    """Completions by `generate`, which gets `on_tokens` or `progress` from `reporting`."""
    state, tokenizer = wrap.state, wrap.tokenizer
    limit = fitting_max_new_tokens(state, tokenizer, prompts, sampling.max_new_tokens)
    rule = SamplingRule(sampling.temperature, sampling.top_k, sampling.top_p)
    batch_size = sampling.batch_size
    return generate(state, tokenizer, prompts, limit, rule, sampling.seed, (), batch_size, caller="chat", **reporting)


def _with_system(prompt: str | list[dict[str, Any]], system: str | None) -> str | list[dict[str, Any]]:
    has_one = isinstance(prompt, str) or any(message.get("role") == "system" for message in prompt)
    return prompt if system is None or has_one else [{"role": "system", "content": system}, *prompt]


def _has_template(tokenizer: Any, system: str | None) -> bool:
    if tokenizer is None:
        raise ConfigError(
            "chat: the model has no tokenizer; give one with the override megatron_wrap.data.tokenizer=FOLDER"
        )
    has_template = bool(tokenizer.chat_template)
    if system is not None and not has_template:
        raise ConfigError("chat: a system message needs a chat template, which the tokenizer lacks; leave it out")
    return has_template
