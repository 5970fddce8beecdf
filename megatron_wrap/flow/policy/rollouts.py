"""Samples of policy optimization: a prompt with a response, its log-probabilities, and its reward or advantage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron_wrap.data.chat.encode import ChatTokens, LossOn, encode_sample, sample_of_ids
from megatron_wrap.data.chat.tokenizer import end_token_id
from megatron_wrap.errors import DataError

OLD, ROLLOUT, REFERENCE = "old_log_probs", "rollout_log_probs", "reference_log_probs"
ADVANTAGE, REWARD, GROUP = "advantage", "reward", "group"
LOG_PROBS = (OLD, ROLLOUT, REFERENCE)
"""Keys of a sample with one log-probability for each token of its response."""
PER_TOKEN = (*LOG_PROBS, ADVANTAGE)
"""Keys of a sample that become loss inputs [B, S] of the same name."""
OPTIONAL_KEYS = (*PER_TOKEN, REWARD, GROUP)
"""Keys that all samples of a step contain, or none."""
_FORMATS = (
    '"prompt_ids" and "response_ids"; "prompt" and "response" as two strings or two lists of messages; or "messages"'
)


@dataclass(frozen=True)
class RolloutFacts:
    """Metadata of a sample that the advantages of a step depend on."""

    keys: frozenset[str]
    """Keys of OPTIONAL_KEYS that the sample contains."""
    reward: float | None
    group: int | str | None


@dataclass(frozen=True)
class Rollout:
    """One response. `loss_mask` of `tokens` is 1 on the tokens that the policy generated and is trained on."""

    tokens: ChatTokens
    per_token: Mapping[str, list[float]]
    """Values of PER_TOKEN that the sample contains, one for each token of the sequence and 0 on the prompt; nan for a
    rollout's log-probability that is not known."""
    reward: float | None
    group: int | str | None
    """Name of the group; None: the sample has none."""
    truncated: bool
    """Whether the response has no end."""

    @property
    def facts(self) -> RolloutFacts:
        """Metadata that the advantages of a step depend on."""
        of_sample = {REWARD: self.reward, GROUP: self.group}
        keys = frozenset(self.per_token) | {key for key, value in of_sample.items() if value is not None}
        return RolloutFacts(keys, self.reward, self.group)


def encode_rollout(
    tokenizer: Any, sample: Mapping[str, Any], loss_on: LossOn, kept_length: int, cut_left: bool = False
) -> Rollout:
    """The tokens and values of a sample of `gpt_grpo`. Other keys than these are ignored:

    - `prompt_ids`, `response_ids` (`tokenizer` may be None); or `prompt`, `response`, or `messages`, which are
      tokenized as `encode_sample` does it, whose response begins with the first token with a loss. A `truncated` text
      has no eos token.
    - `response_mask`: 0 on tokens of the response that the policy did not generate, such as outputs of tools.
    - `old_log_probs`, `rollout_log_probs`, `reference_log_probs`: one number for each token of the response, or those
      of `wrap.forward`, one for each token of the sequence but the first. None or nan in `rollout_log_probs`: unknown.
    - `reward`, a number, with `group`, a name or an integer; or `advantage`, one number or one for each token.
    - `truncated`: true if the response has no end.

    Args:
        kept_length: tokens of the sequence after truncation.
        cut_left: truncation removes the sequence's first tokens.

    Raises:
        DataError: a key is missing, or its value is wrong.
    """
    truncated = sample.get("truncated") or False
    if not isinstance(truncated, bool):
        raise DataError(f'"truncated" is {truncated!r}; write true or false')
    tokens = _tokens(tokenizer, sample, loss_on, truncated)
    if tokens.weight != 1:
        raise DataError(
            f'"weight" is {tokens.weight}; gpt_grpo has no weights of samples, so scale "advantage" or remove it'
        )
    if 1 not in tokens.loss_mask:
        raise DataError("the response of a sample has no tokens; complete or remove the sample")
    first = tokens.loss_mask.index(1)
    if first == 0:
        raise DataError(
            "the prompt of a sample has no tokens, so the response's first token has no probability; add one"
        )
    tokens = _with_response_mask(tokens, first, sample.get("response_mask"))
    aligned = partial(
        _aligned, tokens=tokens, first=first, kept_length=min(kept_length, len(tokens)), cut_left=cut_left
    )
    per_token = {name: aligned(name, sample[name]) for name in LOG_PROBS if sample.get(name) is not None}
    advantage, reward = sample.get(ADVANTAGE), sample.get(REWARD)
    if isinstance(advantage, int | float):
        advantage = [advantage] * (len(tokens) - first)
    if advantage is not None:
        per_token[ADVANTAGE] = aligned(ADVANTAGE, advantage)
    elif reward is None:
        raise DataError('a sample has neither "reward" nor "advantage"; gpt_grpo needs one of them')
    return Rollout(
        tokens=tokens,
        per_token=per_token,
        reward=None if reward is None else _finite(REWARD, reward),
        group=_group(sample.get(GROUP), needed=advantage is None),
        truncated=truncated,
    )


