import builtins
import contextlib
import io
import logging
import sys
import threading
import warnings

import pytest
from loguru import logger as loguru_logger

from megatron_wrap.utils.session import logger_session


@pytest.fixture
def records():
    """(level, message) of each log record of the test."""
    seen = []
    sink = loguru_logger.add(lambda message: seen.append((message.record["level"].name, message.record["message"])))
    yield seen
    loguru_logger.remove(sink)


def test_print_is_redirected_to_the_log_until_undo(records, capsys):
    real = builtins.print
    patches = logger_session(patch_print=True)
    print("loss", 0.5, {"a": 1}, sep=" = ")
    print("{not a field} <red>")
    print()
    print("two\nlines", end="\n")
    print("step", end="")
    print(" 1", end=", ")
    print("done", flush=True)
    print("never ended", end="")
    patches.close()
    patches.close()
    assert builtins.print is real
    print("after")
    assert records == [
        ("DEBUG", "loss = 0.5 = {'a': 1}"),
        ("DEBUG", "{not a field} <red>"),
        ("DEBUG", "two\nlines"),
        ("DEBUG", "step 1, done"),
        ("DEBUG", "never ended"),
    ]
    assert capsys.readouterr().out == "after\n"


def test_print_to_another_file_is_unchanged(records, capsys, tmp_path):
    with logger_session(patch_print=True):
        print("to stderr", file=sys.stderr)
        with open(tmp_path / "out.txt", "w") as file:
            print("to", "file", sep="-", end="!", file=file)
        with contextlib.redirect_stdout(io.StringIO()) as caught:
            print("caught")
        print("explicit stdout", file=sys.stdout)
    assert capsys.readouterr().err.startswith("to stderr\n")
    assert (tmp_path / "out.txt").read_text() == "to-file!"
    assert caught.getvalue() == "caught\n"
    assert records == [("DEBUG", "explicit stdout")]


def test_print_inside_a_sink_is_not_redirected(capsys):
    sink = loguru_logger.add(lambda message: print("sink:", message.record["message"]))
    with logger_session(patch_print=True):
        print("hello")
    loguru_logger.remove(sink)
    assert capsys.readouterr().out == "sink: hello\n"


def test_incomplete_lines_of_threads_are_separate(records):
    def other():
        print("other", end=" ")
        print("thread")

    with logger_session(patch_print=True):
        print("main", end=" ")
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        print("thread")
    assert [message for _, message in records] == ["other thread", "main thread"]


def test_wrapper_of_the_redirected_print_is_kept(records, capsys):
    real = builtins.print
    patches = logger_session(patch_print=True)
    redirected = builtins.print
    builtins.print = wrapper = lambda *values: redirected("wrapped", *values)
    try:
        patches.close()
        assert builtins.print is wrapper
        print("text")
    finally:
        builtins.print = real
    assert capsys.readouterr().out == "wrapped text\n"
    assert records == []


def test_root_handlers_are_removed_and_restored_in_order():
    root = logging.getLogger()
    before = root.handlers[:]
    first, second, later = logging.NullHandler(), logging.NullHandler(), logging.NullHandler()
    root.addHandler(first)
    root.addHandler(second)
    try:
        patches = logger_session(remove_logging=True)
        assert root.handlers == []
        root.addHandler(later)
        patches.close()
        patches.close()
        assert root.handlers == [*before, first, second, later]
    finally:
        for handler in (first, second, later):
            root.removeHandler(handler)


def test_future_and_user_warnings_are_hidden_until_undo():
    def shown_categories():
        with warnings.catch_warnings(record=True) as caught:
            for category in (FutureWarning, UserWarning, RuntimeWarning):
                warnings.warn("text", category, stacklevel=1)
        return [entry.category for entry in caught]

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        filters, before = warnings.filters, list(warnings.filters)
        assert shown_categories() == [FutureWarning, UserWarning, RuntimeWarning]
        patches = logger_session(ignore_warning=True)
        assert shown_categories() == [RuntimeWarning]
        warnings.filterwarnings("ignore", message="added by a library")
        added = warnings.filters[0]
        patches.close()
        patches.close()
        assert shown_categories() == [FutureWarning, UserWarning, RuntimeWarning]
        assert warnings.filters is filters
        assert list(filters) == [added, *before]


def test_default_arguments_change_nothing():
    state = (builtins.print, logging.getLogger().handlers[:], list(warnings.filters))
    with logger_session():
        assert (builtins.print, logging.getLogger().handlers[:], list(warnings.filters)) == state
