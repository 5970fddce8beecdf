"""The summary of scripts/run_tests.sh, from a folder with the output of each part and the total seconds: the failures,
the last line of each part, and the totals as pytest prints them."""

import re
import sys
from collections import Counter
from pathlib import Path

COUNT = re.compile(r"(\d+) (passed|failed|skipped|xfailed|xpassed|errors?)\b")


def main() -> int:
    """Print the failures and the totals; returns 1 if a test failed."""
    total: Counter[str] = Counter()
    for path in sorted(Path(sys.argv[1]).glob("[!.]*")):
        lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        for line in lines:
            if line.startswith(("FAILED ", "ERROR ")):
                print(line)
        last = lines[-1].strip("= ") if lines else "no output"
        print(f"{path.name}: {last}")
        if " in " in last:
            for number, outcome in COUNT.findall(last):
                total[outcome.replace("errors", "error")] += int(number)
    counts = ", ".join(f"{number} {outcome}" for outcome, number in total.items()) or "no tests ran"
    minutes, seconds = divmod(int(sys.argv[2]), 60)
    print(f"===== {counts} in {60 * minutes + seconds}.00s ({minutes // 60}:{minutes % 60:02}:{seconds:02}) =====")
    return int(any(total[outcome] for outcome in ("failed", "error")))


if __name__ == "__main__":
    sys.exit(main())
