"""Loads Hugging Face tokenizers, and finds the pad and end-of-sequence ids for training."""

import hashlib
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_wrap.config.paths import missing_path_hint
from megatron_wrap.errors import DataError


def load_tokenizer(path: str | Path, require_chat_template: bool = False) -> Any:
    """Load a tokenizer from a local folder, or a Hugging Face hub id such as `org/name`.

    Tokenizers are cached per path and shared, so treat them as read-only. Custom code in the folder is never executed.

    Args:
        path: folder or hub id.
        require_chat_template: raise if there is no chat template, which chat samples need.

    Raises:
        DataError: no such folder (the message suggests the closest name), files that transformers cannot read, a hub
            id that cannot be downloaded, or no chat template.
    """
    text = str(path)
    folder = Path(text).expanduser()
    if folder.exists():
        tokenizer = _load(str(folder.resolve()))
    elif _is_hub_id(text):
        tokenizer = _load(text)
    else:
        raise DataError(f"{text}: no such tokenizer folder{missing_path_hint(text)}")
    if require_chat_template and not tokenizer.chat_template:
        raise DataError(
            f"{text}: this tokenizer has no chat template, which samples with `messages` need; "
            "put a chat_template.jinja into its folder, or use the tokenizer of an instruction-tuned model"
        )
    return tokenizer


def pad_token_id(tokenizer: Any) -> int:
    """The pad token's id, else the eos token's (padding has no loss).

    Raises:
        DataError: the tokenizer has neither.
    """
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    if tokenizer.eos_token_id is not None:
        return int(tokenizer.eos_token_id)
    raise DataError(f"{_name(tokenizer)}: has no pad_token and no eos_token; set one in its tokenizer_config.json")


def end_token_id(tokenizer: Any) -> int:
    """The id of the tokenizer's eos token, which ends a sample.

    Raises:
        DataError: the tokenizer has none.
    """
    if tokenizer.eos_token_id is None:
        raise DataError(f"{_name(tokenizer)}: has no eos_token; set it in its tokenizer_config.json")
    return int(tokenizer.eos_token_id)


def vocabulary_hash(tokenizer: Any) -> str:
    """SHA-256 of the tokens, their ids and the id of the eos token."""
    content = json.dumps(sorted(tokenizer.get_vocab().items())) + str(tokenizer.eos_token_id)
    return hashlib.sha256(content.encode()).hexdigest()


def _name(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__


def _is_hub_id(text: str) -> bool:
    """Whether a path has the form `name` or `org/name`, and is not a missing path in an existing local folder."""
    return bool(re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", text)) and Path(text).parts[0] not in _names_here()


def _names_here() -> set[str]:
    return {entry.name for entry in Path().iterdir()}


@lru_cache(maxsize=8)
def _load(path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # transformers, the hub and the Rust library raise different types
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if Path(path).exists():
            hint = "the folder must contain the files that `save_pretrained` of a tokenizer writes"
        else:
            hint = f"there is no folder {path}, and it could not be downloaded as a Hugging Face hub id"
        raise DataError(f"{path}: no tokenizer could be loaded ({reason}); {hint}") from error
