"""Loading tokenizers; their pad and eos ids."""

import json
import os

import pytest

from megatron_wrap.data.chat.tokenizer import end_token_id, fingerprint, load_tokenizer, pad_token_id
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
