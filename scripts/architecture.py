"""Print the layers of the package with their sizes, and every violation of a rule of docs/architecture.md.

python scripts/architecture.py
"""

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit"))

from _architecture import (
    UPWARD_BY_NAME,
    cycles,
    layer_findings,
    order_findings,
    read_layers,
    read_package,
    read_subpackages,
    subpackage_of,
    unit_of,
)


def main() -> None:
    """Print the table, then a line for each violation."""
    code, layers = read_package(), read_layers()
    subpackages = read_subpackages()
    files: Counter[tuple[str, str]] = Counter()
    lines: Counter[tuple[str, str]] = Counter()
    for file, count in code.lines.items():
        for folder in {(unit_of(file), ""), (unit_of(file), subpackage_of(file))}:
            files[folder] += 1
            lines[folder] += count

    def position(folder: tuple[str, str]) -> tuple[int, str, int]:
        unit, name = folder
        listed = subpackages.get(unit, [])
        return layers.get(unit, -1), unit, listed.index(name) if name in listed else -1

    print(f"{'layer':>5}  {'folder':<18}{'files':>6}{'lines':>8}")
    for unit, name in sorted(files, key=position):
        label = f"  {name}" if name else unit
        print(f"{'' if name else layers.get(unit, ''):>5}  {label:<18}{files[unit, name]:>6}{lines[unit, name]:>8}")
    whole = [(files[folder], lines[folder]) for folder in files if not folder[1]]
    print(f"{'':>5}  {'all':<18}{sum(n for n, _ in whole):>6}{sum(n for _, n in whole):>8}")
    findings, groups = layer_findings(code, layers, UPWARD_BY_NAME), cycles(code)
    disordered = order_findings(code, subpackages)
    counts = f"upward imports {len(findings.upward)}, sideways {len(findings.sideways)}"
    print(f"{counts}, out of a folder's order {len(disordered)}, cycles {len(groups)}")
    for finding in [*findings.all, *disordered, *(" and ".join(group) for group in groups)]:
        print(finding)


if __name__ == "__main__":
    main()
