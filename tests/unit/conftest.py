"""What tests of several folders share."""

import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"


@pytest.fixture
def log_records() -> Iterator[list[logging.LogRecord]]:
    """What reaches the handlers of Python's root logger."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    yield records
    logging.getLogger().removeHandler(handler)


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], ModuleType]:
    """load_script(name) is the module of scripts/NAME.py, which finds the files beside it as it does when it is run."""

    def load(name: str) -> ModuleType:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(SCRIPTS))
            return importlib.import_module(name)

    return load


@pytest.fixture(scope="session")
def sample_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set and tokenizer of the examples, made once by their own command; tests do not write into it."""
    folder = tmp_path_factory.mktemp("example") / "data"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONHASHSEED": "1"}
    command = [sys.executable, str(ROOT / "examples/data/build.py"), "--output", str(folder)]
    subprocess.run(command, cwd=folder.parent, env=environment, check=True, stdout=subprocess.DEVNULL)
    return folder