def common_keys(facts: Sequence[RolloutFacts]) -> frozenset[str]:
    """Keys of OPTIONAL_KEYS that all samples of the step contain.

    Raises:
        DataError: a sample has other keys than the first sample.
    """
    expected = facts[0].keys
    for index, sample in enumerate(facts):
        for name in OPTIONAL_KEYS:
            if (name in sample.keys) != (name in expected):
                holder, other = (index, 0) if name in sample.keys else (0, index)
                raise DataError(
                    f'sample {holder} of a batch of {len(facts)} has "{name}" and sample {other} has none; give it to '
                    "all samples or to none"
                )
    return expected


def _tokens(tokenizer: Any, sample: Mapping[str, Any], loss_on: LossOn, truncated: bool) -> ChatTokens:
    if "prompt_ids" in sample and "response_ids" in sample:
        of_ids = sample_of_ids(sample["prompt_ids"], sample["response_ids"], sample.get("weight"))
        return encode_sample(None, of_ids)
    if "messages" in sample:
        return encode_sample(tokenizer, sample, loss_on)
    if "prompt" not in sample or "response" not in sample:
        keys = ", ".join(f'"{key}"' for key in sample) or "none"
        raise DataError(f"a sample has the keys {keys}; gpt_grpo needs {_FORMATS}")
    shared = {key: sample[key] for key in ("tools", "weight") if key in sample}
    tokens = encode_sample(tokenizer, {"prompt": sample["prompt"], "completion": sample["response"], **shared})
    if truncated and isinstance(sample["response"], str) and tokens.input_ids[-1] == end_token_id(tokenizer):
        return replace(tokens, input_ids=tokens.input_ids[:-1], loss_mask=tokens.loss_mask[:-1])
    return tokens


def _with_response_mask(tokens: ChatTokens, first: int, mask: Sequence[Any] | None) -> ChatTokens:
    if mask is None:
        return tokens
    response = len(tokens) - first
    if len(mask) != response or any(value not in (0, 1) for value in mask):
        raise DataError(
            f'"response_mask" has {len(mask)} values for a response of {response} tokens; write 1 or 0 for each token'
        )
    trained = [int(value) * learned for value, learned in zip(mask, tokens.loss_mask[first:], strict=True)]
    return replace(tokens, loss_mask=[0] * first + trained)


def _aligned(
    name: str, of_sample: Any, tokens: ChatTokens, first: int, kept_length: int, cut_left: bool
) -> list[float]:
    """One value for each token of the sequence, 0 on tokens without a loss. `first` is the index of the response's
    first token.

    Raises:
        DataError: a wrong number of values, or the value of a token with a loss is not finite.
    """
    listed = of_sample.tolist() if hasattr(of_sample, "tolist") else of_sample
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise DataError(f'"{name}" is {of_sample!r}; give one number for each token of the response')
    values = [math.nan if value is None else float(value) for value in listed]
    total, response = len(tokens), len(tokens) - first
    if len(values) == response:
        aligned = [0.0] * first + values
    elif len(values) == total - 1:
        aligned = [0.0, *values]
    elif len(values) == kept_length - 1:  # of a sequence that `wrap.forward` truncated
        rest = [0.0] * (total - kept_length)
        aligned = [*rest, 0.0, *values] if cut_left else [0.0, *values, *rest]
    else:
        raise DataError(
            f'"{name}" has {len(values)} values for a response of {response} tokens; give one for each token of '
            f"the response, or the {total - 1} that wrap.forward returns for the sequence"
        )
    trained = tokens.loss_mask
    if name != ROLLOUT:
        for index, (value, counts) in enumerate(zip(aligned, trained, strict=True)):
            if counts and not math.isfinite(value):
                raise DataError(f'"{name}" is {value} for token {index - first} of the response; it must be finite')
    elif any(value == math.inf for value in aligned):
        raise DataError(f'"{name}" contains inf; write null for a log-probability that is not known')
    return [value if counts else 0.0 for value, counts in zip(aligned, trained, strict=True)]


def _finite(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f'"{name}" is {value!r}; it must be a finite number, so correct it or remove the sample')
    return number


def _group(name: Any, needed: bool) -> int | str | None:
    if name is None and needed:
        raise DataError(
            'a sample has a "reward" and no "group"; name the group of responses that its advantage is relative to, '
            'such as the number of its prompt, or give "advantage"'
        )
    if isinstance(name, bool) or not isinstance(name, int | str | None):
        raise DataError(f'"group" is {name!r}; it must be an integer or a string')
    return name
