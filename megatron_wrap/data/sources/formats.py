"""Converts a row of a source to a sample as the flows take it: columns, formats, weights.

| format | columns |
| --- | --- |
| messages | `messages`: OpenAI's messages, `role` and `content` or `tool_calls`; `tools` beside it |
| sharegpt | `conversations`: `from` and `value`; converted to messages; `system` and `tools` beside it |
| prompt_completion | `prompt` and `completion`, two strings or two lists of messages |
| text | `text` |
| preference | `chosen` and `rejected`, with `prompt` or `conversations` unless both are conversations |
| tokens | `input_ids` with `loss_mask` or `labels`; `prompt_ids`, `chosen_ids` and `rejected_ids` for pairs |
"""

from __future__ import annotations

import difflib
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_wrap.config.schema.data import SourceConfig
from megatron_wrap.data.sources.rows import Rows, Sample, converted
from megatron_wrap.errors import DataError
from megatron_wrap.nearest_names import did_you_mean

_COLUMNS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages",),),
    "sharegpt": (("conversations",),),
    "prompt_completion": (("prompt", "completion"),),
    "text": (("text",),),
    "preference": (("chosen", "rejected"), ("prompt_ids", "chosen_ids", "rejected_ids")),
    "tokens": (
        ("input_ids", "loss_mask"),
        ("input_ids", "labels"),
        ("prompt_ids", "chosen_ids", "rejected_ids"),
    ),
}
"""Format -> the alternative sets of columns, one of which it needs."""
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_OTHER_NAMES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
SHAREGPT_ROLES: Mapping[str, str] = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "tool_response", "function"), "tool"),
}
"""Name of a speaker in `from` -> role of the message; a function_call is an assistant's message with tool_calls."""
_CALLS = ("function_call", "tool_call")


class SourceRows:
    """The samples of one source: its rows in the form that the flows take. See `Rows`."""

    def __init__(self, rows: Rows, source: SourceConfig) -> None:
        self._rows, self._convert = rows, functools.partial(to_sample, source=source)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        sample: Sample = converted(self._convert, self._rows[index], lambda: self._rows.where(index))
        return sample

    def where(self, index: int) -> str:
        """See `Rows`."""
        return self._rows.where(index)


def to_sample(row: Any, source: SourceConfig) -> Sample:
    """A row with our column names, in OpenAI's form where it is a conversation.

    The key `source` is the name of the source, and `weight` the column of this name times `sample_weight`, where the
    source has one of the two. Other columns are kept.

    Raises:
        DataError: missing columns, a malformed conversation, or a weight that is not finite; without file and row.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"a row must be a mapping from columns to values, not a {type(row).__name__}")
    sample = _renamed(row, source.columns)
    kind: str = source.format
    if kind == "auto":
        kind = _recognized(sample)
    elif not any(all(name in sample for name in names) for names in _COLUMNS[kind]):
        raise DataError(_missing(sample, kind))
    if kind == "sharegpt":
        sample["messages"] = _from_sharegpt(sample.pop("conversations"), sample.pop("system", None))
    if kind == "preference":
        _convert_preference(sample)
    if "messages" in sample and kind in ("messages", "sharegpt"):
        sample["messages"] = _checked_messages(sample["messages"], '"messages"')
    _check_text(sample, kind)
    if sample.get("tools") is not None and kind in ("messages", "sharegpt", "prompt_completion", "preference"):
        sample["tools"] = _listed(sample["tools"], '"tools"')
    for name in ("input_ids", "loss_mask", "labels", "prompt_ids", "chosen_ids", "rejected_ids"):
        if hasattr(sample.get(name), "tolist"):  # an array of numpy or torch
            sample[name] = sample[name].tolist()
    if "weight" in sample or source.sample_weight != 1:
        sample["weight"] = sample_weight(sample) * source.sample_weight
    sample["source"] = source.name
    return sample


def sample_weight(sample: Mapping[str, Any]) -> float:
    """The sample's `weight`; 1 if it has none, or null.

    Raises:
        DataError: it is not a finite number of at least 0.
    """
    weight = sample.get("weight")
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise DataError(
            f'"weight" is {weight!r}; the factor of a sample\'s loss must be a finite number of at least 0, so correct '
            "it, or rename the column if it has another meaning"
        )
    return float(weight)


def _renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> Sample:
    missing = [column for column in columns.values() if column not in row]
    if missing:
        names = ", ".join(f'"{name}"' for name in row) or "none"
        hint = did_you_mean(missing[0], list(row))
        raise DataError(f'the column "{missing[0]}" of columns is missing; the row has {names}{hint}')
    renamed = set(columns.values())
    kept = {name: value for name, value in row.items() if name not in renamed}
    return {**kept, **{key: row[column] for key, column in columns.items()}}


def _recognized(sample: Sample) -> str:
    """The format of a row; "" where its columns are a flow's own."""
    turns = sample.get("conversations")
    if "messages" not in sample and isinstance(turns, Sequence) and not isinstance(turns, str):
        return "preference" if "chosen" in sample and "rejected" in sample else "sharegpt"
    for kind in ("messages", "tokens", "preference", "prompt_completion", "text"):
        if any(all(name in sample for name in names) for names in _COLUMNS[kind]):
            return kind
    return ""


