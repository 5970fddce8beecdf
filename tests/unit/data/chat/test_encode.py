"""Token ids and chat masks against transformers, whose assistant masks need templates with generation blocks."""

import chat_templates
import pytest

from megatron_wrap.data.chat.encode import ChatTokens, encode_sample, prompt_token_ids, tokenize_chat, truncate
from megatron_wrap.errors import DataError

pytestmark = pytest.mark.transformers


def turn(role, content):
    return {"role": role, "content": content}


CONVERSATIONS = {
    "one turn": [turn("user", "Hello there."), turn("assistant", "Hello, how are you?")],
    "many turns": [
        turn("user", "Hello there."),
        turn("assistant", "Fine.\n\nVery well.\n"),
        turn("user", "And you?\n\n"),
        turn("assistant", "naïve 🦙🦙 \n x"),
        turn("user", "  Fine. "),
        turn("assistant", "Hello"),
    ],
    "system": [turn("system", "Be well."), turn("user", "Hello there."), turn("assistant", "Very well.")],
    "ends with the user": [turn("user", "Hello"), turn("assistant", "Fine."), turn("user", "And you?")],
    "contains a role name": [turn("user", "assistant: Hello"), turn("assistant", "user: Hello\nassistant: Fine.")],
    "only a space": [turn("user", "Hello"), turn("assistant", " "), turn("user", "?"), turn("assistant", "Fine.")],
}


def learned(tokenizer, tokens):
    """The text of the tokens with a loss."""
    return tokenizer.decode([i for i, m in zip(tokens.input_ids, tokens.loss_mask, strict=True) if m])


def expected(tokenizer, messages):
    """transformers' ids and assistant mask for a tokenizer whose template has generation blocks."""
    result = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    return ChatTokens(result["input_ids"], result["assistant_masks"])


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", chat_templates.ALL)
def test_mask_equals_transformers_with_and_without_generation_blocks(make_tokenizer, template, conversation):
    marked = make_tokenizer(chat_templates.ALL[template])
    plain = make_tokenizer(chat_templates.unmarked(chat_templates.ALL[template]))
    messages = CONVERSATIONS[conversation]
    want = expected(marked, messages)
    assert any(want.loss_mask)
    assert not all(want.loss_mask)
    assert tokenize_chat(marked, messages) == want
    assert tokenize_chat(plain, messages) == want
    assert plain.apply_chat_template(messages)["input_ids"] == want.input_ids


def test_mask_covers_only_the_answer_and_its_end_token(make_tokenizer):
    tokenizer = make_tokenizer(chat_templates.unmarked(chat_templates.CHATML))
    tokens = tokenize_chat(tokenizer, CONVERSATIONS["many turns"])
    assert learned(tokenizer, tokens) == "Fine.\n\nVery well.\n<|im_end|>naïve 🦙🦙 \n x<|im_end|>Hello<|im_end|>"


def test_token_across_the_boundary_belongs_to_the_assistant(make_tokenizer):
    # The prompt ends inside the token "Hello, ", so its tokens are not the first tokens of the conversation.
    tokenizer = make_tokenizer(
        "{% for m in messages %}{{ m.role + ': ' + ('He' if m.role == 'assistant' else '') + m.content + '\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: He' }}{% endif %}"
    )
    messages = [turn("user", "Hello there."), turn("assistant", "llo, how are you?")]
    tokens = tokenize_chat(tokenizer, messages)
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True)["input_ids"]
    assert tokens.input_ids[: len(prompt)] != prompt
    first = tokens.loss_mask.index(1)
    assert tokenizer.decode(tokens.input_ids[first:]) == "Hello, how are you?\n"
    assert all(tokens.loss_mask[first:])


@pytest.mark.parametrize("template", chat_templates.ALL)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_offsets_without_white_space_give_the_same_mask(make_tokenizer, template, conversation):
    # GPT-2's tokenizer and many later ones exclude white space from the offsets; the tokens are equal.
    messages = CONVERSATIONS[conversation]
    whole = tokenize_chat(make_tokenizer(chat_templates.ALL[template]), messages)
    assert tokenize_chat(make_tokenizer(chat_templates.ALL[template], trim_offsets=True), messages) == whole
    plain = chat_templates.unmarked(chat_templates.ALL[template])
    assert tokenize_chat(make_tokenizer(plain, trim_offsets=True), messages) == whole


