"""The form of every error about a value: the line that set it, its dotted path, the rule with the numbers, a hint."""

from collections.abc import Sequence
from typing import NoReturn

from megatron_wrap.config.reading.origins import SetBy
from megatron_wrap.config.schema.run import SECTION_PATHS, RunConfig
from megatron_wrap.errors import ConfigError


def refuse(config: RunConfig, keys: Sequence[str], rule: str, error: type[Exception] = ConfigError) -> NoReturn:
    """Raises `error` about the first of `keys` (each section.key) that the command line sets, else the first that the
    run's YAML sets, else the first."""
    paths = [f"{SECTION_PATHS[section]}.{key}" for section, _, key in (name.partition(".") for name in keys)]
    # the value that was set last is the likeliest mistake
    path = max(paths, key=lambda path: max(config.set_by(path), SetBy.HF_PATH))
    raise error(f"{config.located(path)}: {rule}")


def divisors(number: int) -> str:
    """All divisors as text."""
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)


def neighbours(size: int, unit: int) -> str:
    """The multiples of `unit` around `size` as text."""
    lower = size // unit * unit
    return f"{lower} and {lower + unit}" if lower else str(unit)
