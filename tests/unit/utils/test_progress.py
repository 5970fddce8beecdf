import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from contextlib import closing

from megatron_wrap.utils.progress import ProgressBar, WorkProgress, tracked
from megatron_wrap.utils.session import logger_session


def test_bar_is_disabled_in_a_pipe_and_on_other_ranks(capsys, monkeypatch):
    with closing(ProgressBar(10)) as bar:
        bar.update(3, {"loss": 1.0})
        assert not bar.enabled
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert not ProgressBar(10).enabled


def render(text):
    """Terminal output: applies carriage returns and erased lines, and removes other escape sequences."""
    screen = []
    for line in re.sub(r"\x1b\[(?!K)[0-9;]*[A-Za-z]", "", text).replace("\r\n", "\n").split("\n"):
        shown = []
        for piece in line.split("\r"):
            if piece.startswith("\x1b[K"):
                shown = []
            piece = piece.removeprefix("\x1b[K")
            shown[: len(piece)] = piece
        screen.append("".join(shown).rstrip())
    return screen


def on_terminal(code, columns=100, **environment):
    """Lines that a program leaves on a terminal of so many columns."""
    terminal, process_end = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    inherited = {key: value for key, value in os.environ.items() if key not in ("RANK", "CONSOLE_LOG_LEVEL", "COLUMNS")}
    environment = {**inherited, **environment}
    done = subprocess.run([sys.executable, "-c", code], stderr=process_end, env=environment, timeout=60, check=False)
    os.close(process_end)
    output = b""
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # Linux: the other end is closed and everything has been read
            break
        if not chunk:
            break
        output += chunk
    os.close(terminal)
    assert done.returncode == 0
    return [line for line in render(output.decode()) if line]


def test_log_lines_appear_above_the_bar_on_a_terminal():
    code = (
        "from megatron_wrap.utils.dist_logger import logger\n"
        "from megatron_wrap.utils.session import logger_session\n"
        "from megatron_wrap.utils.progress import ProgressBar\n"
        "from contextlib import closing\n"
        "with logger_session(), closing(ProgressBar(6, initial=2)) as bar:\n"
        "    for iteration in range(3, 7):\n"
        "        bar.update(iteration, {'loss': 0.5})\n"
        "        logger.info_rank_0(f'line {iteration}')\n"
    )
    lines = on_terminal(code)
    assert [re.sub(r"^\S+ \S+ ", "", line) for line in lines[:4]] == [f"INFO    line {i}" for i in range(3, 7)]
    assert len(lines) == 5
    assert re.search(r"100%\|.*\| 6/6 \[\d\d:\d\d<\d\d:\d\d, .*step.*, loss 0.5000\]", lines[4])


def test_a_bar_is_shown_on_a_pseudo_terminal_that_reports_no_width():
    code = (
        "from megatron_wrap.utils.progress import ProgressBar, WorkProgress\n"
        "from contextlib import closing\n"
        "with closing(ProgressBar(2)) as bar:\n"
        "    bar.update(2, {'loss': 0.5})\n"
        "with WorkProgress('export', 4, 'B') as progress:\n"
        "    progress.advance(4)\n"
    )
    (line,) = on_terminal(code, columns=0)
    assert re.search(r"100%\|.*\| 2/2 \[.*loss 0.5000\]", line)


def test_another_rank_erases_the_bar_before_its_line():
    code = (
        "import sys\n"
        "from megatron_wrap.utils.dist_logger import logger\n"
        "from megatron_wrap.utils.session import logger_session\n"
        "sys.stderr.write('  3%|   | 3/100 [00:01<00:31]')\n"  # the bar of rank 0
        "with logger_session():\n"
        "    logger.info_all_ranks('line')\n"
    )
    (line,) = on_terminal(code, RANK="1")
    assert re.sub(r"^\S+ \S+ ", "", line) == "INFO    [rank 1] line"


def test_long_work_in_a_pipe_is_a_line_every_ten_seconds_with_the_remaining_time(monkeypatch, capsys):
    now = 100.0
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    with logger_session():
        for _ in tracked(range(1200), "precompute", 1200, "sample"):
            now += 0.0625
        with WorkProgress("export", 4 * 10**9, "B") as progress:
            now += 30
            progress.advance(10**9)
        with WorkProgress("count", None, "row") as progress:
            now += 10
            progress.advance()
    lines = [line.split("INFO    ")[1] for line in capsys.readouterr().err.splitlines()]
    assert lines[:2] == ["precompute: 160 of 1,200 samples, 01:05 left", "precompute: 320 of 1,200 samples, 00:55 left"]
    assert lines[-2:] == ["export: 1.00GB of 4.00GB, 01:30 left", "count: 1 rows"]


def test_long_work_on_another_rank_shows_nothing(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("megatron_wrap.utils.progress._SECONDS_BETWEEN_LINES", 0.0)
    with logger_session():
        assert list(tracked("ab", "work", 2, "item")) == ["a", "b"]
    assert capsys.readouterr().err == ""
