"""The form of every error about a value: the line that set it, its dotted path, the rule with the numbers, a hint."""

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from megatron_wrap.config.reading.origins import SetBy
from megatron_wrap.config.schema.run import SECTION_PATHS, RunConfig
from megatron_wrap.errors import ConfigError, LayoutError, Mistakes


def refuse(config: RunConfig, keys: Sequence[str], rule: str, error: type[Exception] | None = None) -> NoReturn:
    """Raises `error` about the first of `keys` (each section.key) that the command line sets, else the first that the
    run's YAML sets, else the first. By default, `error` is LayoutError if the first key is one of the parallel layout,
    else ConfigError."""
    error = error or (LayoutError if keys[0].startswith("parallel.") else ConfigError)
    paths = [f"{SECTION_PATHS[section]}.{key}" for section, _, key in (name.partition(".") for name in keys)]
    # the value that was set last is the likeliest mistake
    path = max(paths, key=lambda path: max(config.set_by(path), SetBy.HF_PATH))
    raise error(f"{config.located(path)}: {rule}")


def check_each(config: RunConfig, checks: Iterable[Callable[[RunConfig], object]]) -> None:
    """Calls all of these checks.

    Raises:
        MegatronWrapError: the first mistake; `further` are the first ones of the other checks.
    """
    mistakes = Mistakes()
    for check in checks:
        with mistakes.collected():
            check(config)
    mistakes.raise_first()


def divisors(number: int) -> str:
    """All divisors as text."""
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)


def neighbours(size: int, unit: int) -> str:
    """The multiples of `unit` around `size` as text."""
    lower = size // unit * unit
    return f"{lower} and {lower + unit}" if lower else str(unit)
