"""Token ids of prompts against transformers' tokenizers."""

import pytest

from megatron_wrap.data.chat.prompts import prompt_token_ids
from megatron_wrap.errors import DataError

pytestmark = pytest.mark.transformers

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_token_ids_equal_transformers(make_tokenizer):
    tokenizer = make_tokenizer(TEMPLATE)
    text, chat = "Once upon a time", [{"role": "user", "content": "hello\nthere"}]
    assert prompt_token_ids(tokenizer, text, 400) == tokenizer(text)["input_ids"]
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert prompt_token_ids(tokenizer, chat, 400) == list(expected)
    assert prompt_token_ids(None, (5, 0, 399), 400) == [5, 0, 399]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "has no tokens"),
        ([], "a prompt is a text, a list of messages or a list of token ids"),
        (7, "a prompt is a text"),
        ([1, 2.0], "a prompt is a text"),
        ([True], "a prompt is a text"),
        (["two", "texts"], "a prompt is a text"),
        ([-1], "has the token id -1, but the vocabulary has the ids 0 to 399"),
        ([400], "has the token id 400"),
        ([{"content": "nobody"}], 'message 0 of "messages" must be'),
    ],
)
def test_invalid_prompts_are_refused(make_tokenizer, prompt, message):
    with pytest.raises(DataError, match=message):
        prompt_token_ids(make_tokenizer(TEMPLATE), prompt, 400)


def test_messages_require_a_chat_template_and_text_a_tokenizer(make_tokenizer):
    with pytest.raises(DataError, match=r"chat_template\.jinja"):
        prompt_token_ids(make_tokenizer(None), [{"role": "user", "content": "hello"}], 400)
    with pytest.raises(DataError, match=r"tokenizer; set megatron_wrap\.data\.tokenizer"):
        prompt_token_ids(None, "hello", 400)