@pytest.mark.parametrize("template", chat_templates.ALL)
@pytest.mark.parametrize("conversation", [*CONVERSATIONS, "ends with an unknown character"])
def test_sentencepiece_tokenizers_give_the_same_mask(make_sentencepiece_tokenizer, template, conversation):
    unknown = [turn("user", "Hello"), turn("assistant", "Fine. 🦙")]
    messages = CONVERSATIONS.get(conversation, unknown)
    marked = make_sentencepiece_tokenizer(chat_templates.ALL[template])
    plain = make_sentencepiece_tokenizer(chat_templates.unmarked(chat_templates.ALL[template]))
    want = expected(marked, messages)
    assert tokenize_chat(marked, messages) == want
    assert tokenize_chat(plain, messages) == want


class WithoutOffsets:
    """A BPE tokenizer without offsets, like tokenizers written in Python."""

    is_fast = False

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, text, add_special_tokens):
        return {"input_ids": self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]}


def test_bpe_without_offsets_is_correct_or_refused(make_tokenizer):
    correct = refused = 0
    for template in chat_templates.ALL.values():
        marked, plain = make_tokenizer(template), make_tokenizer(chat_templates.unmarked(template))
        for messages in CONVERSATIONS.values():
            want = expected(marked, messages)
            for tokenizer in (marked, plain):
                try:
                    got = tokenize_chat(WithoutOffsets(tokenizer), messages)
                except DataError:
                    refused += 1
                    continue
                correct += 1
                assert got == want
    assert correct > 0
    assert refused > 0
    # "\nVery " is one token: it contains the end of the prompt and the first word of the answer.
    tokenizer = make_tokenizer(chat_templates.CHATML)
    with pytest.raises(DataError, match=r"'.*assistant\\n'.*use its fast version"):
        tokenize_chat(WithoutOffsets(tokenizer), CONVERSATIONS["system"])


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_python_tokenizer_gives_the_same_mask(conversation):
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    assert not tokenizer.is_fast
    tokenizer.chat_template = chat_templates.unmarked(chat_templates.CHATML)
    messages = CONVERSATIONS[conversation]
    tokens = tokenize_chat(tokenizer, messages)
    assert tokens.input_ids == tokenizer.apply_chat_template(messages)["input_ids"]
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    assert learned(tokenizer, tokens) == "".join(f"{answer}<|im_end|>" for answer in answers)


def test_tools_and_tool_messages(make_tokenizer):
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + chat_templates.unmarked(chat_templates.CHATML)
    tokenizer = make_tokenizer(template)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    messages = [
        turn("user", "Hello"),
        {"role": "assistant", "content": "add", "name": None},
        turn("tool", "3"),
        turn("assistant", "Fine."),
    ]
    tokens = encode_sample(tokenizer, {"messages": messages, "tools": tools})
    assert tokens.input_ids == tokenizer.apply_chat_template(messages, tools=tools)["input_ids"]
    assert learned(tokenizer, tokens) == "add<|im_end|>Fine.<|im_end|>"


def test_assistant_can_start_and_have_consecutive_turns(make_tokenizer):
    messages = [turn("assistant", "Hello"), turn("assistant", "Fine."), turn("user", "And you?")]
    marked, plain = (make_tokenizer(t) for t in (chat_templates.CHATML, chat_templates.unmarked(chat_templates.CHATML)))
    assert tokenize_chat(plain, messages) == expected(marked, messages)


def test_conversation_without_assistant_has_no_loss(make_tokenizer):
    for template in (chat_templates.CHATML, chat_templates.unmarked(chat_templates.CHATML)):
        assert not any(tokenize_chat(make_tokenizer(template), [turn("user", "Hello")]).loss_mask)


def test_template_that_drops_earlier_thoughts_has_the_mask_of_what_it_shows(make_tokenizer):
    tokenizer = make_tokenizer(chat_templates.FORGETTING)
    messages = [turn("user", "Hi"), turn("assistant", "hm</think>Hello"), turn("user", "?"), turn("assistant", "Fine.")]
    tokens = tokenize_chat(tokenizer, messages)
    assert tokens.input_ids == tokenizer.apply_chat_template(messages)["input_ids"]
    assert learned(tokenizer, tokens) == "Hello<|im_end|>Fine.<|im_end|>"


