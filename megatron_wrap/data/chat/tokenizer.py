"""Loads Hugging Face tokenizers; their pad and eos ids, their fingerprints, and tokens that weights were never
trained with."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from megatron_wrap.config.schema.data import DataConfig
from megatron_wrap.errors import ConfigError, DataError, special_file
from megatron_wrap.nearest_names import missing_path_hint

MAX_BYTES = 1 << 29
"""Largest size of a tokenizer's file in bytes; large ones have 40 MB."""
_TEXT_FILES = (".json", ".txt", ".model", ".jinja")
_PROBES = (
    "x y  z\n\n    indented\tand\r\n",
    "x It's 1234567.89% of 2^10; they'LL {say} [\"no\"] </b>... a_b-c/d",
    "x naïve Café ﬁ ½ Ⅷ ά Привет 你好，世界。 こんにちは 한국어 مرحبا नमस्ते 🙂👍🏽 e\u0301",
)
_SAMPLED_TOKENS = 1000


def load_tokenizer(path: str | Path) -> Any:
    """Load a tokenizer from a local folder, or a Hugging Face hub id such as `org/name`.

    Tokenizers are cached per path and shared, so treat them as read-only. Custom code in the folder is never executed.

    Args:
        path: folder or hub id.

    Raises:
        DataError: no such folder (the message suggests the closest name), files that transformers cannot read or that
            are pipes or devices, a hub id that cannot be downloaded, or a tokenizer that transformers builds with other
            rules than those of its tokenizer.json.
    """
    text = str(path)
    folder = Path(text).expanduser()
    if os.path.exists(folder):  # Path.exists raises if a name is too long
        for file in [folder, *(folder.iterdir() if folder.is_dir() else ())]:
            if reason := special_file(file):
                raise DataError(reason)
            if file.suffix in _TEXT_FILES and file.is_file() and (size := file.stat().st_size) > MAX_BYTES:
                raise DataError(f"{file}: {size:,} bytes, more than the {MAX_BYTES:,} of a tokenizer; is it one?")
        return _load(str(folder.resolve()))
    if _is_hub_id(text):
        return _load(text)
    raise DataError(f"{text}: no such tokenizer folder{missing_path_hint(text)}")


def run_tokenizer(config: DataConfig) -> Any:
    """The tokenizer of a run, with `new_tokens`; None if it has none.

    Raises:
        DataError: as `load_tokenizer`. ConfigError: there are new tokens and no tokenizer.
    """
    if config.tokenizer is None:
        if config.new_tokens:
            raise ConfigError("megatron_wrap.data.new_tokens: needs a tokenizer; set megatron_wrap.data.tokenizer")
        return None
    loaded = load_tokenizer(config.tokenizer)
    return _with_new(config.tokenizer, config.new_tokens, loaded) if config.new_tokens else loaded


_GROWN: dict[tuple[str, tuple[str, ...]], tuple[Any, Any]] = {}


def _with_new(path: str, tokens: tuple[str, ...], loaded: Any) -> Any:
    """A copy of a loaded tokenizer with further tokens; each call returns the same copy."""
    key = path, tokens
    if key not in _GROWN or _GROWN[key][0] is not loaded:
        grown = copy.deepcopy(loaded)
        grown.add_tokens(list(tokens))
        _GROWN[key] = loaded, grown
    return _GROWN[key][1]


