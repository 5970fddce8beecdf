"""Loading tokenizers; their pad and eos ids."""

import json
import os
import shutil
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from megatron_wrap.data.chat.tokenizer import _load, end_token_id, fingerprint, load_tokenizer, pad_token_id
from megatron_wrap.errors import DataError

pytestmark = pytest.mark.transformers


@pytest.fixture
def folder(make_tokenizer, tmp_path):
    make_tokenizer("{{ messages }}").save_pretrained(tmp_path / "tokenizer")
    make_tokenizer(None).save_pretrained(tmp_path / "plain")
    return tmp_path


def test_tokenizer_is_loaded_once_per_folder(folder, monkeypatch):
    tokenizer = load_tokenizer(folder / "tokenizer")
    assert tokenizer.chat_template == "{{ messages }}"
    monkeypatch.chdir(folder)
    assert load_tokenizer("./tokenizer") is tokenizer
    assert load_tokenizer("tokenizer") is tokenizer
    assert load_tokenizer(folder / "plain").chat_template is None


def test_missing_folder_is_reported_with_a_suggestion(folder, monkeypatch):
    with pytest.raises(DataError, match=r"tokeniser: .*; did you mean .*/tokenizer\?"):
        load_tokenizer(folder / "tokeniser")
    monkeypatch.chdir(folder)
    (folder / "examples").mkdir()
    # It has the form org/name, but its first folder exists, so it must not be requested from the hub.
    with pytest.raises(DataError, match="examples/tokenizer: no such tokenizer folder"):
        load_tokenizer("examples/tokenizer")


def test_hub_id_that_cannot_be_downloaded_is_reported(monkeypatch):
    import transformers

    def refuse(name, **_):
        raise OSError(f"{name} is not a local folder and is not a valid model identifier\nmore lines")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(DataError, match=r"^nobody/nothing-here: .*valid model identifier") as caught:
        load_tokenizer("nobody/nothing-here")
    assert "\n" not in str(caught.value)


def test_folder_without_a_tokenizer_is_reported(folder):
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: .*save_pretrained"):
        load_tokenizer(folder / "empty")
    (folder / "broken").mkdir()
    (folder / "broken" / "tokenizer.json").write_text("{")
    (folder / "broken" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(DataError, match=r"broken: .*save_pretrained"):
        load_tokenizer(folder / "broken")


def test_a_tokenizer_that_is_python_code_is_refused_with_the_conversion(tmp_path):
    (tmp_path / "tokenization_kimi.py").write_text("raise SystemExit('this code must not run')")
    auto_map = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    with pytest.raises(DataError, match=r"Python code of the folder, which is never run.*tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_pad_token_falls_back_to_eos(make_tokenizer):
    tokenizer = make_tokenizer(None)
    assert end_token_id(tokenizer) == tokenizer.convert_tokens_to_ids("</s>")
    assert pad_token_id(tokenizer) == end_token_id(tokenizer)
    tokenizer.pad_token = "<s>"
    assert pad_token_id(tokenizer) == tokenizer.convert_tokens_to_ids("<s>")
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(DataError, match="no pad_token and no eos_token"):
        pad_token_id(tokenizer)
    with pytest.raises(DataError, match="no eos_token"):
        end_token_id(tokenizer)


class _Written:
    """A tokenizer without a backend of the tokenizers library."""

    eos_token_id, chat_template, special_tokens_map = 1, "{{ messages }}", {"eos_token": "</s>"}

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "</s>": 1}


def test_fingerprints_are_those_that_files_of_earlier_versions_record():
    recorded = {"vocabulary": "caf03a2167c05fca", "encoding": "d097f13e2763584b", "samples": "1dd23fdc9284b073"}
    assert {of: fingerprint(_Written(), of)[:16] for of in recorded} == recorded


def test_a_pipe_in_the_folder_is_refused(tmp_path):
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"tokenizer\.json: is a pipe"):
        load_tokenizer(tmp_path)