def test_token_that_closes_the_conversation_has_a_loss_only_at_its_end(make_tokenizer):
    tokenizer = make_tokenizer(chat_templates.unmarked(chat_templates.CHATML) + "{{ eos_token }}")
    tokens = tokenize_chat(tokenizer, CONVERSATIONS["many turns"][:4])
    assert learned(tokenizer, tokens) == "Fine.\n\nVery well.\n<|im_end|>naïve 🦙🦙 \n x<|im_end|>\n</s>"


@pytest.mark.parametrize("template", [chat_templates.CHATML, chat_templates.unmarked(chat_templates.CHATML)])
def test_loss_on_the_last_assistant_s_turn_or_on_all_tokens(make_tokenizer, template):
    tokenizer = make_tokenizer(template)
    for name, end in (("many turns", "Hello<|im_end|>"), ("ends with the user", "Fine.<|im_end|>")):
        sample = {"messages": CONVERSATIONS[name]}
        last = encode_sample(tokenizer, sample, loss_on="last_assistant")
        assert learned(tokenizer, last) == end
        assert encode_sample(tokenizer, sample, loss_on="all") == ChatTokens(last.input_ids, [1] * len(last))
    assert not any(encode_sample(tokenizer, {"messages": [turn("user", "Hi")]}, loss_on="last_assistant").loss_mask)


@pytest.mark.parametrize("template", [chat_templates.CHATML, chat_templates.unmarked(chat_templates.CHATML)])
def test_messages_of_weight_0_have_no_loss(make_tokenizer, template):
    """OpenAI's format for fine-tuning: weight 0 or 1 on an assistant's message."""
    tokenizer = make_tokenizer(template)

    def with_weights(*weights, loss_on="assistant"):
        remaining = iter(weights)
        messages = [
            {**message, "weight": next(remaining)} if message["role"] == "assistant" else message
            for message in CONVERSATIONS["many turns"]
        ]
        tokens = encode_sample(tokenizer, {"messages": messages}, loss_on)
        assert tokens.input_ids == tokenizer.apply_chat_template(CONVERSATIONS["many turns"])["input_ids"]
        return learned(tokenizer, tokens)

    first, second, third = "Fine.\n\nVery well.\n<|im_end|>", "naïve 🦙🦙 \n x<|im_end|>", "Hello<|im_end|>"
    assert with_weights(1, None, 1) == first + second + third
    assert with_weights(0, 1, 1) == second + third
    assert with_weights(1, 0, 1) == first + third
    assert with_weights(1, 1, 0) == first + second
    assert with_weights(0, 0, 0) == with_weights(1, 1, 0, loss_on="last_assistant") == ""
    with pytest.raises(DataError, match=r'message 3 has "weight" 0\.5'):
        with_weights(1, 0.5, 1)


def test_weights_are_finite_numbers_of_at_least_0():
    sample = {"input_ids": [5, 6], "loss_mask": [0, 1]}
    assert encode_sample(None, sample).weight == encode_sample(None, {**sample, "weight": None}).weight == 1.0
    tokens = encode_sample(None, {**sample, "weight": 0.5})
    assert tokens == ChatTokens([5, 6], [0, 1], weight=0.5)
    assert truncate(tokens, 1, "right")[0].weight == 0.5
    for wrong in (-1, float("nan"), float("inf"), "2", True):
        with pytest.raises(DataError, match=r'"weight" is .*at least 0'):
            encode_sample(None, {**sample, "weight": wrong})


PLAIN = chat_templates.unmarked(chat_templates.CHATML)
NO_BOUNDARIES = r"message 1 .*generation prompt.*\{% generation %\}"


@pytest.mark.parametrize(
    ("template", "conversation", "message"),
    [
        # turns numbered from the end
        (PLAIN.replace("message.role + '", "message.role ~ loop.revindex + '"), "many turns", NO_BOUNDARIES),
        (PLAIN.replace("assistant\\n' }}{% endif", "bot\\n' }}{% endif"), "one turn", NO_BOUNDARIES),
        (
            "{% if false %}{% generation %}{% endgeneration %}{% endif %}" + PLAIN,
            "one turn",
            r"generation blocks .*\{% generation %\}",
        ),
        (None, "one turn", r"chat_template\.jinja"),
    ],
)
def test_templates_without_boundaries_of_turns_are_refused_with_a_hint(make_tokenizer, template, conversation, message):
    with pytest.raises(DataError, match=message):
        tokenize_chat(make_tokenizer(template), CONVERSATIONS[conversation])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hello", "list of messages, not a str"),
        ([], "empty"),
        ([{"content": "Hello"}], 'message 0 of "messages" must be'),
        ([turn("user", "Hello"), "Fine."], 'message 1 of "messages" must be'),
        ([turn("user", "Hello"), turn("user", "Hello")], r"\(user, user\).*must alternate"),
    ],
)
def test_malformed_conversations_are_refused(make_tokenizer, messages, message):
    with pytest.raises(DataError, match=message):
        tokenize_chat(make_tokenizer(chat_templates.LLAMA2), messages)


