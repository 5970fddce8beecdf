"""Small byte-level BPE tokenizers with tokens that cross words, lines and the boundaries of chat turns."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # makes chat_templates importable in every import mode

import chat_templates

CORPUS = [
    "user: Hello there.\nassistant: Hello, how are you?\nuser: Fine. And you?\nassistant: Very well.\n",
    "[INST] Hello there. [/INST] Hello, how are you? Fine.\n\nVery well.\n\n",
] * 20


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    """make_tokenizer(chat_template, trim_offsets=False) -> a transformers tokenizer with 400 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    # No splitting into words, so that ": Hello" and ".\n" can become one token.
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", *chat_templates.SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, max_token_length=9, show_progress=False
    )
    model.train_from_iterator(CORPUS, trainer)
    saved = model.to_str()

    def make(chat_template: str | None, trim_offsets: bool = False) -> Any:
        copy = Tokenizer.from_str(saved)
        copy.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
        return _wrapped(copy, chat_template)

    return make


@pytest.fixture(scope="session")
def make_sentencepiece_tokenizer() -> Callable[..., Any]:
    """make_sentencepiece_tokenizer(chat_template): as in Llama-2, a space is a character and rare ones are unknown."""
    from tokenizers import Tokenizer, models, normalizers, trainers

    model = Tokenizer(models.BPE(unk_token="<unk>"))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *chat_templates.SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=special, max_token_length=9, show_progress=False)
    model.train_from_iterator(CORPUS, trainer)
    saved = model.to_str()
    return lambda chat_template: _wrapped(Tokenizer.from_str(saved), chat_template, unk_token="<unk>")


def _wrapped(model: Any, chat_template: str | None, **settings: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=chat_templates.SPECIAL_TOKENS,
        clean_up_tokenization_spaces=False,
        **settings,
    )
    tokenizer.chat_template = chat_template
    return tokenizer
