"""Replacement of tokens, keys and passwords of the environment and the configuration by `[hidden]` in what a run
writes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "[hidden]"
SECRET_NAME = re.compile(
    r"(^|[._-])(token|secret|password|passwd|passphrase|credentials?|jwt|(api|access|private|secret)[_-]?key)$",
    re.IGNORECASE,
)
"""Matches names of keys and environment variables whose values are secret."""
SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[opsu]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abp]-[\w-]{10,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})|(?<=://)[^\s/@]+(?=@)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----",
    re.DOTALL,
)
"""Matches values that are secret by their form; in a URL, user and password."""
_SHORTEST = 8
"""Smallest number of characters of a value that is searched for."""
_of_configurations: set[str] = set()


def remember_secrets(values: Any, name: str = "") -> None:
    """Hide the secret values of a configuration from now on, in whatever text they are.

    Args:
        values: nested mappings and lists.
        name: key that contains the values.
    """
    if isinstance(values, Mapping):
        for key, nested in values.items():
            remember_secrets(nested, str(key))
    elif isinstance(values, list | tuple):
        for nested in values:
            remember_secrets(nested, name)
    elif _is_secret(name, values):
        _of_configurations.update(_searched(values))


def hide_secrets(text: str) -> str:
    """The text without secrets: the values of the environment and of this process's configurations, and text that has
    the form of a secret."""
    return _without(text, _known())


def without_secrets(values: Any, name: str = "") -> Any:
    """Nested mappings and lists with `[hidden]` for each secret; arguments as for `remember_secrets`."""
    return _without_nested(values, name, _known())


def _without_nested(values: Any, name: str, secrets: list[str]) -> Any:
    if isinstance(values, Mapping):
        return {key: _without_nested(nested, str(key), secrets) for key, nested in values.items()}
    if isinstance(values, list | tuple):
        return [_without_nested(nested, name, secrets) for nested in values]
    if _is_secret(name, values):
        return HIDDEN
    return _without(values, secrets) if isinstance(values, str) else values


def _known() -> list[str]:
    """The secrets of the environment and of the configurations, longest first; read once for the hundreds of values of
    a configuration."""
    known = {part for name, value in os.environ.items() if _is_secret(name, value) for part in _searched(value)}
    return sorted(known | _of_configurations, key=len, reverse=True)


def _without(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return SECRET_VALUE.sub(HIDDEN, text)


def _is_secret(name: str, value: Any) -> bool:
    """Whether a value is secret. A special token of a tokenizer, such as `eos_token: <|end|>`, is not."""
    if not isinstance(value, str) or len(value) < _SHORTEST or value.startswith(("<", "[")):
        return False
    return SECRET_NAME.search(name) is not None


def _searched(value: str) -> list[str]:
    """The value, and the lines of a multi-line value, which may be escaped or indented."""
    return [value, *(line for line in value.split("\n") if len(line) >= 2 * _SHORTEST)]
