"""Measure every Hugging Face family against transformers, and write what `megatron-wrap families` prints.

    python scripts/families.py [--cases NAME ...]

A random model of each case of tests/distributed/_bridge_runs.py is loaded on each layout; recorded are the largest
difference of its fp32 logits from transformers', and whether an export is the original bit for bit. Takes minutes on
two cores. With --cases, only these are measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "megatron_wrap" / "bridge" / "measured_families.json"
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "distributed"), str(ROOT / "tests" / "unit" / "bridge" / "export")]


def measure(case: str, layouts: list[str], pools: Any, folder: Path) -> dict[str, Any]:
    """The measured layouts and the largest difference of one case."""
    import _bridge_runs as runs
    import numpy
    import torch

    original = runs.make_folder(case, folder / "original", max_shard_size="100KB")
    expected = runs.expected_logits(original)
    before, worst = runs.stored(original), 0.0
    for layout in layouts:
        processes, overrides = runs.LAYOUTS[layout]
        out = folder / layout
        logits = pools(processes).run(runs.logits_and_export, str(original), overrides, str(out), "60KB")[0]
        worst = max(worst, float(numpy.abs(logits - expected).max()))
        after = runs.stored(out)
        if before.keys() != after.keys() or not all(torch.equal(before[name], after[name]) for name in before):
            raise SystemExit(f"{case} on {layout}: the export is not the original")
    model_type = json.loads((original / "config.json").read_text())["model_type"]
    return {"model_type": model_type, "layouts": layouts, "largest_difference": worst}


def main() -> None:
    import _bridge_runs as runs
    from _pools import pools
    from test_export_format import PUBLISHED

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=list(runs.FAMILIES), choices=list(runs.FAMILIES))
    measured = json.loads(MEASURED.read_text())["cases"] if MEASURED.exists() else {}
    with tempfile.TemporaryDirectory() as folder, pools(Path(folder), "cpu") as of_size:
        for case in parser.parse_args().cases:
            layouts = [layout for name, layout in runs.CASES if name == case]
            measured[case] = measure(case, layouts, of_size, Path(tempfile.mkdtemp(dir=folder)))
            print(case, measured[case], flush=True)
    sizes: dict[str, list[str]] = {}
    for name, (model_type, _) in PUBLISHED.items():
        sizes.setdefault(model_type, []).append(name)
    MEASURED.write_text(json.dumps({"sizes": sizes, "cases": dict(sorted(measured.items()))}, indent=1) + "\n")


if __name__ == "__main__":
    main()
