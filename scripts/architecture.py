"""Print the layers of the package with their sizes and whatever breaks a rule of docs/architecture.md.

python scripts/architecture.py
"""

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit"))

from _architecture import UPWARD_BY_NAME, cycles, layer_findings, read_layers, read_package, unit_of


def main() -> None:
    """Print the table, then each finding on a line of its own."""
    code, layers = read_package(), read_layers()
    files = Counter(unit_of(file) for file in code.trees)
    lines: Counter[str] = Counter()
    for file, count in code.lines.items():
        lines[unit_of(file)] += count
    found, groups = layer_findings(code, layers, UPWARD_BY_NAME), cycles(code)
    print(f"{'layer':>5}  {'folder':<14}{'files':>6}{'lines':>8}")
    for unit in sorted(files, key=lambda unit: (layers.get(unit, -1), unit)):
        print(f"{layers.get(unit, ''):>5}  {unit:<14}{files[unit]:>6}{lines[unit]:>8}")
    print(f"{'':>5}  {'all':<14}{files.total():>6}{lines.total():>8}")
    print(f"upward imports {len(found.upward)}, sideways {len(found.sideways)}, cycles {len(groups)}")
    for finding in [*found.all, *(" and ".join(group) for group in groups)]:
        print(finding)


if __name__ == "__main__":
    main()
