"""What every test has: the same random numbers in each run, alone or after others; a process of its own where it starts
a process group; and `--fast`, the tests that need neither transformers nor a process group."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import pickle
import random
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# forked processes have none of their parent's threads, so none may be at work here
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy
import pytest
import torch
import torch.distributed

_EXIT_STATUS = pytest.StashKey[int]()
LEFT_OUT = ("transformers", "process_group")
"""Markers of tests that a fast run leaves out."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="no test that needs transformers or a process group")


# ---- the fast run ----


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A fast run does not import a file that is marked as a whole: the import of transformers takes seconds."""
    if not config.getoption("fast") or collection_path.suffix != ".py" or not collection_path.is_file():
        return None
    marked = re.search(rf"^pytestmark = .*\b({'|'.join(LEFT_OUT)})\b", collection_path.read_text("utf-8"), re.M)
    return True if marked else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("fast"):
        return
    if "transformers" in sys.modules:
        raise pytest.UsageError("--fast: a file imports transformers at its top; give it the marker transformers")
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in LEFT_OUT)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _no_transformers_in_a_fast_run(request: pytest.FixtureRequest) -> Any:
    before = "transformers" in sys.modules
    yield
    if request.config.getoption("fast") and not before:
        assert "transformers" not in sys.modules, "--fast: give this test the marker transformers"


# ---- process groups ----


@pytest.fixture(autouse=True, scope="session")
def _no_process_group_here(request: pytest.FixtureRequest) -> Any:
    """Tests fork processes from this one. A process group starts a thread, and what the group leaves to the garbage
    collector joins it; in a process forked meanwhile there is no such thread, and a collection there waits forever."""
    here, fast = os.getpid(), request.config.getoption("fast")
    real = torch.distributed.init_process_group

    def init_process_group(*arguments: Any, **named: Any) -> None:
        assert not fast, "--fast: give this test the marker process_group"
        on_gpu = "tests/gpu/" in os.environ.get("PYTEST_CURRENT_TEST", "")  # CUDA does not survive a fork
        elsewhere = on_gpu or os.getpid() != here
        assert elsewhere, "a process group needs a process of its own: the marker process_group, or the fixture ranks"
        real(*arguments, **named)

    torch.distributed.init_process_group = init_process_group
    yield
    torch.distributed.init_process_group = real


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test with the marker process_group runs in a process forked for it."""
    if pyfuncitem.get_closest_marker("process_group") is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    _import_for_ranks()
    _in_process(lambda: pyfuncitem.obj(**arguments))
    return True


def _in_process(body: Callable[[], None]) -> None:
    """Call body() in a forked process, and fail or skip as it does."""
    from megatron_wrap.utils.dist_logger import configure_console

    context = multiprocessing.get_context("fork")
    theirs, mine = context.Pipe(duplex=False)

    def child() -> None:
        torch.set_num_threads(1)
        gc.freeze()  # the collections of a run skip what this process has from its parent
        configure_console()  # once: each run would add a sink, and loguru's own again when it ends, 4 ms each
        failure, skipped = "", ""
        try:
            body()
        except pytest.skip.Exception as reason:
            skipped = str(reason) or "skipped"
        except BaseException:
            failure = traceback.format_exc()
        mine.send_bytes(pickle.dumps((failure, skipped)))

    process = context.Process(target=child)
    process.start()
    mine.close()  # so that the death of the process is an end of file
    failure, skipped = "no answer in 120 seconds", ""
    try:
        if theirs.poll(120):
            failure, skipped = pickle.loads(theirs.recv_bytes())
    except EOFError:
        process.join(5)
        failure = f"the process ended with {process.exitcode}"
    finally:
        process.join(5)
        if process.is_alive():
            process.kill()
    if skipped:
        pytest.skip(skipped)
    if failure:
        pytest.fail(failure, pytrace=False)


@pytest.fixture(scope="session")
def imported_for_ranks() -> None:
    """For tests that fork ranks."""
    _import_for_ranks()


@functools.cache
def _import_for_ranks() -> None:
    """Here, once, so that no forked process has to."""
    from megatron_wrap.testing.ranks import import_for_ranks

    import_for_ranks()
    _read_for_runs()
    _keep_what_is_imported()


def _read_for_runs() -> None:
    """What each run reads and its process keeps: versions of packages, and the files of a configuration. A forked
    process takes 40 ms for it."""
    from megatron_wrap.bridge.export.model_card import package_versions
    from megatron_wrap.config import load_run_config
    from megatron_wrap.config.reading.yaml_nodes import inline_yaml
    from megatron_wrap.platform.base.machine import this_machine

    package_versions()
    this_machine("cpu")
    here = os.getcwd()
    os.chdir("/")  # runs have a folder of their own, and files that they read are known by the path that messages show
    try:
        config = load_run_config(Path(__file__).parent / "unit/small_run.yaml")
    finally:
        os.chdir(here)
    assert config.record
    for origin in config.origins.values():
        inline_yaml(origin.node.value)


# ---- the garbage collector ----


def pytest_collection_finish(session: pytest.Session) -> None:
    _keep_what_is_imported()


def _keep_what_is_imported() -> None:
    """Collections skip the objects of imported modules, an eighth of the time of unit tests, and forked processes go on
    to share their pages."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], 50)  # of the oldest objects, which are many, a fifth as often


# ---- the end ----


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_EXIT_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End without the interpreter's teardown, in which libraries' threads may crash a process whose tests passed."""
    is_the_program = "pytest" in sys.argv[0] and "PYTEST_CURRENT_TEST" not in os.environ
    if _EXIT_STATUS in config.stash and is_the_program:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[_EXIT_STATUS])


# ---- random numbers ----


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    random.seed(0)
    numpy.random.seed(0)
    if "tests/gpu/" in request.node.nodeid:
        torch.manual_seed(0)
    else:  # without CUDA, torch.manual_seed keeps the stack of each call, for the time when CUDA begins
        torch.default_generator.manual_seed(0)
