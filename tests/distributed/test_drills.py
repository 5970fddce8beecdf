"""The long drills of `scripts/drill`, with small counts; docs/testing.md has the full ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from _interpreters import forked_interpreters

pytestmark = pytest.mark.drill

FOLDER = Path(__file__).parents[2] / "scripts" / "drill"
COUNTS = {
    "bad_numbers": 8,
    "codeparrot": 24,
    "config_typos": 100,
    "corrupt_checkpoint": 24,
    "find_secrets": 1,
    "fuzz_config": 400,
    "grpo": 1,
    "kill_during_save": 6,
    "malformed_input": 60,
    "resume_equality": 1,
    "stopped_processes": 1,
}
SHORT_FORMS = {
    "faulty_storage": "test_checkpoint_failures.py",
    "ray_kills": "test_ray.py",
    "ray_elastic": "test_ray.py",
    "slurm_nodes": "test_slurm.py",
}
"""Drills that another test is a short form of."""


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("[!_]*.py") if path.stem not in SHORT_FORMS))
def test_a_short_drill_finds_nothing(name, imported_for_ranks):
    command = [sys.executable, FOLDER / f"{name}.py", "--count", str(COUNTS.get(name, 20))]
    with forked_interpreters():
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WRONG" not in done.stdout
