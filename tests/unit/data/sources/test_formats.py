"""Rows of every format become samples that the flows take; columns, weights, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_wrap.config.schema.data import SourceConfig
from megatron_wrap.data.chat.encode import encode_pair
from megatron_wrap.data.sources.formats import to_sample
from megatron_wrap.errors import DataError

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def sample(row: Any, **keys: Any) -> dict[str, Any]:
    actual = to_sample(row, SourceConfig(path="x.jsonl", name="x", **keys))
    assert actual.pop("source") == "x"
    return actual


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("messages", {"messages": CHAT}),
        ("prompt_completion", {"prompt": "p", "completion": "c"}),
        ("prompt_completion", {"prompt": CHAT[:1], "completion": CHAT[1:]}),
        ("text", {"text": "t"}),
        ("preference", {"prompt": "p", "chosen": "c", "rejected": "r"}),
        ("preference", {"chosen": CHAT, "rejected": [CHAT[0], {"role": "assistant", "content": "b"}]}),
        ("preference", {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}),
        ("tokens", {"input_ids": [1, 2], "loss_mask": [0, 1]}),
        ("tokens", {"input_ids": [1, 2], "labels": [-100, 2]}),
    ],
)
def test_a_row_in_the_flows_form_is_unchanged_declared_or_recognized(kind: Any, row: dict[str, Any]) -> None:
    assert sample(row) == sample(row, format=kind) == row


def test_columns_of_a_flow_of_ones_own_are_kept() -> None:
    assert sample({"picture": 1, "label": "x"}) == {"picture": 1, "label": "x"}


def test_columns_are_renamed_and_others_kept() -> None:
    row = {"instruction": "p", "output": "c", "id": 4}
    columns = {"prompt": "instruction", "completion": "output"}
    assert sample(row, columns=columns, format="prompt_completion") == {"prompt": "p", "completion": "c", "id": 4}
    swapped = sample({"prompt": "a", "completion": "b"}, columns={"prompt": "completion", "completion": "prompt"})
    assert swapped == {"prompt": "b", "completion": "a"}


SHAREGPT = {
    "system": "be brief",
    "conversations": [
        {"from": "human", "value": "weather?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Rome"}}'},
        {"from": "observation", "value": "sunny"},
        {"from": "gpt", "value": "It is sunny.", "reasoning_content": "tool"},
    ],
    "tools": '[{"name": "weather"}]',
}


def test_sharegpt_becomes_messages() -> None:
    expected = {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}],
            },
            {"role": "tool", "content": "sunny"},
            {"role": "assistant", "content": "It is sunny.", "reasoning_content": "tool"},
        ],
        "tools": [{"name": "weather"}],
    }
    assert sample(SHAREGPT) == sample(SHAREGPT, format="sharegpt") == expected
    several = {"from": "tool_call", "value": '[{"name": "a"}, {"name": "b"}]'}
    calls = sample({"conversations": [several]})["messages"][0]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["a", "b"]
    assert "system" not in sample({**SHAREGPT, "system": ""})["messages"][0]["role"]


def test_sharegpt_pairs_become_preference_pairs_that_can_be_encoded() -> None:
    row = {
        "conversations": [{"from": "human", "value": "q"}],
        "chosen": {"from": "gpt", "value": "good"},
        "rejected": {"from": "gpt", "value": "bad"},
    }
    assert (
        sample(row)
        == sample(row, format="preference")
        == {
            "prompt": [{"role": "user", "content": "q"}],
            "chosen": [{"role": "assistant", "content": "good"}],
            "rejected": [{"role": "assistant", "content": "bad"}],
        }
    )
    arrays = {
        name: np.array([position + 1]) for position, name in enumerate(("prompt_ids", "chosen_ids", "rejected_ids"))
    }
    chosen, rejected = encode_pair(None, sample(arrays))
    assert (chosen.input_ids, rejected.input_ids) == ([1, 2], [1, 3])


def test_arguments_of_tool_calls_that_are_json_become_mappings() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    row = {"messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}]}
    (actual,) = sample(row)["messages"][1]["tool_calls"]
    assert actual == {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert call["function"]["arguments"] == '{"x": 1}'


@pytest.mark.parametrize(
    ("row", "factor", "weight"),
    [
        ({}, 1.0, None),
        ({}, 0.5, 0.5),
        ({"weight": 2}, 1.0, 2.0),
        ({"weight": 0.25}, 2.0, 0.5),
        ({"weight": 0}, 3.0, 0.0),
    ],
)
def test_weights(row: dict[str, Any], factor: float, weight: float | None) -> None:
    assert sample({"text": "t", **row}, sample_weight=factor).get("weight") == weight


@pytest.mark.parametrize(
    ("row", "keys", "words"),
    [
        ([1], {}, ["mapping", "list"]),
        ({"texd": "x"}, {"format": "text"}, ['"text"', '"texd"', "did you mean texd?"]),
        ({"prompt": "x"}, {"format": "prompt_completion"}, ['"completion"', '"prompt"']),
        ({"a": "x"}, {"columns": {"text": "b"}}, ['"b"', '"a"']),
        ({"messages": "x"}, {}, ["list", "str"]),
        ({"messages": [{"role": "user"}]}, {}, ["message 0", "content"]),
        ({"messages": [{"content": "x"}]}, {}, ["message 0", "role"]),
        ({"messages": [*CHAT, {"role": "human", "content": "x"}]}, {}, ["message 2", "'human'", "user?"]),
        ({"messages": [{"role": "user", "content": 3}]}, {}, ["message 0", "int"]),
        ({"messages": [{"role": "assistant", "tool_calls": "{"}]}, {}, ["tool_calls", "JSON"]),
        ({"messages": CHAT, "tools": 3}, {}, ["tools", "int"]),
        ({"conversations": []}, {}, ["empty"]),
        ({"conversations": [{"from": "humam", "value": "x"}]}, {}, ["turn 0", "'humam'", "did you mean human?"]),
        ({"conversations": [{"value": "x"}]}, {}, ["turn 0", "from"]),
        ({"conversations": [{"from": "function_call", "value": "f(x)"}]}, {}, ["turn 0", "JSON"]),
        ({"conversations": [{"from": "function_call", "value": "[3]"}]}, {}, ["turn 0", "name"]),
        ({"prompt": "p", "completion": CHAT[1:]}, {}, ["prompt is text", "completion is messages"]),
        ({"prompt": 3, "completion": "c"}, {}, ['"prompt"', "int"]),
        ({"prompt": "p", "chosen": "c", "rejected": None}, {}, ['"rejected"', "NoneType"]),
        ({"text": "x", "weight": "1"}, {}, ["weight", "'1'"]),
        ({"text": "x", "weight": True}, {}, ["weight", "True"]),
    ],
)
def test_what_is_refused(row: Any, keys: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(DataError) as raised:
        sample(row, **keys)
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_roles_of_a_template_of_its_own_are_accepted() -> None:
    row = {"messages": [{"role": "observation", "content": "x"}, {"role": "environment", "content": "y"}]}
    assert sample(row) == row
