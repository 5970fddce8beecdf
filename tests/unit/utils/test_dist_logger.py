import io
import os
import re
import subprocess
import sys

import pytest
from loguru import logger as loguru_logger

from megatron_wrap.errors import ConfigError
from megatron_wrap.utils.dist_logger import configure_console, logger
from megatron_wrap.utils.session import logger_session

TIME = r"\d\d-\d\d \d\d:\d\d:\d\d"


@pytest.fixture
def stderr(monkeypatch, capsys):
    """Returns the console output; removes rank and level from the environment."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("CONSOLE_LOG_LEVEL", raising=False)
    yield lambda: capsys.readouterr().err
    logger.set_rank(None)


def run_python(code, **environment):
    environment = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_import_adds_no_sink_and_loads_no_heavy_package():
    done = run_python(
        "import sys, loguru\n"
        "before = repr(loguru.logger)\n"
        "from megatron_wrap.utils.dist_logger import logger\n"
        "import megatron_wrap.utils.dist_logger as module\n"
        "import megatron_wrap.utils.session, megatron_wrap.utils.progress\n"
        "import megatron_wrap.utils.metric_loggers, megatron_wrap.utils.wandb_logger\n"
        "import megatron_wrap.plan.flops\n"
        "assert module.logger is logger\n"
        "assert repr(loguru.logger) == before, repr(loguru.logger)\n"
        "heavy = {'torch', 'wandb', 'tqdm', 'tensorboard', 'megatron', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    assert done.stderr == ""


def test_console_replaces_the_default_sink_until_undo():
    done = run_python(
        "import sys, loguru\n"
        "from megatron_wrap.utils.dist_logger import logger\n"
        "from megatron_wrap.utils.dist_logger import configure_console\n"
        "host = []\n"
        "loguru.logger.add(host.append, format='{message}')\n"
        "undo = configure_console()\n"
        "logger.info_rank_0('inside')\n"
        "undo(); undo()\n"
        "logger.debug_rank_0('outside')\n"
        "assert host == ['inside\\n', 'outside\\n'], host\n",
        CONSOLE_LOG_LEVEL="INFO",
    )
    inside, outside = done.stderr.splitlines()
    assert re.fullmatch(TIME + r" INFO    inside", inside)
    assert re.search(r"\| DEBUG +\| __main__:<module>:9 - outside$", outside)


def test_default_sink_is_not_restored_if_the_host_removed_it():
    done = run_python(
        "import loguru\n"
        "loguru.logger.remove()\n"
        "from megatron_wrap.utils.session import logger_session\n"
        "with logger_session() as session:\n"
        "    loguru.logger.info('from the host')\n"
        "loguru.logger.info('not logged')\n"
    )
    assert re.fullmatch(TIME + r" INFO    from the host\n", done.stderr)


@pytest.mark.parametrize("level", ["error", "warning", "info", "debug"])
def test_every_level_on_rank_0_and_on_all_ranks(stderr, level):
    undo = configure_console("debug")
    try:
        for rank in (0, 3):
            logger.set_rank(rank)
            getattr(logger, f"{level}_rank_0")("only first {}", rank)
            getattr(logger, f"{level}_all_ranks")("everyone {braces}", braces=rank)
    finally:
        undo()
    lines = stderr().splitlines()
    expected = ["only first 0", "[rank 0] everyone 0", "[rank 3] everyone 3"]
    assert len(lines) == len(expected)
    for line, text in zip(lines, expected, strict=True):
        assert re.fullmatch(rf"{TIME} {level.upper():<7} test_dist_logger.py:\d+ {re.escape(text)}", line), line


def test_debug_lines_name_their_source_line(stderr):
    with logger_session(level="DEBUG", patch_print=True):
        logger.info_rank_0("here")
        loguru_logger.info("plain")
        print("printed")
    numbers = [int(re.search(r"test_dist_logger.py:(\d+) ", line)[1]) for line in stderr().splitlines()]
    first = numbers[0]
    assert numbers == [first, first + 1, first + 2]


def test_level_is_read_from_the_environment_and_plain_text_is_not_formatted(stderr, monkeypatch):
    monkeypatch.setenv("CONSOLE_LOG_LEVEL", "warning")
    undo = configure_console()
    logger.info_rank_0("hidden")
    logger.warning_rank_0("a {dict} and a <red>tag</red>")
    undo()
    assert re.fullmatch(TIME + r" WARNING a \{dict\} and a <red>tag</red>\n", stderr())


def test_unknown_level_is_refused(monkeypatch):
    monkeypatch.setenv("CONSOLE_LOG_LEVEL", "LOUD")
    with pytest.raises(ConfigError, match=r"CONSOLE_LOG_LEVEL 'LOUD'; choose one of TRACE, DEBUG, INFO"):
        configure_console()


def test_rank_is_read_from_torchrun_unless_set(monkeypatch):
    monkeypatch.setenv("RANK", "5")
    assert logger.rank == 5
    with logger_session(rank=2):
        assert logger.rank == 2
    assert logger.rank == 5


def test_nested_consoles_write_each_line_once(stderr):
    outer = configure_console("INFO")
    inner = configure_console("ERROR")
    logger.info_rank_0("hidden by the inner one")
    logger.error_rank_0("once")
    outer()  # out of order: the inner console stays active
    logger.error_rank_0("still once")
    inner()
    texts = [line.split(" ERROR   ")[-1] for line in stderr().splitlines()]
    assert texts == ["once", "still once"]


def test_exception_is_logged_with_its_traceback(stderr):
    with logger_session():
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError:
            loguru_logger.exception("failed")
    shown = stderr()
    assert "failed\nTraceback (most recent call last):" in shown
    assert shown.endswith("ZeroDivisionError: division by zero\n")


def test_color_is_used_only_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = {}
    for kind in (Terminal, io.StringIO):
        stream = kind()
        monkeypatch.setattr(sys, "stderr", stream)
        with logger_session():
            logger.info_rank_0("text")
        shown[kind] = stream.getvalue()
    assert "\x1b[" in shown[Terminal]
    assert "\x1b[" not in shown[io.StringIO]
