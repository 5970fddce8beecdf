"""One row that cannot be tokenized or rendered is a bad row: with file and row, left out where bad rows are."""

import os
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import chat_templates
import pytest

from megatron_wrap.config.schema.data import SourceConfig
from megatron_wrap.data.chat import templates, text_tokens
from megatron_wrap.data.chat.assistant_spans import render
from megatron_wrap.data.chat.encode import encode_sample, prompt_token_ids
from megatron_wrap.data.order.sample_reader import Preparation, SampleReader
from megatron_wrap.data.order.sample_sets import training_stream
from megatron_wrap.errors import ConfigError, DataError
from megatron_wrap.platform.base.machine import process_state
from megatron_wrap.utils.pools.processes import ProcessPool

pytestmark = pytest.mark.transformers

_TWICE = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"
_DOUBLED = "{% set s = namespace(s='ab') %}{% for i in range(60) %}{% set s.s = s.s OP s.s %}{% endfor %}{{ s.s }}"
ENDLESS = {
    "a loop": _TWICE.replace("BODY", ""),
    "a loop in a block": "{% set s %}" + _TWICE.replace("BODY", "") + "{% endset %}",
    "a loop in a generation block": "{% generation %}" + _TWICE.replace("BODY", "") + "{% endgeneration %}",
    "a text": _TWICE.replace("BODY", "{{ messages[0].content }}"),
    "a text around a generation block": "{% generation %}{% endgeneration %}" + _TWICE.replace("BODY", "some text"),
    "a product": "{{ 'a' * 10000000000 }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "a product of a list": "{% set text = 'a' * 1000000 %}{{ [text] * 1000000 }}",
    "ljust": "{{ 'a'.ljust(10 ** 11) }}",
    "zfill": "{{ '1'.zfill(10 ** 11) }}",
    "expandtabs": "{% set text = '\t' * 100000 %}{{ text.expandtabs(1000000) }}",
    "replace": "{% set text = 'a' * 1000000 %}{{ text.replace('a', text) }}",
    "translate": "{% set text = 'a' * 1000000 %}{{ text.translate({97: text}) }}",
    "join": "{% set text = 'a' * 1000000 %}{{ text.join(text | list) }}",
    "format": "{{ '{:>9999999999}'.format(1) }}",
    "format with a width": "{{ '{:>{}}'.format(1, 10 ** 10) }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "percent with a width": "{{ '%*d' % (10 ** 10, 1) }}",
    "filter center": "{{ 'a' | center(10 ** 11) }}",
    "filter indent": "{{ 'a' | indent(width=10 ** 11, first=true) }}",
    "filter batch": "{{ [1] | batch(10 ** 11, 'x') | list }}",
    "filter tojson": "{{ messages | tojson(indent=10 ** 11) }}",
    "filter format": "{{ '%9999999999d' | format(1) }}",
    "filter replace": "{% set text = 'a' * 1000000 %}{{ text | replace('a', text) }}",
    "filter join": "{% set text = 'a' * 1000000 %}{{ text | list | join(text) }}",
    "doubled by +": _DOUBLED.replace("OP", "+"),
    "doubled by ~": _DOUBLED.replace("OP", "~"),
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}
CHAT = {"messages": [{"role": "user", "content": "Hello there."}, {"role": "assistant", "content": "Fine."}]}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_RENDER_SECONDS", 0.2)
    monkeypatch.setattr(templates, "MAX_RENDER_BYTES", 1 << 26)
    monkeypatch.setattr(text_tokens, "MAX_CHARACTERS", 1 << 20)


@pytest.fixture(autouse=True)
def _none_stopped_before() -> None:
    templates.bounded(lambda: None)


def test_a_template_that_never_ends_is_blamed_after_a_few_rows(
    small: None, make_tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "MAX_RENDER_SECONDS", 0.05)
    endless, good = make_tokenizer(ENDLESS["a loop"]), make_tokenizer(chat_templates.CHATML)
    for tokenizer in (*[endless] * 4, good, *[endless] * 4):
        with suppress(DataError):
            encode_sample(tokenizer, CHAT)
    with pytest.raises(ConfigError, match="for each of 5 conversations in a row"):
        encode_sample(endless, CHAT)


@pytest.mark.parametrize("case", ENDLESS)
def test_a_template_that_does_not_end_is_a_bad_row(case: str, small: None, make_tokenizer) -> None:
    with pytest.raises(DataError, match="the chat template"):
        encode_sample(make_tokenizer(ENDLESS[case]), CHAT)
    expected = make_tokenizer(chat_templates.CHATML)
    assert encode_sample(expected, CHAT).input_ids == expected.apply_chat_template(CHAT["messages"])["input_ids"]