def test_plain_text_and_prompt_with_completion(make_tokenizer):
    tokenizer = make_tokenizer(None)
    end = tokenizer.eos_token_id
    plain = tokenizer("Hello there. Fine.")["input_ids"]
    assert encode_sample(tokenizer, {"text": "Hello there. Fine."}) == ChatTokens([*plain, end], [1] * len(plain) + [1])
    assert encode_sample(tokenizer, {"text": "Hello</s>"}).input_ids.count(end) == 1

    tokens = encode_sample(tokenizer, {"prompt": "user: Hello there.\n", "completion": "assistant: Fine."})
    assert tokens.input_ids == [*tokenizer("user: Hello there.\nassistant: Fine.")["input_ids"], end]
    first = tokens.loss_mask.index(1)
    assert all(tokens.loss_mask[first:])
    # The first token with loss contains the completion's first character, and here also the end of the prompt.
    assert tokenizer.decode(tokens.input_ids[first:]) == "e.\nassistant: Fine.</s>"
    assert "\na" in tokenizer.decode(tokens.input_ids[first])


def test_bos_token_is_added_if_the_tokenizer_adds_it(make_tokenizer):
    from tokenizers import processors

    tokenizer = make_tokenizer(None)
    bos, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", bos), ("</s>", end)]
    )
    tokens = encode_sample(tokenizer, {"text": "Hello"})
    assert tokens.input_ids == tokenizer("Hello")["input_ids"]
    assert tokens.loss_mask == [0] + [1] * (len(tokens) - 1)


def test_prompt_and_completion_as_messages(make_tokenizer):
    messages = CONVERSATIONS["many turns"]
    for template in (chat_templates.CHATML, chat_templates.unmarked(chat_templates.CHATML)):
        tokenizer = make_tokenizer(template)
        tokens = encode_sample(tokenizer, {"prompt": messages[:5], "completion": messages[5:]})
        assert tokens.input_ids == tokenizer.apply_chat_template(messages)["input_ids"]
        assert learned(tokenizer, tokens) == "Hello<|im_end|>"


def test_tokenized_samples_are_unchanged():
    assert encode_sample(None, {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}) == ChatTokens([5, 6, 7], [0, 1, 1])
    assert encode_sample(None, {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}) == ChatTokens([5, 6, 7], [0, 1, 1])


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"input_ids": [5, 6], "loss_mask": [1]}, '"input_ids" has 2 .* "loss_mask" 1'),
        ({"input_ids": [5, 6], "loss_mask": [1, 2]}, "only 0 and 1"),
        ({"input_ids": [5, -6], "loss_mask": [1, 1]}, "contains -6"),
        ({"input_ids": [5, "6"], "loss_mask": [1, 1]}, '"input_ids" .*list of integers'),
        ({"input_ids": [5, 6, 7], "labels": [6, 7, -100]}, "6 at position 0 .* 5"),
        ({"input_ids": [5, 6]}, 'keys "input_ids"; .*"messages"'),
        ({"conversations": [], "id": 3}, 'keys "conversations", "id"; .*"prompt" and "completion"'),
        ({}, "keys none"),
        ({"text": 3}, "string, not int"),
        ({"prompt": "a", "completion": [1]}, "two lists of messages, not str and list"),
    ],
)
def test_unsupported_samples_are_refused(sample, message):
    with pytest.raises(DataError, match=message):
        encode_sample(None, sample)


def test_truncation_rules_are_applied():
    tokens = ChatTokens([1, 2, 3, 4], [0, 0, 1, 1])
    assert truncate(tokens, 4, "refuse") == (tokens, False)
    assert truncate(tokens, 3, "right") == (ChatTokens([1, 2, 3], [0, 0, 1]), True)
    assert truncate(tokens, 3, "left") == (ChatTokens([2, 3, 4], [0, 1, 1]), True)
    with pytest.raises(DataError, match="4 tokens, 1 more than the 3"):
        truncate(tokens, 3, "refuse")


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
