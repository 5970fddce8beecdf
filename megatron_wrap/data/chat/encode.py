"""Converts samples to token ids and a loss mask, in chat samples of the assistant's turns; pairs of a chosen and a
rejected answer; prompts for generation.

The boundaries of the assistant's turns come from the chat template, never from role names or token strings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_wrap.config.checks.vocabulary import check_token_ids
from megatron_wrap.data.chat.assistant_spans import assistant_spans, last_assistant, render
from megatron_wrap.data.chat.text_tokens import TextTokens, encoded_text, mask_of_spans
from megatron_wrap.data.chat.tokenizer import end_token_id
from megatron_wrap.data.sources.formats import sample_weight
from megatron_wrap.errors import DataError

IGNORED_LABEL = -100
"""The label of a token without loss: torch.nn.functional.cross_entropy's default `ignore_index`."""
LossOn = Literal["assistant", "last_assistant", "all"]
"""Tokens of a conversation that have a loss: those of every turn of the assistant, those of its last turn, or all."""
SAMPLE_KEYS = (
    '"messages" (and "tools"), "prompt" and "completion", "text", '
    '"input_ids" and "loss_mask", or "input_ids" and "labels"'
)


@dataclass(frozen=True)
class ChatTokens:
    """One sample's tokens. `loss_mask[i]` is 1 if token i has a loss; it is not shifted and has the same length."""

    input_ids: list[int]
    loss_mask: list[int]
    weight: float = 1.0
    """Factor of the sample's loss and of its loss weight: 2 counts it twice, 0 not at all."""

    def __len__(self) -> int:
        return len(self.input_ids)


def tokenize_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    loss_on: LossOn = "assistant",
) -> ChatTokens:
    """Tokenize a conversation with the tokenizer's chat template and mask the assistant's turns.

    The ids equal `tokenizer.apply_chat_template(messages)`. The mask covers the assistant's text and its end-of-turn
    token: the template's `{% generation %}` blocks if it has them, else the text that each assistant message adds to
    the rendered conversation before it (including its generation prompt). That text is as in the whole conversation,
    without the thoughts that a template drops once another question follows. A token with characters inside and outside
    such a span is included, because the model has to generate it.

    Args:
        messages: `{"role": ..., "content": ...}` in order, with any roles and keys that the template supports.
        tools: tool descriptions for the template.
        loss_on: "last_assistant" masks only the assistant's last turn, "all" every token.

    Raises:
        DataError: the messages are malformed, the template rejects them, or the turns' boundaries cannot be found.
    """
    if loss_on == "all":
        ids = TextTokens.of(tokenizer, render(tokenizer, messages, tools)).input_ids
        return ChatTokens(ids, [1] * len(ids))
    first = last_assistant(messages) if loss_on == "last_assistant" else 0
    return _tokenize_turns(tokenizer, messages, tools, first)


def encode_sample(tokenizer: Any, sample: Mapping[str, Any], loss_on: LossOn = "assistant") -> ChatTokens:
    """Tokens and loss mask of one sample of a data file. The first matching format is used, other keys are ignored.

    - `messages`, optionally `tools`: `tokenize_chat`.
    - `input_ids` with `loss_mask`, or with `labels` (the same ids, or -100 without loss): unchanged; `tokenizer` may
      be None.
    - `prompt` and `completion`: two strings (loss on the completion and an appended eos token), or two lists of
      messages (loss on the assistant's turns of the completion).
    - `text`: loss on the whole text and an appended eos token.

    A bos token is prepended to plain text if the tokenizer does so. A key `weight` is the sample's weight.

    Args:
        loss_on: applies to `messages` only.

    Raises:
        DataError: unknown keys or invalid values; the message lists the supported formats.
    """
    tokens = _encode(tokenizer, sample, loss_on)
    weight = sample_weight(sample)
    return tokens if weight == 1 else replace(tokens, weight=weight)


def sample_of_ids(prompt: Iterable[int], answer: Iterable[int], weight: float | None) -> dict[str, Any]:
    """A sample for `encode_sample` whose tokens are known; only those of the answer have a loss."""
    prompt, answer = list(prompt), list(answer)
    return {"input_ids": prompt + answer, "loss_mask": [0] * len(prompt) + [1] * len(answer), "weight": weight}