def test_a_huge_file_and_a_length_that_is_no_number_are_refused(tmp_path, make_tokenizer, monkeypatch):
    make_tokenizer(None).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": "many"}))
    with pytest.raises(DataError, match="model_max_length is 'many'"):
        load_tokenizer(tmp_path)
    monkeypatch.setattr("megatron_wrap.data.chat.tokenizer.MAX_BYTES", 100)
    with pytest.raises(DataError, match=r"tokenizer\.json: .* bytes, more than the 100"):
        load_tokenizer(tmp_path)


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
TEXT = (
    "x "
    + (Path(__file__).parents[4] / "LICENSE").read_text()
    + "naïve 你好，世界 🙂 e\u0301 3.14159 \t\r\n  I'LL they'd"
)
QWEN2_WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(model, pre_tokenizer, decoder, normalizer=None, alphabet=()) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    settings = {"vocab_size": 900, "special_tokens": list(SPECIAL.values()), "show_progress": False}
    if isinstance(model, models.Unigram):
        settings["unk_token"] = "<unk>"
    if alphabet:
        settings["initial_alphabet"] = list(alphabet)
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), model.get_trainer().__class__(**settings))
    return tokenizer


def byte_level(pre_tokenizer=None, normalizer=None) -> Tokenizer:
    pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    return trained(
        models.BPE(), pre_tokenizer, decoders.ByteLevel(), normalizer, sorted(pre_tokenizers.ByteLevel.alphabet())
    )


def with_byte_fallback(normalizer, pre_tokenizer, decoder) -> Tokenizer:
    """Of the form of sentencepiece's BPE: spaces are written as a letter, bytes outside the vocabulary have tokens."""
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    model = models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = trained(model, pre_tokenizers.Metaspace(), decoders.Sequence([*spaces, *decoder]))
    content = json.loads(tokenizer.to_str())
    for byte in range(256):
        content["model"]["vocab"][f"<0x{byte:02X}>"] = len(content["model"]["vocab"])
    tokenizer = Tokenizer.from_str(json.dumps(content | {"pre_tokenizer": None}))
    tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def llama2() -> Tokenizer:
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return with_byte_fallback(normalizer, None, [decoders.Strip(" ", 1, 0)])


def gemma() -> Tokenizer:
    return with_byte_fallback(normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous"), [])


def qwen2() -> Tokenizer:
    words = pre_tokenizers.Split(QWEN2_WORDS, "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return byte_level(pre_tokenizers.Sequence([words, letters]), normalizers.NFC())


def prefixed() -> Tokenizer:
    return byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))


def unigram() -> Tokenizer:
    return trained(models.Unigram(), pre_tokenizers.Metaspace(), decoders.Metaspace(), normalizers.NFKC())


def word_level() -> Tokenizer:
    return trained(models.WordLevel(unk_token="<unk>"), pre_tokenizers.Whitespace(), decoders.Fuse())


