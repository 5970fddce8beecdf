"""A small run for the tests of the facade."""

from __future__ import annotations

from pathlib import Path

import pytest

RUN = (Path(__file__).parents[1] / "small_run.yaml").read_text(encoding="utf-8")
RUN += "  data: {__override__: {num_workers: 0}}\n"  # tests of workers name a number


@pytest.fixture(autouse=True)
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory contains only run.yaml."""
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
