"""Loading tokenizers and the ids taken from them."""

import pytest

from megatron_wrap.data.tokenizer import end_token_id, load_tokenizer, pad_token_id
from megatron_wrap.errors import DataError

pytestmark = pytest.mark.transformers


@pytest.fixture
def folder(make_tokenizer, tmp_path):
    make_tokenizer("{{ messages }}").save_pretrained(tmp_path / "tokenizer")
    make_tokenizer(None).save_pretrained(tmp_path / "plain")
    return tmp_path


def test_a_folder_is_loaded_once(folder, monkeypatch):
    tokenizer = load_tokenizer(folder / "tokenizer", require_chat_template=True)
    assert tokenizer.chat_template == "{{ messages }}"
    monkeypatch.chdir(folder)
    assert load_tokenizer("./tokenizer") is tokenizer
    assert load_tokenizer("tokenizer") is tokenizer


def test_a_chat_template_is_demanded_only_when_asked(folder):
    assert load_tokenizer(folder / "plain").chat_template is None
    with pytest.raises(DataError, match=r"has no chat template.*chat_template\.jinja"):
        load_tokenizer(folder / "plain", require_chat_template=True)


def test_folders_that_are_not_there(folder, monkeypatch):
    with pytest.raises(DataError, match=r"no such tokenizer folder; did you mean .*/tokenizer\?"):
        load_tokenizer(folder / "tokeniser")
    monkeypatch.chdir(folder)
    (folder / "examples").mkdir()
    # Of the form org/name, but its first folder is here: it must not be looked for on the hub.
    with pytest.raises(DataError, match="examples/tokenizer: no such tokenizer folder"):
        load_tokenizer("examples/tokenizer")


def test_a_hub_id_that_cannot_be_fetched(monkeypatch):
    import transformers

    def refuse(name, **_):
        raise OSError(f"{name} is not a local folder and is not a valid model identifier\nmore lines")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(DataError, match=r"^nobody/nothing-here: .*valid model identifier\); no folder") as caught:
        load_tokenizer("nobody/nothing-here")
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer(folder):
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match=r"no tokenizer could be loaded .*save_pretrained"):
        load_tokenizer(folder / "empty")
    (folder / "broken").mkdir()
    (folder / "broken" / "tokenizer.json").write_text("{")
    (folder / "broken" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(DataError, match="no tokenizer could be loaded"):
        load_tokenizer(folder / "broken")


def test_pad_falls_back_to_end(make_tokenizer):
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