def _missing(sample: Sample, kind: str) -> str:
    wanted = [" and ".join(f'"{name}"' for name in names) for names in _COLUMNS[kind]]
    absent = next((name for name in _COLUMNS[kind][0] if name not in sample), "")
    columns = ", ".join(f'"{name}"' for name in sample) or "none"
    return (
        f"format {kind} needs the columns {', or '.join(wanted)}, and the row has {columns}; name them in columns: "
        f"{{{absent}: THEIR_NAME}}{did_you_mean(absent, list(sample))}"
    )


def _checked_messages(messages: Any, name: str) -> list[dict[str, Any]]:
    """Messages as chat templates take them: the arguments of tool calls as mappings."""
    messages = message_list(messages, name)
    return [_checked_message(message, f"message {index} of {name}") for index, message in enumerate(messages)]


def message_list(messages: Any, name: str = '"messages"') -> Sequence[Mapping[str, Any]]:
    """The messages of a conversation, unchanged.

    Raises:
        DataError: there is none, or one is not a mapping with a role.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise DataError(f"{name} must be a list of messages, not a {type(messages).__name__}")
    if not messages:
        raise DataError(f"{name} is empty; a conversation has at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            shown = str(message)[:60]
            raise DataError(f'message {index} of {name} must be {{"role": ..., "content": ...}}, not {shown}')
    return messages


def _checked_message(message: Mapping[str, Any], subject: str) -> dict[str, Any]:
    role = message["role"]
    if role not in _ROLES:
        # templates may have roles of their own, so only a likely mistake is refused
        meant = _OTHER_NAMES.get(role) or next(iter(difflib.get_close_matches(role, _ROLES, 1, 0.8)), None)
        if meant is not None or not role:
            raise DataError(f"{subject} has the role {role!r}; did you mean {meant or 'user'}?")
    content = message.get("content")
    if content is None and not (set(message) - {"role", "content", "name", "weight"}):
        raise DataError(f'{subject} ({role}) has no content; give "content" or "tool_calls"')
    if content is not None and not isinstance(content, (str, list)):
        raise DataError(f"{subject} ({role}): content must be a string, not a {type(content).__name__}")
    calls = message.get("tool_calls")
    if calls is None:
        return dict(message)
    return {**message, "tool_calls": [_tool_call(call, subject) for call in _listed(calls, f"tool_calls of {subject}")]}


def _tool_call(call: Any, subject: str) -> dict[str, Any]:
    """A tool call with its arguments as a mapping: OpenAI writes them as JSON text, and chat templates would quote it
    once more."""
    if not isinstance(call, Mapping):
        raise DataError(f"a tool call of {subject} must be a mapping, not a {type(call).__name__}")
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _tool_call(call["function"], subject)}
    arguments = call.get("arguments")
    if isinstance(arguments, str) and arguments.strip().startswith("{"):
        return {**call, "arguments": _from_json(arguments, f"arguments of a tool call of {subject}")}
    return dict(call)


def _from_sharegpt(turns: Any, system: Any) -> list[dict[str, Any]]:
    """OpenAI's messages from ShareGPT's turns.

    `from` (or `role`) is one of SHAREGPT_ROLES and `value` (or `content`) the text. The value of a
    function_call is JSON, `{"name": ..., "arguments": {...}}` or a list of these. `system` becomes the first message.
    """
    if isinstance(turns, (str, Mapping)) or not isinstance(turns, Sequence):
        raise DataError(f'"conversations" must be a list of turns, not a {type(turns).__name__}')
    if not turns:
        raise DataError('"conversations" is empty; a conversation has at least one turn')
    messages = [_turn(turn, index) for index, turn in enumerate(turns)]
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _turn(turn: Any, index: int) -> dict[str, Any]:
    speaker = turn.get("from", turn.get("role")) if isinstance(turn, Mapping) else None
    value = turn.get("value", turn.get("content")) if isinstance(turn, Mapping) else None
    if not isinstance(speaker, str) or (value is not None and not isinstance(value, str)):
        raise DataError(f'turn {index} must be {{"from": ..., "value": ...}}, not {str(turn)[:60]}')
    role = SHAREGPT_ROLES.get(speaker)
    if role is None:
        hint = did_you_mean(speaker, SHAREGPT_ROLES)
        raise DataError(f"turn {index} is from {speaker!r}; known are {', '.join(SHAREGPT_ROLES)}{hint}")
    if speaker in _CALLS:
        calls = _from_json(value or "", f"the {speaker} of turn {index}")
        calls = calls if isinstance(calls, list) else [calls]
        if not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
            raise DataError(
                f'the {speaker} of turn {index} must be {{"name": ..., "arguments": ...}} or a list of these'
            )
        return {"role": role, "tool_calls": [{"type": "function", "function": dict(call)} for call in calls]}
    further = {key: below for key, below in turn.items() if key not in ("from", "value", "role", "content")}
    return {"role": role, "content": value, **further}


def _convert_preference(sample: Sample) -> None:
    """The prompt of `conversations`, and answers that are a turn or a message, as lists of messages."""
    if "conversations" in sample and "prompt" not in sample:
        sample["prompt"] = _from_sharegpt(sample.pop("conversations"), sample.pop("system", None))
    for name in ("chosen", "rejected"):
        answer = sample.get(name)
        if isinstance(answer, Mapping):
            answer = [answer]
        if isinstance(answer, list) and answer and isinstance(answer[0], Mapping) and "from" in answer[0]:
            answer = _from_sharegpt(answer, None)
        if name in sample:
            sample[name] = answer


def _check_text(sample: Sample, kind: str) -> None:
    names = {
        "text": ("text",),
        "prompt_completion": ("prompt", "completion"),
        "preference": tuple(name for name in ("prompt", "chosen", "rejected") if name in sample),
    }.get(kind, ())
    kinds = {name: "messages" if isinstance(sample[name], list) else "text" for name in names}
    for name in names:
        value = sample[name]
        if isinstance(value, list) and kind != "text":
            # a prompt may be empty: the completion is then the whole conversation
            sample[name] = _checked_messages(value, f'"{name}"') if value or name != "prompt" else value
        elif not isinstance(value, str):
            allowed = "a string" if kind == "text" else "a string or a list of messages"
            raise DataError(f'"{name}" must be {allowed}, not a {type(value).__name__}')
    if len(set(kinds.values())) > 1:
        raise DataError(f"{', '.join(f'{name} is {form}' for name, form in kinds.items())}; they must have one form")


def _listed(value: Any, subject: str) -> list[Any]:
    """Convert a value to a list; tables have JSON text instead of a list if its entries differ."""
    value = _from_json(value, subject) if isinstance(value, str) else value
    if not isinstance(value, list):
        raise DataError(f"{subject} must be a list, not a {type(value).__name__}")
    return value


def _from_json(text: str, subject: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{subject}: not JSON ({error})") from error