def saved(folder: Path, tokenizer: Tokenizer, name: str | None, **settings) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {**SPECIAL, **settings} | ({} if name is None else {"tokenizer_class": name})
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("tokenizer", "name", "settings"),
    [
        (byte_level, "PreTrainedTokenizerFast", {}),
        (byte_level, "GPT2TokenizerFast", {}),
        (byte_level, "GPT2TokenizerFast", {"add_prefix_space": True}),
        (prefixed, "GPT2TokenizerFast", {"add_prefix_space": False}),
        (byte_level, None, {}),
        (qwen2, "Qwen2TokenizerFast", {}),
        (llama2, "LlamaTokenizerFast", {}),
        (llama2, "LlamaTokenizerFast", {"legacy": False, "add_bos_token": True, "add_eos_token": True}),
        (llama2, "LlamaTokenizer", {"add_prefix_space": False}),
        (gemma, "GemmaTokenizerFast", {}),
        (unigram, "PreTrainedTokenizerFast", {}),
        (word_level, "PreTrainedTokenizerFast", {}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_tokenizer_is_that_of_its_file(tmp_path, tokenizer, name, settings):
    """But for options of tokenizer_config.json about the first word and the tokens around a text."""
    stored, is_option = tokenizer(), "add_prefix_space" in settings
    loaded = load_tokenizer(saved(tmp_path / "folder", stored, name, **settings))
    actual = loaded(TEXT, add_special_tokens=False)["input_ids"]
    expected = stored.encode(TEXT, add_special_tokens=False).ids
    assert actual[-500:] == expected[-500:]
    assert (actual != expected) == is_option
    assert loaded.decode(actual).lstrip(" ") == stored.decode(expected).lstrip(" ")


def test_a_byte_level_tokenizer_labelled_as_llama_keeps_its_spaces(tmp_path):
    """transformers 5.17 to 5.20 build Llama's rules for this label, which drop all spaces; later ones do not."""
    import transformers

    folder = saved(tmp_path / "folder", byte_level(), "LlamaTokenizerFast")
    if type(transformers.AutoTokenizer.from_pretrained(folder)) is transformers.LlamaTokenizer:
        with pytest.raises(DataError, match=r"LlamaTokenizer of transformers 5\..* encodes .* as \['x', 'y', 'z'"):
            load_tokenizer(folder)
    else:
        loaded = load_tokenizer(folder)
        assert loaded.decode(loaded("hello world", add_special_tokens=False)["input_ids"]) == "hello world"


@pytest.mark.parametrize(
    ("tokenizer", "name", "words"),
    [
        (qwen2, "GPT2TokenizerFast", "GPT2Tokenizer of transformers 5.* encodes"),
        (byte_level, "Qwen2TokenizerFast", "Qwen2Tokenizer of transformers 5.* encodes"),
        (byte_level, "GemmaTokenizerFast", "GemmaTokenizer of transformers 5.* encodes"),
        (prefixed, "GPT2TokenizerFast", r"encodes .* as \['x', .* tokenizer\.json as \['Ġ', 'x'"),
        (unigram, "LlamaTokenizerFast", "LlamaTokenizer of transformers 5.* encodes"),
        (word_level, "LlamaTokenizerFast", "LlamaTokenizer of transformers 5.* encodes"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_class_with_other_rules_than_the_file_is_refused_with_a_cure(tmp_path, tokenizer, name, words):
    stored = tokenizer()
    folder = saved(tmp_path / "folder", stored, name)
    with pytest.raises(DataError, match=f'{words}.*"tokenizer_class": "PreTrainedTokenizerFast"'):
        load_tokenizer(folder)
    shutil.rmtree(folder)
    _load.cache_clear()
    loaded = load_tokenizer(saved(folder, stored, "PreTrainedTokenizerFast"))
    assert loaded(TEXT, add_special_tokens=False)["input_ids"] == stored.encode(TEXT, add_special_tokens=False).ids


def test_rules_that_differ_for_few_tokens_are_found(tmp_path):
    """`ignore_merges` decides about words that are tokens but no result of merges; added tokens keep their ids."""
    content = json.loads(byte_level().to_str())
    content["model"]["ignore_merges"] = True
    content["model"]["vocab"]["ĠSupercalifragilistic"] = len(content["model"]["vocab"])
    folder = saved(tmp_path / "merges", Tokenizer.from_str(json.dumps(content)), "GPT2TokenizerFast")
    with pytest.raises(DataError, match=r"encodes 'x  Supercali.* tokenizer\.json as .*'ĠSupercalifragilistic'\]"):
        load_tokenizer(folder)


def test_a_tokenizer_of_the_hub_is_compared_with_its_file_in_the_cache(tmp_path, monkeypatch):
    import huggingface_hub
    import transformers

    folder, load = saved(tmp_path / "folder", qwen2(), "GPT2TokenizerFast"), transformers.AutoTokenizer.from_pretrained
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _, **named: load(str(folder), **named))
    cached = {("org/name", "tokenizer.json"): str(folder / "tokenizer.json")}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *names: cached[names])
    with pytest.raises(DataError, match=r"^org/name: GPT2Tokenizer of transformers 5.* encodes"):
        load_tokenizer("org/name")