def test_calls_with_ordinary_arguments_are_those_of_jinja2(small: None, make_tokenizer) -> None:
    template = (
        "{{ 'a'.ljust(9) }}{{ '7'.zfill(4) }}{{ 'a\tb'.expandtabs(4) }}{{ 'abc'.replace('b', 'xy') }}"
        "{{ ', '.join(['a', 'b']) }}{{ '{:>6}'.format(1) }}"
        "{{ '%5d %s %d' % (3, 'x', 1700000000) }}{{ '1700000000 {}'.format(1700000000) }}"
        "{{ 'a' | center(9) }}{{ 'a\nb' | indent(4) }}{{ [1, 2, 3] | batch(2, 0) | list }}"
        "{{ messages | tojson(indent=2) }}{{ 'abc' | replace('b', 'xy') }}{{ ['a', 'b'] | join(', ') }}{{ 7 % 4 }}"
        "{{ messages | map(attribute='role') | join('-') }}{{ 1700000000 | string }}{{ ([1] * 3) | length }}"
    )
    tokenizer = make_tokenizer(template)
    expected = tokenizer.apply_chat_template(CHAT["messages"], tokenize=False)
    assert render(tokenizer, CHAT["messages"]) == expected


def test_the_limit_of_time_holds_in_every_thread(small: None, make_tokenizer) -> None:
    tokenizer, errors = make_tokenizer(ENDLESS["a loop"]), []

    def encode() -> None:
        try:
            encode_sample(tokenizer, CHAT)
        except DataError as error:
            errors.append(error)

    threads = [threading.Thread(target=encode) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2


def test_the_process_that_renders_ends_with_its_parent(make_tokenizer) -> None:
    def render(_: None) -> int:
        encode_sample(make_tokenizer(chat_templates.CHATML), CHAT)
        process, _connection = templates._renderer(os.getpid())._child
        return process

    with closing(ProcessPool(render, 1)) as pool:
        [(_, process)] = pool.map([None])
        os.kill(process, 0)
    limit = time.monotonic() + 10
    while process_state(process) not in ("", "Z") and time.monotonic() < limit:
        time.sleep(0.05)
    assert process_state(process) in ("", "Z")


BAD_TEXTS = {"surrogate": (r"a\ud800b", "lone surrogate '.ud800'"), "long": ("x" * 5000, "5,000 characters")}


@pytest.mark.parametrize("kind", BAD_TEXTS)
@pytest.mark.parametrize("form", ['{{"text": "{}"}}', '{{"messages": [{{"role": "assistant", "content": "{}"}}]}}'])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_text_that_no_tokenizer_encodes_is_a_bad_row(
    kind: str, form: str, streaming: bool, make_tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_tokens, "MAX_CHARACTERS", 1000)
    text, message = BAD_TEXTS[kind]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(form.format(line) + "\n" for line in ("Hello.", text, "naïve 🦙", r"\ud83e\udd99")))
    stream = training_stream([SourceConfig(path=str(path), streaming=streaming)], 1, shuffle=False)
    tokenizer = make_tokenizer(chat_templates.CHATML)

    def reader(skip_bad: bool) -> SampleReader:
        return SampleReader(stream, Preparation(lambda row: encode_sample(tokenizer, row), len), skip_bad)

    problems = [reader(skip_bad=True).problem(position) for position in range(4)]
    assert [problem is None for problem in problems] == [True, False, True, True]
    assert problems[1].startswith(f"{path}:2: ")
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*({message}|characters)"):
        reader(skip_bad=False).problem(1)


class _Panic(BaseException):
    """As of the tokenizers library, which is no Exception."""


_Panic.__name__ = "PanicException"


@pytest.mark.parametrize("error", [TypeError("no such type"), _Panic("no such type")])
@pytest.mark.parametrize("is_fast", [False, True])
def test_a_tokenizer_that_fails_is_a_bad_row(error: BaseException, is_fast: bool) -> None:
    def fail(text: str, **options: object) -> None:
        raise error

    fail.is_fast, fail.bos_token_id = is_fast, None  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"fails with a text of 5 characters \(no such type\)"):
        encode_sample(fail, {"text": "Hello"})


def test_an_interrupt_of_a_tokenizer_is_no_bad_row() -> None:
    def interrupt(text: str, **options: object) -> None:
        raise KeyboardInterrupt

    interrupt.is_fast = True  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        encode_sample(interrupt, {"text": "Hello"})


@pytest.mark.parametrize("prompt", ["a\ud800", [{"role": "user", "content": "a\ud800"}]])
def test_a_prompt_with_a_lone_surrogate_is_refused(prompt, make_tokenizer) -> None:
    with pytest.raises(DataError, match="lone surrogate"):
        prompt_token_ids(make_tokenizer(chat_templates.CHATML), prompt, 400)
