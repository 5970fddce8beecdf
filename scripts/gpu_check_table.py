"""The table of scripts/gpu_check.sh, from a folder with the results of pytest as XML: for each test file, and each way
of a user, the seconds, and how many tests passed, failed and were skipped; then failures with the first line of the
error, the reasons of skips, and a row for docs/gpu-checks.md."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import subprocess
import sys
import xml.etree.ElementTree
from collections import Counter, defaultdict
from pathlib import Path

PACKAGES = ("torch", "megatron-core", "transformer-engine", "transformers")
DURATIONS = Path(__file__).parents[1] / "tests/gpu/durations.json"
BY_TEST = "test_user_ways"
"""Name of the test file whose tests have a row each."""


def main(folder: Path) -> int:
    """Print the table; returns 1 if a test failed or none ran."""
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: Counter[str] = Counter()
    failures, reasons, durations = [], Counter[str](), {}
    for path in sorted(folder.glob("*.xml")):
        for case in xml.etree.ElementTree.parse(path).iter("testcase"):
            file = case.attrib["classname"].rpartition(".")[2]
            name = f"{path.stem}: {case.attrib['name'] if file == BY_TEST else file}"
            problem = case.find("failure") if case.find("error") is None else case.find("error")
            skipped = case.find("skipped")
            outcome = "failed" if problem is not None else "skipped" if skipped is not None else "passed"
            outcomes[name][outcome] += 1
            seconds[name] += float(case.attrib["time"])
            if outcome == "skipped":
                reasons[skipped.attrib["message"]] += 1
            elif problem is not None:
                failures.append(f"{path.stem}: {file}::{case.attrib['name']}: {_first_line(problem)}")
            if float(case.attrib["time"]) >= 3:
                durations[f"tests/gpu/{file}.py::{case.attrib['name']}"] = round(float(case.attrib["time"]))
    durations = {**json.loads(DURATIONS.read_text()), **durations}
    (folder / "durations.json").write_text(json.dumps(durations, indent=0, sort_keys=True) + "\n")
    total = sum(outcomes.values(), Counter())
    print(f"{'name':66} {'seconds':>8} {'passed':>7} {'failed':>7} {'skipped':>8}")
    for name, counts in [*outcomes.items(), ("total", total)]:
        numbers = counts["passed"], counts["failed"], counts["skipped"]
        spent = seconds[name] if name in outcomes else seconds.total()
        print(f"{name:66} {spent:8.1f} {numbers[0]:7} {numbers[1]:7} {numbers[2]:8}")
    for line in failures:
        print("FAILED", line)
    for reason, count in reasons.items():
        print(f"skipped {count}: {reason}")
    versions = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    cells = datetime.date.today().isoformat(), _printed("git", "rev-parse", "--short", "HEAD"), _cards(), versions
    print("|", " | ".join([*cells, *(str(total[name]) for name in ("passed", "failed", "skipped"))]), "|")
    return int(total["failed"] > 0 or total["passed"] == 0)


def _first_line(problem: xml.etree.ElementTree.Element) -> str:
    lines = [line for line in (problem.attrib.get("message") or problem.text or "").splitlines() if line.strip()]
    return lines[0][:200] if lines else "no message"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def _cards() -> str:
    names = _printed("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    return ", ".join(f"{count} {name}" for name, count in Counter(names).items()) or "CPU"


def _printed(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