def _encode(tokenizer: Any, sample: Mapping[str, Any], loss_on: LossOn) -> ChatTokens:
    if "messages" in sample:
        return tokenize_chat(tokenizer, sample["messages"], sample.get("tools"), loss_on)
    if "input_ids" in sample and ("loss_mask" in sample or "labels" in sample):
        return _take_tokens(sample)
    if "prompt" in sample and "completion" in sample:
        prompt, completion = sample["prompt"], sample["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return _encode_text(tokenizer, prompt + completion, loss_from=len(prompt))
        if isinstance(prompt, list) and isinstance(completion, list):
            return _tokenize_turns(tokenizer, [*prompt, *completion], sample.get("tools"), first=len(prompt))
        raise DataError(
            '"prompt" and "completion" must be two strings or two lists of messages, '
            f"not {type(prompt).__name__} and {type(completion).__name__}"
        )
    if "text" in sample:
        if not isinstance(sample["text"], str):
            raise DataError(f'"text" must be a string, not {type(sample["text"]).__name__}')
        return _encode_text(tokenizer, sample["text"], loss_from=0)
    keys = ", ".join(f'"{key}"' for key in sample) or "none"
    raise DataError(f"a sample has the keys {keys}; supported are {SAMPLE_KEYS}")


def truncate(tokens: ChatTokens, max_length: int, rule: str) -> tuple[ChatTokens, bool]:
    """Truncate to `max_length` tokens; also returns whether tokens were removed.

    Args:
        rule: "right" removes tokens at the end, "left" at the beginning, "refuse" raises instead.

    Raises:
        DataError: the sample is longer and the rule is "refuse".
    """
    length = len(tokens)
    if length <= max_length:
        return tokens, False
    if rule == "refuse":
        raise DataError(
            f"a sample has {length} tokens, {length - max_length} more than the {max_length} that fit, and truncation "
            "is refuse; set it to right (keeps the beginning) or left, raise the sequence length or remove the sample"
        )
    kept = slice(max_length) if rule == "right" else slice(length - max_length, length)
    return replace(tokens, input_ids=tokens.input_ids[kept], loss_mask=tokens.loss_mask[kept]), True


def _encode_text(tokenizer: Any, text: str, loss_from: int) -> ChatTokens:
    """Plain text with loss from character `loss_from`, with the tokenizer's bos token and an eos token."""
    tokens = TextTokens.of(tokenizer, text)
    mask = mask_of_spans(tokenizer, tokens, [(loss_from, len(text))])
    ids = tokens.input_ids
    bos, end = tokenizer.bos_token_id, end_token_id(tokenizer)
    # The tokens of an empty text show whether the tokenizer prepends bos (Llama does, GPT-2 does not).
    if bos is not None and bos in encoded_text(tokenizer, "")["input_ids"] and ids[:1] != [bos]:
        ids, mask = [bos, *ids], [0, *mask]
    if ids[-1:] != [end]:
        ids, mask = [*ids, end], [*mask, 1]
    return ChatTokens(ids, mask)


def _tokenize_turns(tokenizer: Any, messages: Sequence[Any], tools: Any, first: int) -> ChatTokens:
    """A conversation with loss on the assistant's turns from message `first` on."""
    text, spans, whole_turns = assistant_spans(tokenizer, messages, tools, first)
    tokens = TextTokens.of(tokenizer, text)
    return ChatTokens(tokens.input_ids, mask_of_spans(tokenizer, tokens, spans, cut_after_end_token=whole_turns))


def _take_tokens(sample: Mapping[str, Any]) -> ChatTokens:
    """Tokens and mask of a sample that is already tokenized."""
    ids = _integers(sample, "input_ids")
    if any(token < 0 for token in ids):
        raise DataError(f'"input_ids" contains {min(ids)}; token ids must be 0 or more')
    key = "loss_mask" if "loss_mask" in sample else "labels"
    values = _integers(sample, key)
    if len(values) != len(ids):
        raise DataError(f'"input_ids" has {len(ids)} entries and "{key}" {len(values)}; their lengths must be equal')
    if key == "loss_mask":
        if any(value not in (0, 1) for value in values):
            raise DataError('"loss_mask" must contain only 0 and 1')
        return ChatTokens(ids, values)
    for position, (token, label) in enumerate(zip(ids, values, strict=True)):
        if label not in (token, IGNORED_LABEL):
            raise DataError(
                f'"labels" has {label} at position {position} where "input_ids" has {token}; labels must equal '
                f"the input ids, or be {IGNORED_LABEL} without loss, not shifted: the shift by one is applied later"
            )
    return ChatTokens(ids, [int(label != IGNORED_LABEL) for label in values])


def _integers(sample: Mapping[str, Any], key: str) -> list[int]:
    values = sample[key]
    if not isinstance(values, Sequence) or isinstance(values, str) or not all(isinstance(v, int) for v in values):
        raise DataError(f'"{key}" must be a list of integers')
    return [int(value) for value in values]


PAIR_KEYS = (
    '"prompt", "chosen" and "rejected"; "chosen" and "rejected" as whole conversations; or "prompt_ids", "chosen_ids" '
    'and "rejected_ids"'
)


def are_equal_answers(sequences: Sequence[Any]) -> bool:
    """Whether the sequences of a sample are a pair with the same tokens, for which most losses on pairs have no
    gradient."""
    return len(sequences) == 2 and list(sequences[0].input_ids) == list(sequences[1].input_ids)


def encode_pair(tokenizer: Any, sample: Mapping[str, Any]) -> tuple[ChatTokens, ChatTokens]:
    """Tokens of the prompt with the chosen and with the rejected answer; the loss mask selects the answer.

    - `prompt`, `chosen`, `rejected`: three strings (an eos token is appended to the answers), or three lists of
      messages (the mask selects the assistant's turns of an answer).
    - `chosen`, `rejected`: two lists of messages; their common first messages are the prompt.
    - `prompt_ids`, `chosen_ids`, `rejected_ids`: already tokenized as by trl's DPOTrainer, answers without the prompt;
      `tokenizer` may be None.

    A key `weight` is the weight of the pair, in both results.

    Raises:
        DataError: unknown keys or invalid values; the message lists the supported formats.
    """
    if all(key in sample for key in ("prompt_ids", "chosen_ids", "rejected_ids")):
        return _encode_ids(sample, "chosen_ids"), _encode_ids(sample, "rejected_ids")
    if "chosen" not in sample or "rejected" not in sample:
        keys = ", ".join(f'"{key}"' for key in sample) or "none"
        raise DataError(f"a sample has the keys {keys}; a preference pair needs {PAIR_KEYS}")
    chosen, rejected = sample["chosen"], sample["rejected"]
    if "prompt" in sample:
        prompt = sample["prompt"]
    elif isinstance(chosen, list) and isinstance(rejected, list):
        shared = _shared_messages(chosen, rejected)
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    else:
        raise DataError(f'"chosen" and "rejected" are strings without a "prompt"; a preference pair needs {PAIR_KEYS}')

    def encoded(answer: Any) -> ChatTokens:
        shared = {key: sample[key] for key in ("tools", "weight") if key in sample}
        return encode_sample(tokenizer, {"prompt": prompt, "completion": answer, **shared})

    return encoded(chosen), encoded(rejected)


def _shared_messages(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Number of first messages that both conversations have in common."""
    both = list(zip(chosen, rejected, strict=False))
    shared = next((index for index, (left, right) in enumerate(both) if left != right), len(both))
    if shared in (len(chosen), len(rejected)):
        raise DataError(
            '"chosen" and "rejected" are equal, or one is the beginning of the other; they must have different answers'
        )
    return shared


def _encode_ids(sample: Mapping[str, Any], key: str) -> ChatTokens:
    return encode_sample(None, sample_of_ids(sample["prompt_ids"], sample[key], sample.get("weight")))


PROMPT_FORMS = "a text, a list of messages or a list of token ids"


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
        raise DataError(f"wrap.generate: a prompt is {PROMPT_FORMS}, not {str(prompt)[:60]!r}")
    if not ids:
        raise DataError(f"wrap.generate: the prompt {prompt!r} has no tokens; give at least one")
    check_token_ids("wrap.generate: a prompt", ids, vocab_size)
    return ids
