"""The example's tokenizer: byte-level BPE with a chat template, written as a Hugging Face tokenizer folder."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

VOCABULARY_SIZE = 4096
"""Entries including the special tokens; divisible by every usual tensor-parallel size."""

PAD, BOS, END = "<|pad|>", "<|begin|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
SPECIAL_TOKENS = (PAD, BOS, END, *ROLES)
"""They get the ids 0, 1, 2, ... in this order; END closes each turn and is the tokenizer's eos token."""

# The generation markers enclose the part of an assistant's turn that the model writes: the text and the END after it.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}
        {{- raise_exception("unknown role " ~ message['role'] ~ "; known: system, user, assistant, tool") -}}
    {%- endif -%}
    {{- '<|' ~ message['role'] ~ '|>\\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{- message['content'] ~ eos_token -}}{%- endgeneration -%}
    {%- else -%}
        {{- message['content'] ~ eos_token -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>\\n' -}}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], folder: Path, vocabulary_size: int = VOCABULARY_SIZE) -> int:
    """Trains on `texts` and writes `folder` for `transformers.AutoTokenizer.from_pretrained`; returns the entries made.

    The same texts give the same bytes, whatever the number of threads.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # all 256 bytes: no text is unknown
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),  # offsets that cover the text without gaps
            processors.TemplateProcessing(
                single=f"{BOS} $A",
                pair=f"{BOS} $A {BOS} $B",
                special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))],
            ),
        ]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "extra_special_tokens": list(ROLES),
        "clean_up_tokenization_spaces": False,  # decoding gives the text back as it was
        "model_max_length": 1_000_000,  # the model's context is the run's business
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return tokenizer.get_vocab_size(with_added_tokens=True)


def encode(texts: Sequence[str], folder: Path) -> list[list[int]]:
    """The ids of each text and of END, by the tokenizer that `train_tokenizer` wrote."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [[*text.ids, SPECIAL_TOKENS.index(END)] for text in encoded]
