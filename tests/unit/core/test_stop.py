"""Runs that are stopped on request: what is saved, the exit code, and that the same command continues exactly.

Each test runs in a forked process with a group of its own.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from _runs import started

from megatron_wrap.core import MegatronWrap, run_folders
from megatron_wrap.errors import CheckpointError
from megatron_wrap.parallel.watch import stop_requests
from megatron_wrap.parallel.watch.stop_requests import RunStopped
from megatron_wrap.utils.file_lock import FolderInUse, held

pytestmark = pytest.mark.process_group

TRAIN = "megatron_lm.train.common"
SAVE = f"{TRAIN}.save=checkpoints"
WORKER = "megatron_wrap.data.num_workers=1"
STOP_FILE = Path("outputs/run/STOP")


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """A shell's background jobs ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def samples() -> list[dict[str, list[int]]]:
    return [{"input_ids": [index, 7, 9, 11, index + 1], "loss_mask": [0, 1, 1, 1, 1]} for index in range(24)]


def train(*overrides: str, after_step: Callable[[MegatronWrap], None] = lambda wrap: None) -> list[float]:
    """The losses of a run, as far as it goes; raises RunStopped with them as an attribute."""
    losses: list[float] = []
    try:
        with started(*overrides) as wrap:
            for batch in wrap.batches(samples()):
                losses.append(wrap.train(batch)["loss"])
                after_step(wrap)
    except RunStopped as stopped:
        stopped.losses = losses  # type: ignore[attr-defined]
        raise
    return losses


@pytest.fixture(scope="module")
def unbroken_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("unbroken") / "losses.json"


def unbroken(file: Path) -> list[float]:
    """The losses of a run that nothing stops, which the first process that asks for them trains."""
    if not file.exists():
        file.write_text(json.dumps(train(f"{TRAIN}.save=others")))
    losses: list[float] = json.loads(file.read_text())
    return losses


def at_iteration(iteration: int, action: Callable[[], object]) -> Callable[[MegatronWrap], None]:
    def after_step(wrap: MegatronWrap) -> None:
        if wrap.iteration == iteration:
            time.sleep(0.6)  # files are looked for twice a second
            action()

    return after_step


def tracker() -> str:
    return Path("checkpoints/latest_checkpointed_iteration.txt").read_text().strip()


@pytest.mark.parametrize(
    ("request_stop", "exit_code", "words"),
    [
        (STOP_FILE.touch, 0, "stopped by the file outputs/run/STOP"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), 75, "stopped by SIGTERM"),
        (lambda: os.kill(os.getpid(), signal.SIGUSR1), 75, "stopped by SIGUSR1"),
        (lambda: os.kill(os.getpid(), signal.SIGINT), 130, "interrupted"),
    ],
)
def test_a_request_saves_after_the_step_and_the_run_continues_exactly(
    request_stop, exit_code, words, unbroken_file, capfd
):
    losses = unbroken(unbroken_file)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    with pytest.raises(RunStopped) as end:
        train(SAVE, WORKER, after_step=at_iteration(2, request_stop))
    assert end.value.code == exit_code
    assert tracker() == "3"
    assert not STOP_FILE.exists()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == handlers
    printed = capfd.readouterr().err
    assert (
        f"{words} after iteration 3 of 6; newest checkpoint: checkpoints/iter_0000003; the same command resumes "
        "from it\n" in printed
    )
    assert end.value.losses + train(SAVE)[-3:] == losses[:2] + losses[3:]  # train() of step 3 did not return


def test_a_second_interrupt_ends_the_step(capfd):
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the same key press, sent on by the program that started this one
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="interrupted after iteration 2 of 6; there is no checkpoint yet"):
        train(SAVE, WORKER, after_step=at_iteration(2, twice))
    assert "Ctrl-C: the run saves after this step and ends; a second Ctrl-C ends it at once" in capfd.readouterr().err


def test_without_a_folder_to_save_into_an_interrupt_ends_at_once():
    with pytest.raises(KeyboardInterrupt, match="nothing was saved"):
        train(after_step=at_iteration(2, lambda: os.kill(os.getpid(), signal.SIGINT)))


def test_a_run_ends_with_its_time_and_before_the_end_of_a_slurm_job(monkeypatch):
    clock = SimpleNamespace(now=1000.0, time=time.time)  # a first step on a busy machine may take longer than a second
    clock.monotonic = lambda: clock.now

    def after_step(wrap: MegatronWrap) -> None:
        clock.now += 60

    with monkeypatch.context() as patch:
        patch.setattr(stop_requests, "time", clock)
        with pytest.raises(RunStopped) as end:
            train(SAVE, f"{TRAIN}.stop_after_minutes=1", after_step=after_step)
    assert (end.value.code, tracker()) == (0, "2")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 200))
    assert len(train(SAVE, f"{TRAIN}.stop_before_slurm_end_minutes=1")) == 4
    with pytest.raises(RunStopped) as end:
        train(f"{TRAIN}.save=others")
    assert (end.value.code, Path("others/latest_checkpointed_iteration.txt").read_text().strip()) == (75, "1")


def test_a_stop_file_of_an_earlier_run_is_removed():
    STOP_FILE.parent.mkdir(parents=True)
    STOP_FILE.touch()
    assert len(train()) == 6


def test_folders_of_another_run_are_refused():
    read, write = os.pipe()
    with started(SAVE):
        other = os.fork()
        if other == 0:
            try:
                with held(Path("checkpoints")):
                    os.write(write, b"not refused")
            except FolderInUse as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(other, 0)
        message = os.read(read, 1000).decode()
        assert message.startswith(f"checkpoints is in use by another run, process {os.getpid()} on ")
    with started(SAVE):  # it is free again
        pass


def test_the_message_names_the_key(monkeypatch):
    def refuse(folder: Path) -> None:
        raise FolderInUse(f"{folder} is in use by another run, process 7 on here since today")

    monkeypatch.setattr(run_folders, "held", refuse)
    with (
        pytest.raises(CheckpointError, match=r"outputs/run is in use .* or set another megatron_wrap\.logger\.output"),
        started(),
    ):
        pass


def test_a_run_that_fails_again_and_again_without_a_checkpoint_is_refused():
    limit = "megatron_wrap.checkpoint.max_starts_without_progress=2"

    def fail(after: int) -> None:
        with started(SAVE, limit, f"{TRAIN}.save_interval=2") as wrap:
            for batch in wrap.batches(samples()):
                wrap.train(batch)
                if wrap.iteration == after:
                    raise ValueError("a kernel failed")

    for after in (1, 3, 3):  # the first saves nothing
        with pytest.raises(ValueError, match="a kernel failed"):
            fail(after)
    with pytest.raises(KeyboardInterrupt), started(SAVE, limit):  # the user looks at it: this counts for nothing
        raise KeyboardInterrupt
    for _ in range(2):
        with pytest.raises(ValueError, match="a kernel failed"):
            fail(3)
    with pytest.raises(
        CheckpointError, match=r"has started 2 times from iteration 2, .* delete checkpoints/\.starts\.json, or"
    ):
        fail(3)
    Path("checkpoints/.starts.json").unlink()
    assert len(train(SAVE)) == 4
