"""Print the layers of the package with their sizes, and every violation of a rule of docs/architecture.md. The lines of
code are those without blank lines, comments and docstrings.

python scripts/architecture.py
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit"))

from _architecture import (
    PACKAGE,
    ROOT,
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


def count_code(text: str) -> int:
    """Number of lines with code: without blank lines, comments and docstrings."""
    documentation = {
        number
        for node in ast.walk(ast.parse(text))
        for statement in (node.body if isinstance(getattr(node, "body", None), list) else ())
        if isinstance(statement, ast.Expr) and isinstance(getattr(statement.value, "value", None), str)
        for number in range(statement.lineno, (statement.end_lineno or 0) + 1)
    }
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in layout]
    return len({number for token in tokens for number in range(token.start[0], token.end[0] + 1)} - documentation)


def main() -> None:
    """Print the table, then a line for each violation."""
    code, layers = read_package(), read_layers()
    subpackages = read_subpackages()
    files: Counter[tuple[str, str]] = Counter()
    lines: Counter[tuple[str, str]] = Counter()
    code_lines: Counter[tuple[str, str]] = Counter()
    for file, count in code.lines.items():
        for folder in {(unit_of(file), ""), (unit_of(file), subpackage_of(file))}:
            files[folder] += 1
            lines[folder] += count
            code_lines[folder] += count_code((ROOT / PACKAGE / file).read_text("utf-8"))

    def position(folder: tuple[str, str]) -> tuple[int, str, int]:
        unit, name = folder
        listed = subpackages.get(unit, [])
        return layers.get(unit, -1), unit, listed.index(name) if name in listed else -1

    print(f"{'layer':>5}  {'folder':<18}{'files':>6}{'lines':>8}{'code':>8}")
    for unit, name in sorted(files, key=position):
        label = f"  {name}" if name else unit
        counts = [counter[unit, name] for counter in (files, lines, code_lines)]
        print(f"{'' if name else layers.get(unit, ''):>5}  {label:<18}{counts[0]:>6}{counts[1]:>8}{counts[2]:>8}")
    sums = [sum(counter[folder] for folder in files if not folder[1]) for counter in (files, lines, code_lines)]
    print(f"{'':>5}  {'all':<18}{sums[0]:>6}{sums[1]:>8}{sums[2]:>8}")
    findings, groups = layer_findings(code, layers, UPWARD_BY_NAME), cycles(code)
    disordered = order_findings(code, subpackages)
    violations = f"upward imports {len(findings.upward)}, sideways {len(findings.sideways)}"
    print(f"{violations}, out of a folder's order {len(disordered)}, cycles {len(groups)}")
    for finding in [*findings.all, *disordered, *(" and ".join(group) for group in groups)]:
        print(finding)


if __name__ == "__main__":
    main()
