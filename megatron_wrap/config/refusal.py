"""The form of every error about a value: where it was set, its dotted path, the rule with the numbers, a hint."""

from collections.abc import Sequence
from typing import Any, NoReturn

from megatron_wrap.config.schema import SECTION_PATHS, RunConfig
from megatron_wrap.errors import ConfigError

_BY_USER = ("command line", "(override)")  # the value that was set last is the likeliest mistake


def refuse(config: RunConfig, keys: Sequence[str], rule: str, error: type[Exception] = ConfigError) -> NoReturn:
    """Raises `error` about the first of `keys` (each section.key) that the command line sets, else the first that the
    run's YAML sets, else the first."""
    paths = [f"{SECTION_PATHS[section]}.{key}" for section, _, key in (name.partition(".") for name in keys)]
    by = {ending: [path for path in paths if config.sources.get(path, "").endswith(ending)] for ending in _BY_USER}
    path = next((found[0] for found in by.values() if found), paths[0])
    where = config.sources.get(path, "").partition(" (")[0]
    raise error(f"{where} {path}: {rule}".strip())


def value_of(config: RunConfig, name: str) -> Any:
    """The value of section.key."""
    section, _, key = name.partition(".")
    return getattr(getattr(config, section), key)


def divisors(number: int) -> str:
    """All divisors as text."""
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)


def neighbours(size: int, unit: int) -> str:
    """The multiples of `unit` around `size` as text."""
    lower = size // unit * unit
    return f"{lower} and {lower + unit}" if lower else str(unit)
