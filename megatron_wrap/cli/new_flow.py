"""`megatron-wrap new-flow NAME`: write a working flow, its run and its parity test, to be edited."""

from __future__ import annotations

import argparse
import importlib.util
import json
import keyword
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from megatron_wrap.config.reading.tree import schema_line
from megatron_wrap.errors import ConfigError
from megatron_wrap.utils.atomic_write import named_write_errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    parser.add_argument("name", metavar="NAME", help="module name of the flow in lower case, such as focal_loss")
    parser.add_argument(
        "--folder", default=".", metavar="FOLDER", help="folder to write (default: the working directory)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes NAME.py, NAME.yaml, NAME.jsonl and test_NAME.py, and refuses to overwrite an existing file."""
    name, folder = arguments.name, Path(arguments.folder)
    _check_name(name)
    flow_class = "".join(part.capitalize() for part in name.removesuffix("_flow").split("_")) + "Flow"
    data = json.dumps(str(folder / f"{name}.jsonl"), ensure_ascii=False)
    values = {"NAME": name, "CLASS": flow_class, "DATA": data}
    contents = {
        f"{name}.py": _filled("flow.py.txt", values),
        f"{name}.yaml": schema_line() + _filled("flow.yaml", values),
        f"{name}.jsonl": _filled("samples.jsonl", {}),
        f"test_{name}.py": _filled("test_flow.py.txt", values),
    }
    existing = [str(folder / file) for file in contents if (folder / file).exists()]
    if existing:
        raise ConfigError(f"{', '.join(existing)}: exists already; choose another name or --folder")
    with named_write_errors(folder, "choose another --folder"):
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in contents.items():
            (folder / file).write_text(text, encoding="utf-8")
    print(f"wrote {', '.join(str(folder / file) for file in contents)}")
    path, config = shlex.quote(str(folder)), shlex.quote(str(folder / f"{name}.yaml"))
    print(f"its parity test: PYTHONPATH={path} python -m pytest {shlex.quote(str(folder / f'test_{name}.py'))}")
    print(f"the same as a table: PYTHONPATH={path} megatron-wrap check-parity {config}")
    print(f"train it: PYTHONPATH={path} megatron-wrap train {config}")
    return 0


def _filled(template: str, values: Mapping[str, str]) -> str:
    """A file of cli/templates with each placeholder replaced by its value."""
    text = (Path(__file__).parent / "templates" / template).read_text(encoding="utf-8")
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return text


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} is not a module name; use lower-case letters, digits and _, such as focal_loss")
    if importlib.util.find_spec(name) is not None:
        raise ConfigError(f"{name!r} is the name of an installed module; choose another, such as my_{name}")
