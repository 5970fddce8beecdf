"""Random edits of the shipped configurations: each is read, or refused with one error that names a file or path.

python scripts/drill/fuzz_config.py --count 20000 [--seed 0]

An edit overrides a random key of the run's tree with a random value, misspells a key on the command line, or changes
characters of the YAML's text. Exits with 1 after an exception that is not an error of the user.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections import Counter
from pathlib import Path

from _counted import run

from megatron_wrap.config import load_run_config
from megatron_wrap.errors import MegatronWrapError

CONFIGS = Path(__file__).parents[2] / "configs"
VALUES = (
    *("null", "true", "false", "0", "1", "-1", "3", "64", "0.5", "1e400", "1e-400", "2e-4", ".nan", ".inf", "0x10"),
    "-0.0",
    *("''", "abc", "a: b", "[", "[]", "{}", "[1, 2]", "{a: 1}", "[[1]]", "{__select__: x}", "!!int x", "~", "*x"),
    *("&x 1", "\x00", "é\u2028", "2024-01-01", "/etc/passwd", "x" * 500, "9" * 30, "${a}", "megatron_wrap"),
)
CHARACTERS = "\n\t :-#[]{}&*!|>'\"%@`,?\\\x00éa0_."


def edited(config: Path, folder: Path, keys: list[str], generator: random.Random) -> tuple[Path, list[str], str]:
    """(YAML, overrides, kind) of a random edit."""
    kind = generator.choice(("value", "value", "key", "text"))
    if kind == "text":
        text = list(config.read_text(encoding="utf-8"))
        for _ in range(generator.randint(1, 4)):
            at = generator.randrange(len(text))
            text[at] = generator.choice((generator.choice(CHARACTERS), "", text[at] * 2, "".join(text[at : at + 20])))
        changed = folder / config.name
        changed.write_text("".join(text), encoding="utf-8")
        return changed, [], kind
    overrides = []
    for _ in range(generator.randint(1, 3)):
        key = generator.choice(keys)
        if kind == "key":
            at = generator.randrange(len(key))
            key = key[:at] + generator.choice((generator.choice(CHARACTERS), "", "x", ".")) + key[at + 1 :]
        overrides.append(f"{key}={generator.choice(VALUES)}")
    return config, overrides, kind


def drill(count: int, seed: int, folder: Path) -> list[str]:
    """Read `count` edits, and print a line for each kind; returns the failures."""
    generator = random.Random(seed)
    configs = sorted(CONFIGS.glob("*.yaml"))
    keys = {config: sorted(load_run_config(config).origins) for config in configs}
    outcomes, wrong = Counter(), []
    for _ in range(count):
        config = generator.choice(configs)
        path, overrides, kind = edited(config, folder, keys[config], generator)
        trace = "an error without a message"
        try:
            load_run_config(path, overrides)
            outcome = "read"
        except MegatronWrapError as error:
            outcome = "refused" if str(error).strip() else "wrong"
        except Exception:
            outcome, trace = "wrong", traceback.format_exc()
        outcomes[kind, outcome] += 1
        if outcome == "wrong":
            text = path.read_text(encoding="utf-8") if kind == "text" else ""
            wrong.append(f"{path.name} {overrides!r}\n{text}\n{trace}")
    for kind in ("value", "key", "text"):
        print(f"{kind:<6}", *(f"{outcomes[kind, outcome]:>6} {outcome}" for outcome in ("read", "refused", "wrong")))
    return wrong


if __name__ == "__main__":
    sys.exit(run(drill, __doc__, count=20_000, trials="edits"))
