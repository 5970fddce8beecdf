"""What a process prints, in the file of its rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_wrap.parallel import rank_log

PROGRAM = """
import os, sys
from megatron_wrap.parallel import rank_log
rank, keeps = int(sys.argv[1]), sys.argv[2] == "keeps"
console = rank_log.begin(rank, 4, keeps)
assert rank_log.begin(rank, 4, True) is None if keeps else console is not None
print("printed")
os.write(2, b"from C\\n")
sys.stderr.write("\\x1b[31mred\\x1b[0m\\n")
sys.stderr.write("\\r 10%")
print("to the console", file=console or sys.stderr, flush=True)
1 / 0
"""


def ended(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), rank_log.VARIABLE: str(folder)}
    command = [sys.executable, "-c", PROGRAM, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_rank_without_the_console_writes_all_into_its_log(tmp_path: Path) -> None:
    done = ended(tmp_path / "logs", "1", "leaves")
    assert (done.stdout, done.stderr) == ("", "to the console\n")
    log = (tmp_path / "logs/rank_1.log").read_text()
    assert log.startswith("---- rank 1 of 4, process ")
    assert {"printed", "from C", "ZeroDivisionError: division by zero"} <= set(log.splitlines())


def test_the_console_of_rank_0_is_copied(tmp_path: Path) -> None:
    done = ended(tmp_path, "0", "keeps")
    assert done.stdout == "printed\n"
    assert done.stderr.startswith("from C\n\x1b[31mred\x1b[0m\n\n 10%to the console\n")  # \r is read as \n
    log = (tmp_path / "rank_0.log").read_text().splitlines()
    assert sorted(log[1:4]) == ["printed", "red", "to the console"]
    assert log[-1] == "ZeroDivisionError: division by zero"
    assert "from C" not in log


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = ended(tmp_path / "file", "0", "keeps")
    assert done.stdout == "printed\n"
    assert "red" in done.stderr


def test_a_full_disk_does_not_end_the_process() -> None:
    class Console:
        def write(self, text: str) -> int:
            return len(text)

    with open("/dev/full", "wb", 0) as full:
        with pytest.raises(OSError, match="No space left"):
            full.write(b"a line")
        assert rank_log._Copied(Console(), full).write("a line\n") == 7  # type: ignore[arg-type]


def test_the_summary_has_the_last_lines_of_the_last_start(tmp_path: Path) -> None:
    header = "---- rank 2 of 4, process 7 on host, 2026-11-24T08:00:00+00:00 ----\n"
    log = tmp_path / "rank_2.log"
    log.write_text(header + "earlier\n" + header + "".join(f"line {number}\n" for number in range(100)))
    first, *lines = rank_log.summary(tmp_path, 2).splitlines()
    assert first == f"last lines of rank 2 ({log}):"
    assert lines == [f"line {number}" for number in range(70, 100)]
    log.write_text("earlier\n" + header)
    assert rank_log.summary(tmp_path, 2) == rank_log.summary(tmp_path, 3) == ""
