"""Asynchronous saves: each contains the state of its own step, is visible when complete, and fails on all ranks."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import _checkpoint_runs as runs
import pytest
from _checkpoint_runs import BF16, DISTRIBUTED, OVERLAP, TP2, TRAIN
from _covering import quick
from _interpreters import forked_interpreters
from _started import refusal_of, train_until

from megatron_wrap.checkpoint.files.run_folder import CheckpointStore

ASYNC = ("megatron_wrap.checkpoint.async_save=true",)
SAVES = 3
LAYOUTS = {
    "tp2": (2, TP2),
    "dp2-distributed-overlap-bf16": (2, (*DISTRIBUTED, *OVERLAP, *BF16)),
}


def _step(wrap: Any) -> None:
    train_until(wrap, runs.samples(), wrap.iteration + 1)


@contextmanager
def _started(folder: Path, overrides: tuple[str, ...]) -> Iterator[Any]:
    """A run whose ranks fork their writers, which then import nothing. The writers of `_stopped_writer` are new
    interpreters, as those of a user's run."""
    with forked_interpreters(), runs.started(folder, overrides) as wrap:
        yield wrap


def _saved_at_each_step(folder: Path, overrides: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Digests of the live state after each step, and of the checkpoint of each step when loaded."""
    live, loaded = [], []
    with _started(folder, (*ASYNC, f"{TRAIN}.save_interval=1", *overrides)) as wrap:
        while wrap.iteration < SAVES:
            _step(wrap)
            live.append(runs.state_digest(wrap))
    with runs.started(folder, overrides) as wrap:
        for iteration in range(1, SAVES + 1):
            wrap.load(folder / f"iter_{iteration:07d}")
            loaded.append(runs.state_digest(wrap))
    return live, loaded


@pytest.mark.parametrize("layout", quick(LAYOUTS, ["dp2-distributed-overlap-bf16"]))
def test_each_save_contains_the_state_of_its_own_step(layout, ranks, tmp_path):
    count, overrides = LAYOUTS[layout]
    for live, loaded in ranks(count).run(_saved_at_each_step, tmp_path, overrides):
        assert len(set(live)) == SAVES
        assert loaded == live
    assert CheckpointStore(tmp_path).latest() == SAVES
    assert not list(tmp_path.glob(".iter_*"))
    assert not list(tmp_path.glob("iter_*/rank_*"))


def _files(folder: Path, overrides: tuple[str, ...]) -> None:
    with _started(folder, overrides) as wrap:
        _step(wrap)
        wrap.save()


def test_the_files_are_those_of_a_plain_save(ranks, tmp_path):
    for name, overrides in (("plain", ()), ("asynchronous", ASYNC)):
        ranks(2).run(_files, tmp_path / name, overrides)
    plain, asynchronous = (
        {path.name: path.stat().st_size for path in (tmp_path / name / "iter_0000001").iterdir()}
        for name in ("plain", "asynchronous")
    )
    assert plain.keys() == asynchronous.keys()
    tensors = [name for name in plain if name.endswith(".distcp")]
    assert [plain[name] for name in tensors] == [asynchronous[name] for name in tensors]


def _writer(wrap: Any) -> int:
    return int(wrap._run.checkpoints._asynchronous.writer_process)


def _stopped_writer(folder: Path) -> dict[str, Any]:
    """A save whose writers are stopped while the run trains on, and a second save, which waits."""
    store = CheckpointStore(folder)
    facts: dict[str, Any] = {}
    with runs.started(folder, (*ASYNC, "megatron_wrap.checkpoint.keep=1")) as wrap:
        for _ in range(2):
            _step(wrap)
            path = wrap.save()
        wrap.load()  # waits
        facts["first"] = store.iterations()
        _step(wrap)
        os.kill(_writer(wrap), signal.SIGSTOP)
        facts["path"] = (wrap.save() == path.with_name("iter_0000003"), wrap.save() == path.with_name("iter_0000003"))
        for _ in range(2):
            _step(wrap)
        facts["while writing"] = store.iterations(), store.latest()
        wake = threading.Timer(1.0, os.kill, (_writer(wrap), signal.SIGCONT))
        began = time.monotonic()  # before the timer, which may fire while this process waits for a core
        wake.start()
        wrap.save()
        facts["waited"] = time.monotonic() - began > 0.5
        facts["after the wait"] = 3 in store.present() or 5 in store.present()
        wake.join()
    facts["end"] = store.iterations(), store.latest()
    return facts


def test_the_run_trains_on_while_a_save_is_written_and_a_second_one_waits(ranks, tmp_path):
    for facts in ranks(2).run(_stopped_writer, tmp_path):
        assert facts["first"] == [2]
        assert facts["path"] == (True, True)
        assert facts["while writing"] == ([2], 2)  # the only complete one is not removed
        assert facts["waited"]
        assert facts["after the wait"]
        assert facts["end"] == ([5], 5)


def _failed(folder: Path, failing_rank: int, kind: str, at_save: bool) -> tuple[str, int, list[int], list[int]]:
    """The error of a save whose writer fails on one rank, the iteration that raised it, and the checkpoints then and
    after another save."""
    store = CheckpointStore(folder)
    with _started(folder, (*ASYNC, *DISTRIBUTED)) as wrap:
        _step(wrap)
        wrap.save()
        wrap.load()
        _step(wrap)
        fails = wrap.dp_rank == failing_rank
        if fails and kind == "full disk":
            unlimited = resource.prlimit(_writer(wrap), resource.RLIMIT_FSIZE)
            resource.prlimit(_writer(wrap), resource.RLIMIT_FSIZE, (100_000, unlimited[1]))
        elif fails:
            os.kill(_writer(wrap), signal.SIGSTOP)
        wrap.save()
        if fails and kind == "killed":
            os.kill(_writer(wrap), signal.SIGKILL)
        time.sleep(0 if at_save else 2)  # a save waits for the failure; a step only notices it

        def further() -> None:
            for _ in range(3):
                if not at_save or wrap.iteration < 3:
                    _step(wrap)
                if at_save:
                    wrap.save()

        message = refusal_of(further)
        failed_at, left = wrap.iteration, store.iterations()
        if fails and kind == "full disk":
            resource.prlimit(_writer(wrap), resource.RLIMIT_FSIZE, unlimited)
        _step(wrap)
        wrap.save()
    return message, failed_at, left, store.iterations()


@pytest.mark.parametrize(
    ("failing_rank", "kind", "at_save"),
    [
        pytest.param(0, "full disk", False, marks=pytest.mark.matrix),
        (1, "full disk", True),
        pytest.param(1, "killed", False, marks=pytest.mark.matrix),
    ],
)
def test_a_writer_that_fails_is_one_error_on_all_ranks(failing_rank, kind, at_save, ranks, tmp_path):
    results = ranks(2).run(_failed, tmp_path, failing_rank, kind, at_save)
    assert len({str(result) for result in results}) == 1
    message, failed_at, left, after = results[0]
    assert "asynchronous save of iteration 2" in message
    assert str(tmp_path) in message
    assert ("File too large" if kind == "full disk" else "SIGKILL") in message
    assert failed_at <= 5
    assert left == [1]
    assert after == [1, failed_at + 1]
    assert not list(tmp_path.glob(".iter_*"))


def _tolerated(folder: Path, overrides: tuple[str, ...]) -> tuple[str, list[int]]:
    """The error of a run on whose second rank the saves 2, 4, 5 and 6 of 6 fail, and its checkpoints."""
    settings = (f"{TRAIN}.save_interval=1", "megatron_wrap.checkpoint.on_save_error=continue", *DISTRIBUTED)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def run() -> None:
        with _started(folder, (*settings, *overrides)) as wrap:
            checkpoints = wrap._run.checkpoints
            while wrap.iteration < runs.MOST_STEPS:
                if wrap.dp_rank == 1:
                    largest = unlimited[0] if wrap.iteration in (0, 2) else 100_000
                    writer = None if checkpoints._asynchronous is None else checkpoints._asynchronous.writer_process
                    for process in filter(None, (os.getpid(), writer)):
                        resource.prlimit(process, resource.RLIMIT_FSIZE, (largest, unlimited[1]))
                _step(wrap)
                checkpoints.tolerate(checkpoints.wait)  # so that the limit is of this save

    message = refusal_of(run)
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    return message, CheckpointStore(folder).iterations()


@pytest.mark.parametrize(
    "overrides", [pytest.param(()), pytest.param(ASYNC, marks=pytest.mark.matrix)], ids=["plain", "asynchronous"]
)
def test_with_continue_the_third_failed_save_in_a_row_ends_the_run(overrides, ranks, tmp_path):
    results = ranks(2).run(_tolerated, tmp_path, overrides)
    assert results[0] == results[1]
    message, left = results[0]
    assert "this is the last of 3 in a row" in message
    assert str(tmp_path) in message
    assert left == [1, 3]


def _ends(folder: Path, how: str) -> list[int]:
    """Checkpoints after a run that ended while its writers were stopped for half a second."""

    with contextlib.suppress(ArithmeticError, KeyboardInterrupt), _started(folder, ASYNC) as wrap:
        _step(wrap)
        wrap.save()
        os.kill(_writer(wrap), signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (_writer(wrap), signal.SIGCONT)).start()
        raise ArithmeticError if how == "error" else KeyboardInterrupt
    return CheckpointStore(folder).iterations()


@pytest.mark.parametrize(("count", "how"), [(1, "interrupt"), pytest.param(2, "error", marks=pytest.mark.matrix)])
def test_a_run_that_ends_early_waits(count, how, ranks, tmp_path):
    assert ranks(count).run(_ends, tmp_path, how) == [[1]] * count
