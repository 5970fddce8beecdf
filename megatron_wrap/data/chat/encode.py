"""Converts samples to token ids and a loss mask; in chat samples, the mask selects the assistant's turns.

The boundaries of the assistant's turns come from the chat template, never from role names or token strings.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_wrap.data.chat.assistant_spans import assistant_spans, last_assistant, render
from megatron_wrap.data.chat.spans import TextTokens, encoded_text, mask_of_spans
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
