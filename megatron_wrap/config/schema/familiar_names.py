"""Arguments of transformers, trl and axolotl, and our key for each: for messages about unknown keys and for
a page of the site. The table is familiar_names.yaml.

`tests/unit/config/schema/test_familiar_names.py` verifies that every key exists, and that no field of the installed
trl's SFTConfig, DPOConfig and GRPOConfig is missing.
"""

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from megatron_wrap.config.reading.yaml_nodes import read_yaml
from megatron_wrap.nearest_names import did_you_mean


class Counterpart(NamedTuple):
    """The counterpart here of an argument of another library."""

    key: str | None
    """Dotted path of our key; None: there is none."""
    note: str = ""
    """Difference of values or units; without a key, the reason why there is none."""


@functools.cache
def libraries() -> Mapping[str, Mapping[str, Counterpart]]:
    """Library -> argument -> our key for it. trl lacks the arguments of transformers, axolotl those of both."""
    tables = read_yaml(Path(__file__).with_suffix(".yaml")).plain()
    return {
        library: {name: _counterpart(name, row) for names, row in table.items() for name in names.split(", ")}
        for library, table in tables.items()
    }


def _counterpart(name: str, row: str | Mapping[str, str]) -> Counterpart:
    if isinstance(row, str):
        return Counterpart(row.replace("*", name))
    if "reason" in row:
        return Counterpart(None, row["reason"])
    return Counterpart(row["key"].replace("*", name), row["note"])


def familiar_advice(path: str) -> str | None:
    """Advice for a message about the dotted `path`: our counterpart of the argument of another library that `path` ends
    with.

    None: another name, or the path itself is our key. Case, and `-` or `_`, do not count.
    """
    folded = path.rpartition(".")[2].casefold().lstrip("-").replace("-", "_")
    for library, names in libraries().items():
        counterpart = names.get(folded)
        if counterpart is not None and counterpart.key != path:
            owner = "transformers'" if library == "transformers" else f"{library}'s"
            if counterpart.key is None:
                return f"{owner} {folded} has no counterpart here: {counterpart.note}"
            note = f" ({counterpart.note})" if counterpart.note else ""
            return f"{owner} {folded} is {counterpart.key} here{note}"
    return None


def unknown_key_hint(path: str, known: Iterable[str], further: Iterable[str] = ()) -> str:
    """The ending of a message about the unknown key at the dotted `path`: an argument of another library, or else the
    closest of the known names."""
    advice = familiar_advice(path)
    return did_you_mean(path.rpartition(".")[2], known, further) if advice is None else f"; {advice}"
