"""The chat templates of published models: the trained tokens decode to the assistant's text and its end token."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from typing import Any

import pytest
from published_templates import FAMILIES, Family

from megatron_wrap.data.chat.assistant_spans import render
from megatron_wrap.data.chat.encode import encode_sample, tokenize_chat

pytestmark = pytest.mark.transformers

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL_ID = "abcdefghi"  # Mistral needs nine characters
Message = dict[str, Any]


def turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


QUESTIONS = [
    turn("user", "Hello, who are you?"),
    turn("assistant", "A naïve 🦙.\n\nAsk me more: assistant?"),
    turn("user", "What is <b>2</b>?"),
    turn("assistant", "Two"),
    turn("user", "Thanks"),
    turn("assistant", "You're welcome.\n- A\n- B"),
]
THOUGHTS = [
    message if message["role"] == "user" else turn("assistant", f"<think>\nHm {i}.\n</think>\n\n{message['content']}")
    for i, message in enumerate(QUESTIONS)
]


THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
"""Of gpt-oss, before the answer of the same turn."""


def tool_conversation(family: Family) -> list[Message]:
    """Two questions: both need a call of a tool."""
    arguments: Any = {"city": "Zürich"}
    if family.arguments_as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    call = {"id": CALL_ID, "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        turn("user", "Is it raining in Zürich?"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": CALL_ID, "name": "weather", "content": "rain"},
        turn("assistant", "Yes, it rains."),
        turn("user", "And now?"),
        turn("assistant", "I do not know."),
    ]


@pytest.fixture(scope="module")
def tokenizer_of() -> Callable[..., Any]:
    """tokenizer_of(family) -> a byte-level tokenizer without merges, with the family's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(family: Family, template: str | None = None) -> Any:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        model = Tokenizer(models.BPE({piece: number for number, piece in enumerate(alphabet)}, []))
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        model.decoder = decoders.ByteLevel()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=model,
            bos_token=family.bos,
            eos_token=family.eos,
            additional_special_tokens=list(family.special),
            clean_up_tokenization_spaces=False,
        )
        tokenizer.chat_template = family.template if template is None else template
        return tokenizer

    return make


def trained(tokenizer: Any, tokens: Any) -> str:
    return str(tokenizer.decode([i for i, mask in zip(tokens.input_ids, tokens.loss_mask, strict=True) if mask]))


def answers(family: str, conversation: list[Message]) -> list[str]:
    """What each turn of the assistant must be trained on, from the formats that the models' authors document."""
    end = FAMILIES[family].special[0]
    texts = []
    for index, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        text = message["content"]
        if "tool_calls" in message:
            text = CALLS[family]
        thoughts, _, answer = text.rpartition("</think>")
        is_last = all(later["role"] != "user" for later in conversation[index:])
        if family in ("deepseek-v3", "deepseek-r1"):
            text = answer if thoughts else text  # no turn shows thoughts
        elif family == "qwen3" and thoughts and not is_last:
            text = answer.lstrip("\n")
        elif family == "qwen3" and not thoughts and index == len(conversation) - 1:
            text = f"<think>\n\n</think>\n\n{text}"
        elif family == "qwen3.5" and is_last:  # the prompt contains <think>
            shown = thoughts.removeprefix("<think>").strip()
            text = f"{shown}\n</think>\n\n{answer.lstrip()}"
        elif family == "qwen3.5" and thoughts:
            text = answer.lstrip("\n")
        elif family == "mistral" and "tool_calls" not in message:
            text = f" {text}"
        elif family == "phi-4-mini" and index == len(conversation) - 1:
            text += end
            end = FAMILIES[family].eos  # closes the conversation, and is part of what its last turn adds
        elif family == "minimax-m2" and thoughts:  # the prompt opens those that are shown
            text = text.removeprefix("<think>\n") if is_last else answer.strip("\n")
        elif family == "olmo-3" and index == len(conversation) - 1:
            end = FAMILIES[family].eos
        elif family == "smollm3":
            text, end = f"<|im_start|>assistant\n{text}", "<|im_end|>\n"  # its generation blocks
        elif family == "gpt-oss" and "tool_calls" in message:
            end = "<|call|>"
        elif family == "gpt-oss":
            is_last = message is conversation[-1]
            text, end = f"<|channel|>final<|message|>{text}", "<|return|>" if is_last else "<|end|>"
            if is_last and "thinking" in message:
                text = f"{THOUGHT}{text}"
        elif family == "glm4":
            shown = thoughts.removeprefix("<think>").strip() if is_last else ""
            text = f"\n<think>{shown}</think>\n" + (CALLS[family] if "tool_calls" in message else answer.strip())
            following = conversation[index + 1 : index + 2]  # whose first token ends the turn
            end = {"user": "<|user|>", "tool": "<|observation|>"}[following[0]["role"]] if following else ""
        texts.append(text + end)
    return texts


