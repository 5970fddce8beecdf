"""Prompts to token ids: those that transformers' tokenizers give."""

import pytest

from megatron_wrap.data.prompts import prompt_token_ids
from megatron_wrap.errors import DataError

pytestmark = pytest.mark.transformers

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_texts_messages_and_ids_are_what_transformers_makes_of_them(make_tokenizer):
    tokenizer = make_tokenizer(TEMPLATE)
    text, chat = "Once upon a time", [{"role": "user", "content": "hello\nthere"}]
    assert prompt_token_ids(tokenizer, text, 400) == tokenizer(text)["input_ids"]
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert prompt_token_ids(tokenizer, chat, 400) == list(expected)
    assert prompt_token_ids(None, (5, 0, 399), 400) == [5, 0, 399]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "has no tokens"),
        ([], "a prompt is a text, a list of messages or a list of token ids"),
        (7, "a prompt is a text"),
        ([1, 2.0], "a prompt is a text"),
        ([True], "a prompt is a text"),
        (["two", "texts"], "a prompt is a text"),
        ([-1], "has the token id -1; the vocabulary has 400 entries"),
        ([400], "has the token id 400"),
        ([{"content": "nobody"}], "message 0 must be"),
    ],
)
def test_others_are_refused(make_tokenizer, prompt, said):
    with pytest.raises(DataError, match=said):
        prompt_token_ids(make_tokenizer(TEMPLATE), prompt, 400)


def test_messages_need_a_chat_template_and_texts_a_tokenizer(make_tokenizer):
    with pytest.raises(DataError, match="no chat template"):
        prompt_token_ids(make_tokenizer(None), [{"role": "user", "content": "hello"}], 400)
    with pytest.raises(DataError, match=r"needs a tokenizer; set megatron_wrap\.data\.tokenizer"):
        prompt_token_ids(None, "hello", 400)
