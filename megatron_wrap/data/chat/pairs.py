"""Converts preference samples to token ids: a prompt with a chosen and a rejected answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_wrap.data.chat.encode import ChatTokens, encode_sample, sample_of_ids
from megatron_wrap.errors import DataError

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
