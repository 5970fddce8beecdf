"""Hugging Face tokenizers: loading with errors that say the way out, and the two token ids that training needs."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_wrap.config.paths import missing_path_hint
from megatron_wrap.errors import DataError


def load_tokenizer(path: str | Path, require_chat_template: bool = False) -> Any:
    """The tokenizer of a local folder, or of a Hugging Face hub id such as `org/name`.

    A tokenizer is loaded once per path and shared: treat it as read-only. Code inside the folder is never run.

    Args:
        path: folder or hub id.
        require_chat_template: also demand a chat template, as chat samples need one.

    Raises:
        DataError: no such folder (with the nearest name), files that transformers cannot read, an id that cannot be
            fetched, or no chat template.
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
            "put a chat_template.jinja into its folder, or take the tokenizer of an instruction-tuned model"
        )
    return tokenizer


def pad_token_id(tokenizer: Any) -> int:
    """The id that fills a sequence: the pad token's, else the end token's (harmless, since padding carries no loss).

    Raises:
        DataError: the tokenizer has neither.
    """
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    if tokenizer.eos_token_id is not None:
        return int(tokenizer.eos_token_id)
    raise DataError(f"{_name(tokenizer)}: has no pad_token and no eos_token; name one in its tokenizer_config.json")


def end_token_id(tokenizer: Any) -> int:
    """The id of the tokenizer's eos token, which ends a sample.

    Raises:
        DataError: the tokenizer has none.
    """
    if tokenizer.eos_token_id is None:
        raise DataError(f"{_name(tokenizer)}: has no eos_token; name one in its tokenizer_config.json")
    return int(tokenizer.eos_token_id)


def _name(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__


def _is_hub_id(text: str) -> bool:
    """`name` or `org/name`; a path whose first folder exists here is a folder that is missing, not worth a download."""
    return bool(re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", text)) and Path(text).parts[0] not in _names_here()


def _names_here() -> set[str]:
    return {entry.name for entry in Path().iterdir()}


@lru_cache(maxsize=8)
def _load(path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # transformers, the hub and the Rust reader each have their own kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if Path(path).exists():
            way_out = "the folder must hold what `save_pretrained` of a tokenizer writes"
        else:
            way_out = f"no folder {path} is here, and as a Hugging Face hub id it could not be fetched"
        raise DataError(f"{path}: no tokenizer could be loaded ({reason}); {way_out}") from error
