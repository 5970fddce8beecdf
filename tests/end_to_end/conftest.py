"""The commands as a user types them, each in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _interpreters import forked_interpreters

ROOT = Path(__file__).parents[2]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Tests that only `--all` runs fork their interpreters; the others prove that the commands need no more than a new
    interpreter imports."""
    forks = item.get_closest_marker("matrix") or item.get_closest_marker("documentation")
    with forked_interpreters() if forks else contextlib.nullcontext():
        yield


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str
    seconds: float


@pytest.fixture(scope="session")
def sample_data(tmp_path_factory) -> Path:
    """The sample data set and tokenizer, made once."""
    folder = tmp_path_factory.mktemp("data") / "generated"
    subprocess.run([sys.executable, ROOT / "examples/data/build.py", "--output", folder], check=True)
    return folder


@pytest.fixture
def linked(sample_data) -> Callable[..., Path]:
    """linked(folder, *names) -> the folder, with these parts of the checkout, and the sample data where examples have
    it."""

    def link(folder: Path, *names: str) -> Path:
        (folder / "examples/data").mkdir(parents=True)
        for name in names:
            (folder / name).symlink_to(ROOT / name)
        (folder / "examples/data/generated").symlink_to(sample_data)
        return folder

    return link


@pytest.fixture
def command(tmp_path) -> Callable[..., Ended]:
    """Runs `python -m MODULE ...` in an empty folder, with MEGATRON_WRAP's own environment variables unset."""

    def run(*words: object, environment: dict[str, str] | None = None, timeout: float = 240) -> Ended:
        unset = ("GPUS_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
        inherited = {name: value for name, value in os.environ.items() if name not in unset}
        started = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-m", *map(str, words)],
            cwd=tmp_path,
            env={**inherited, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return Ended(ended.returncode, ended.stdout, ended.stderr, time.monotonic() - started)

    return run
