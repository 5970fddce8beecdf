"""What a chat template drops, with templates that render everything, nothing of tools, and no system text."""

from __future__ import annotations

import pytest

from megatron_wrap.data.inspect.mistakes import dropped_parts

pytestmark = pytest.mark.transformers

CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
QUESTION, ANSWER = {"role": "user", "content": "How is it?"}, {"role": "assistant", "content": " Fine. "}
TEXT = "{% for m in messages %}{{ m['role'] }}: {{ (m['content'] or '') | trim }}\n{% endfor %}"
WITH_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + TEXT.replace(
    "| trim }}", "| trim }}{% for c in m.get('tool_calls') or [] %}{{ c.function.name }}{% endfor %}"
)
AS_JSON = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | tojson }}\n{% endfor %}"
NO_SYSTEM = TEXT.replace("{{ m['role']", "{% if m['role'] == 'system' %}{% continue %}{% endif %}{{ m['role']")


@pytest.mark.parametrize(
    ("template", "sample", "expected"),
    [
        (TEXT, {"messages": [QUESTION, ANSWER]}, set()),
        (TEXT, {"messages": [QUESTION, {"role": "assistant", "tool_calls": [CALL]}, ANSWER]}, {"tool_calls"}),
        (TEXT, {"messages": [QUESTION, ANSWER], "tools": [TOOL]}, {"tools"}),
        (WITH_TOOLS, {"messages": [QUESTION, {"role": "assistant", "tool_calls": [CALL]}], "tools": [TOOL]}, set()),
        (NO_SYSTEM, {"messages": [{"role": "system", "content": "Be brief."}, QUESTION, ANSWER]}, {"content"}),
        (TEXT, {"messages": [QUESTION, {"role": "assistant", "content": "<think>so</think>Fine."}]}, set()),
        (NO_SYSTEM, {"prompt": [{"role": "system", "content": "B."}, QUESTION], "chosen": [ANSWER]}, {"content"}),
        (AS_JSON, {"messages": [QUESTION, {"role": "tool", "content": '{"sky": "blue"}'}, ANSWER]}, set()),
        (TEXT, {"prompt": "How", "completion": "Fine"}, set()),
        ("{{ raise_exception('no') }}", {"messages": [QUESTION]}, set()),
    ],
)
def test_parts_that_no_text_shows(template, sample, expected, make_tokenizer):
    assert dropped_parts(make_tokenizer(template), sample) == expected