CALLS = {
    "llama3.1": '{"name": "weather", "parameters": {"city": "Zürich"}}',
    "qwen2.5": '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>',
    "qwen3": '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>',
    "qwen3-next": '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>',
    "qwen3.5": "<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n</function>\n</tool_call>",
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {{"city": "Zürich"}}, "id": "{CALL_ID}"}}]',
    "minimax-m2": '\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Zürich</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "olmo-3": '<function_calls>weather(city="Zürich")</function_calls>',
    "glm4": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n</tool_call>",
    "gpt-oss": ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Zürich"}',
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Zürich"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
}
CALLS["deepseek-r1"] = CALLS["deepseek-v3"]


def conversations(family: Family) -> dict[str, tuple[list[Message], Any]]:
    """Name -> (messages, tools) that the template supports."""
    made: dict[str, tuple[list[Message], Any]] = {"turns": (QUESTIONS, None), "thoughts": (THOUGHTS, None)}
    if family.system:
        made["system"] = ([turn("system", "Be brief."), *QUESTIONS], None)
    if family.published == "gptoss":
        made["thinking"] = ([{**message, "thinking": "Hm."} for message in QUESTIONS], None)
    if family.tools:
        made["tools"] = (tool_conversation(family), TOOLS)
        made["system and tools"] = ([turn("system", "Be brief."), *tool_conversation(family)], TOOLS)
    return made


CASES = [(name, conversation) for name, family in FAMILIES.items() for conversation in conversations(family)]


@pytest.mark.parametrize(("name", "conversation"), CASES)
def test_trained_tokens_are_the_assistant_s_text_and_end_token(name, conversation, tokenizer_of):
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family)
    messages, tools = conversations(family)[conversation]
    want = answers(name, messages)
    tokens = tokenize_chat(tokenizer, messages, tools)
    assert tokens.input_ids == tokenizer.apply_chat_template(messages, tools=tools)["input_ids"]
    assert trained(tokenizer, tokens) == "".join(want)
    last = tokenize_chat(tokenizer, messages, tools, loss_on="last_assistant")
    assert last.input_ids == tokens.input_ids
    assert trained(tokenizer, last) == want[-1]
    assert all(tokenize_chat(tokenizer, messages, tools, loss_on="all").loss_mask)
    split = {"prompt": messages[:-1], "completion": messages[-1:], "tools": tools}
    assert trained(tokenizer, encode_sample(tokenizer, split)) == want[-1]


def test_thoughts_of_gpt_oss_are_trained_where_the_template_shows_them(tokenizer_of):
    """Also rendered by the published template (`test_templates_render_what_the_published_ones_do`)."""
    tokenizer = tokenizer_of(FAMILIES["gpt-oss"])
    messages = [{**message, "thinking": "Hm."} for message in tool_conversation(FAMILIES["gpt-oss"])]
    expected = answers("gpt-oss", messages)
    assert trained(tokenizer, tokenize_chat(tokenizer, messages[:2], TOOLS)) == THOUGHT + expected[0]
    assert trained(tokenizer, tokenize_chat(tokenizer, messages, TOOLS)) == "".join(expected)


def test_arguments_of_tool_calls_may_be_a_mapping_for_every_template(tokenizer_of):
    """Readers of data convert OpenAI's JSON text to a mapping."""
    family = FAMILIES["deepseek-r1"]
    as_text = tool_conversation(family)
    as_mapping = tool_conversation(FAMILIES["qwen3"])
    assert as_text != as_mapping
    tokenizer = tokenizer_of(family)
    assert tokenize_chat(tokenizer, as_mapping, TOOLS) == tokenize_chat(tokenizer, as_text, TOOLS)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.published])
def test_templates_render_what_the_published_ones_do(name, tokenizer_of):
    """trl contains the published texts. It has DeepSeek-V3's with R1's generation prompt."""
    family = FAMILIES[name]
    folder = resources.files("trl") / "chat_templates"
    published = tokenizer_of(family, (folder / f"{family.published}.jinja").read_text("utf-8"))
    ours = tokenizer_of(family)
    for messages, tools in conversations(family).values():
        for count in range(1, len(messages) + 1):
            shown = messages[:count]
            if [message["role"] for message in shown] == ["system"]:
                continue
            for prompt in (True, False):
                expected = published.apply_chat_template(
                    shown, tools=tools, tokenize=False, add_generation_prompt=prompt
                )
                assert render(ours, shown, tools, add_generation_prompt=prompt) == expected