def is_failure(error: BaseException) -> bool:
    """Whether a tokenizer failed, rather than the process being interrupted: a panic of the tokenizers' Rust library is
    no Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def pad_token_id(tokenizer: Any) -> int:
    """The pad token's id, else the eos token's (padding has no loss).

    Raises:
        DataError: the tokenizer has neither.
    """
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise DataError(f"{_name(tokenizer)}: has no pad_token and no eos_token; set one in its tokenizer_config.json")


def end_token_id(tokenizer: Any) -> int:
    """The id of the tokenizer's eos token, which ends a sample.

    Raises:
        DataError: the tokenizer has none.
    """
    if tokenizer.eos_token_id is None:
        raise DataError(f"{_name(tokenizer)}: has no eos_token; set it in its tokenizer_config.json")
    return int(tokenizer.eos_token_id)


def fingerprint(tokenizer: Any, of: Literal["vocabulary", "encoding", "samples"]) -> str:
    """SHA-256 of a part of a tokenizer. Files record these values, so they are the same in every version.

    Args:
        of: "vocabulary": the tokens, their ids and the eos token, which stored ids stand for. "encoding": these, and
            how a text is divided into tokens. "samples": how samples are encoded, with chat template and special
            tokens.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if of == "samples":
        encoding = tokenizer.get_vocab() if backend is None else backend.to_str()
        parts = [type(tokenizer).__name__, encoding, tokenizer.chat_template, tokenizer.special_tokens_map]
        return _sha256(json.dumps(parts, sort_keys=True, default=str))
    vocabulary = _sha256(json.dumps(sorted(tokenizer.get_vocab().items())) + str(tokenizer.eos_token_id))
    if of == "vocabulary":
        return vocabulary
    return _sha256(vocabulary + ("" if backend is None else backend.to_str()))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _name(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__


def _is_hub_id(text: str) -> bool:
    """Whether a path has the form `name` or `org/name`, and is not a missing path in an existing local folder."""
    return bool(re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", text)) and not Path(Path(text).parts[0]).exists()


def _settings(folder: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json; empty if there is no such file."""
    try:
        values = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _tokenizer_json(path: str) -> Path | None:
    """The file of a folder or of a hub id that was loaded."""
    from huggingface_hub import try_to_load_from_cache

    file = Path(path, "tokenizer.json")
    if not Path(path).exists():
        cached = try_to_load_from_cache(path, "tokenizer.json")
        file = Path(cached if isinstance(cached, str) else "")
    return file if file.is_file() else None


def _difference_from_file(tokenizer: Any, file: Path) -> str | None:
    """The first difference between a tokenizer and its tokenizer.json, as text; None if they agree.

    Classes of transformers such as LlamaTokenizer take the vocabulary from the file, and build the rest by rules of
    their own. The ids of the file's added tokens, of a few texts, and of the texts of 1,000 tokens are compared. Each
    text begins with a letter, because classes have their own conventions for a text that begins with a space or follows
    a special token.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(tokenizer) is PreTrainedTokenizerFast:  # the latter loads the file unchanged
        return None
    file_tokenizer = Tokenizer.from_file(str(file))
    for number, token in file_tokenizer.get_added_tokens_decoder().items():
        if (actual := backend.token_to_id(token.content)) != number:
            return f"has the id {actual} for {token.content!r}, and tokenizer.json the id {number}"
    added, size = backend.get_added_tokens_decoder(), file_tokenizer.get_vocab_size()
    sampled = (number for number in range(0, size, max(1, size // _SAMPLED_TOKENS)) if number not in added)
    is_option = _settings(file.parent).get("add_prefix_space") is not None  # it decides about the first word's ids
    starts = ((0, 0), (1, 1), (1, 2), (2, 1)) if is_option else ((0, 0),)
    for text in (*_PROBES, *(f"x {file_tokenizer.decode([number])}" for number in sampled)):
        actual, expected = (each.encode(text, add_special_tokens=False) for each in (backend, file_tokenizer))
        if all(actual.ids[start:] != expected.ids[file_start:] for start, file_start in starts):
            return f"encodes {text!r} as {actual.tokens[:16]}, and tokenizer.json as {expected.tokens[:16]}"
        decoded = [each.decode(encoded.ids) for each, encoded in ((backend, actual), (file_tokenizer, expected))]
        texts = {each.lstrip(" ") if is_option else each for each in decoded}
        if file_tokenizer.decoder is not None and len(texts) > 1:
            return f"decodes the tokens of {text!r} as {decoded[0]!r}, and tokenizer.json as {decoded[1]!r}"
    return None


def _is_python_code(folder: Path) -> bool:
    """Whether a folder's tokenizer is a class of the folder itself, as Kimi K2's and Moonlight's."""
    return "AutoTokenizer" in (_settings(folder).get("auto_map") or {})


@lru_cache(maxsize=8)
def _load(path: str) -> Any:
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        if not isinstance(tokenizer.model_max_length, int | float):  # compared with lengths at the first text
            raise ValueError(f"model_max_length is {tokenizer.model_max_length!r}, which is not a number")
        file = _tokenizer_json(path)
        difference = None if file is None else _difference_from_file(tokenizer, file)
    except BaseException as error:  # transformers, the hub and the Rust library raise different types
        if not is_failure(error):
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if _is_python_code(Path(path)):
            hint = (
                "it is Python code of the folder, which is never run; convert it once to a tokenizer.json "
                "(docs/hugging-face.md#tokenizers-that-are-code), and set megatron_wrap.data.tokenizer to that folder"
            )
        elif Path(path).exists():
            hint = "the folder must contain the files that `save_pretrained` of a tokenizer writes"
        else:
            hint = f"there is no folder {path}, and it could not be downloaded as a Hugging Face hub id"
        raise DataError(f"{path}: no tokenizer could be loaded ({reason}); {hint}") from error
    if difference is not None:
        raise DataError(
            f"{path}: {type(tokenizer).__name__} of transformers {transformers.__version__} {difference}; set "
            '"tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json, which loads that file unchanged'
        )
    return tokenizer


@dataclass(frozen=True)
class NewTokens:
    """Tokens whose rows of embedding and output layer are initialized with the mean of the other rows."""

    ids: tuple[int, ...]
    """Ids of the new tokens, ascending."""
    trained: tuple[int, ...]
    """Ids of the tokens whose rows are averaged, ascending."""

    @property
    def listed(self) -> str:
        """The new ids as text."""
        first, last, count = self.ids[0], self.ids[-1], len(self.ids)
        if count == 1:
            return f"id {first}"
        return f"ids {first} to {last}" if last - first == count - 1 else f"{count:,} ids from {first} to {last}"


def new_tokens(tokenizer: Any, original: Any, num_rows: int, vocab_size: int) -> NewTokens | None:
    """The tokens that are new to weights; None if there are none. A row that belongs to no token is unchanged.

    Args:
        tokenizer: of the run.
        original: tokenizer of the weights; None: it is not known, and all rows of the weights count as trained.
        num_rows: rows of the weights, without padding; a published model often has more rows than its tokenizer has
            tokens.
        vocab_size: of the model, without padding; for a teacher the number of rows that the student has as well.
    """
    unknown: set[int] = set()
    trained = set(range(min(num_rows, vocab_size)))
    if original is not None and (original is not tokenizer or vocab_size > num_rows):
        known = set(original.get_vocab().values())
        unknown, trained = set(tokenizer.get_vocab().values()) - known, trained & known
    ids = (unknown | set(range(num_rows, vocab_size))) & set(range(vocab_size))
    return NewTokens(tuple(sorted(ids)), tuple(sorted(trained))) if ids else None
