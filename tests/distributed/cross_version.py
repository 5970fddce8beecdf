"""A checkpoint saved with one Megatron-Core resumes with another: run `save` with one Python, `load` with the other.

python tests/distributed/cross_version.py save FOLDER
other/python tests/distributed/cross_version.py load FOLDER
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import _checkpoint_runs as runs

LAYOUTS = {
    "one-rank": (1, runs.DROPOUT),
    "tp2-bf16": (2, (*runs.TP2, *runs.BF16)),
    "pp2-vpp2-distributed": (2, (*runs.PP2_VPP2, *runs.DISTRIBUTED)),
    "dp2-distributed": (2, runs.DISTRIBUTED),
}


def save(folder: Path) -> None:
    """Train each layout with a checkpoint after half of the steps, and record the other half."""
    for name, (processes, overrides) in LAYOUTS.items():
        steps = runs.in_new_processes(processes, runs.train, folder / name, overrides, runs.STEPS, (runs.SAVED,))[0]
        (folder / name / "expected.json").write_text(json.dumps({"steps": steps[runs.SAVED :]}))


def load(folder: Path) -> list[str]:
    """Resume each layout and compare its steps with the recorded ones; returns descriptions of differences."""
    wrong = []
    for name, (processes, overrides) in LAYOUTS.items():
        expected = json.loads((folder / name / "expected.json").read_text())["steps"]
        steps = runs.in_new_processes(processes, runs.train, folder / name, overrides)[0]
        pairs = [(a, b) for x, y in zip(expected, steps, strict=True) for a, b in zip(x, y, strict=True)]
        largest = max(abs(a - b) / max(abs(a), 1e-12) for a, b in pairs)
        print(f"{name}: {len(steps)} steps, largest relative difference {largest:.1e}", flush=True)
        wrong += [f"{name}: {a} and {b}" for a, b in pairs if not math.isclose(a, b, rel_tol=1e-6)]
    return wrong


def main() -> int:
    """0: all agree; 1: they do not; 2: wrong arguments."""
    if len(sys.argv) != 3 or sys.argv[1] not in ("save", "load"):
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[2])
    if sys.argv[1] == "save":
        save(folder)
        return 0
    wrong = load(folder)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
