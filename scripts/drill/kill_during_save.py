"""SIGKILL at random moments of a run and inside its saves: the next run continues from a saved state, bit for bit.

python scripts/drill/kill_during_save.py --count 300 [--jobs 4] [--results FILE] [--seed 0]

Each trial is a run of 1, 2 or 4 processes with plain or asynchronous saves, which is killed, and a second run in the
same folder until the end. Killed is one process, all, or one that writes asynchronous saves; a third of the kills come
at any moment from the start on, a third at an event of Python around which a save changes the disk, and a third some
milliseconds after the begin of a save. Processes that survive get SIGTERM, as from their launcher.

Exits with 1 unless each loss and each state that is resumed or reached at the end is that of a run without kills on the
same processes, the second run resumes from the last save that ended or a newer one, at most one interval before the
last for which `save` returned (an asynchronous one is written after that), and no hidden folder is left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "distributed"))
import _checkpoint_runs as runs
import _trials
import numpy

from megatron_wrap.checkpoint.files.run_folder import CheckpointStore
from megatron_wrap.testing.ranks import import_for_ranks

EVENTS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.fork", "os.listdir", "os.scandir")
"""Audit events of Python around which the disk changes; a process may be killed at each of them."""
STEPS, INTERVAL = 12, 3
LAYOUTS = {1: (), 2: runs.DISTRIBUTED, 4: (*runs.TP2, *runs.DISTRIBUTED)}
"""Number of processes -> overrides."""
SAVES = {"plain": (), "asynchronous": ("megatron_wrap.checkpoint.async_save=true",)}
MOMENTS = ("any moment", "event of a save", "time in a save")
LIMIT_SECONDS, SURVIVOR_SECONDS, TRIES = 120, 15, 5


@dataclass(frozen=True)
class Kill:
    """Moment at which a run is killed, and the processes that are killed."""

    moment: str
    victim: str
    """Processes that are killed: `all`, `one` or `writer`."""
    rank: int
    """Rank of the process that is killed with `one`."""
    step: int
    """Step after which (any moment), or number of the save after whose begin (time in a save), `seconds` starts."""
    seconds: float
    event: int
    """Number of the audit event within a save at which the process is killed."""


class Moments:
    """Counts audit events while armed, and kills at the chosen one."""

    def __init__(self, kill: Kill | None, rank: int) -> None:
        self.armed, self.seen, self._victim, self._process = False, 0, "one", os.getpid()
        self._fatal = kill.event if kill and kill.moment == MOMENTS[1] and rank == kill.rank else None
        if kill is not None:
            self._victim = kill.victim
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: object) -> None:
        if self.armed and event in EVENTS and os.getpid() == self._process:
            self.seen += 1
            if self.seen == self._fatal:
                if self._victim == "all":
                    os.killpg(0, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)


def samples() -> list[dict[str, list[int]]]:
    """Tokenized samples for all steps."""
    generator = numpy.random.default_rng(5)
    lengths = [int(length) for length in generator.integers(12, 33, STEPS * runs.BATCH)]
    return [{"input_ids": generator.integers(0, runs.VOCAB, n).tolist(), "loss_mask": [1] * n} for n in lengths]


def train(folder: Path, journal: Path, overrides: tuple[str, ...], asynchronous: bool, moments: Moments) -> None:
    """Train to the last step and save every `INTERVAL`, on one rank; the journal records what happened."""
    data = samples()
    with journal.open("a", buffering=1) as lines, runs.started(folder, overrides) as wrap:
        print("resumed", wrap.iteration, runs.state_digest(wrap), file=lines)
        while wrap.iteration < STEPS:
            start = wrap.iteration * runs.BATCH
            loss = wrap.train(data[start : start + runs.BATCH])["loss"]
            print("step", wrap.iteration, float(loss).hex(), file=lines)
            if wrap.iteration % INTERVAL == 0:
                print("saves", wrap.iteration, runs.state_digest(wrap), time.monotonic(), file=lines)
                moments.armed = True
                wrap.save()
                moments.armed = asynchronous
                print("saved", wrap.iteration, time.monotonic(), file=lines)
        iteration, digest = wrap.iteration, runs.state_digest(wrap)
        wrap.close()  # waits for the save
        moments.armed = False
        print("end", iteration, digest, moments.seen, file=lines)


def _rank(rank: int, ranks: int, listener: socket.socket, job: Callable[[Moments], None], kill: Kill | None) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    port, descriptor = listener.getsockname()[1], listener.detach()
    master = {"is_master": True, "master_listen_fd": descriptor} if rank == 0 else {}
    if rank != 0:
        os.close(descriptor)
    store = dist.TCPStore("127.0.0.1", port, ranks, wait_for_workers=False, **master)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    job(Moments(kill, rank))


class Life:
    """The processes of one run, in a process group of their own.

    Args:
        folder: folder with the checkpoints and the journals `NAME_RANK`.
        kill: the kill; None: the run is not killed.
    """

    def __init__(self, folder: Path, name: str, ranks: int, save: str, kill: Kill | None = None) -> None:
        self.journals = [folder / f"{name}_{rank}" for rank in range(ranks)]
        listener = socket.create_server(("127.0.0.1", 0))
        overrides = (*LAYOUTS[ranks], *runs.DROPOUT, *SAVES[save], f"{runs.TRAIN}.train_iters={STEPS}")
        self.group, self.alive, self.statuses = 0, [], {}
        for rank, journal in enumerate(self.journals):
            job = partial(train, folder / "checkpoints", journal, overrides, save == "asynchronous")
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    os.setpgid(0, self.group)
                    _rank(rank, ranks, listener, job, kill)
                    status = 0
                except BaseException as error:
                    print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
                finally:
                    os._exit(status)
            with contextlib.suppress(OSError):
                os.setpgid(child, self.group)
            self.group = self.group or child
            self.alive.append(child)
        self.ranks = tuple(self.alive)
        listener.close()

    def entries(self, kind: str, rank: int = 0) -> list[list[str]]:
        """The rest of each line of a journal that begins with the word."""
        with contextlib.suppress(OSError):
            lines = self.journals[rank].read_text().split("\n")[:-1]
            return [line.split()[1:] for line in lines if line.split()[0] == kind]
        return []

    def died(self) -> bool:
        """Whether a process has ended."""
        for process in list(self.alive):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                self.alive.remove(process)
                self.statuses[process] = status
        return len(self.alive) < len(self.ranks)

    def wait_until(self, condition: Callable[[], bool], seconds: float = LIMIT_SECONDS) -> bool:
        """Wait for the condition or the end of a process; returns whether the condition holds."""
        end = time.monotonic() + seconds
        while not condition():
            if self.died() or time.monotonic() > end:
                return False
            time.sleep(0.001)
        return True

    def end(self) -> bool:
        """Wait for the end, which comes soon if a process was killed; returns whether all processes ended well.

        Raises:
            TimeoutError: no process ended.
        """
        end = time.monotonic() + LIMIT_SECONDS
        is_stopping = False
        while self.alive and time.monotonic() < end:
            if self.died() and any(self.statuses.values()) and not is_stopping:
                is_stopping, end = True, time.monotonic() + SURVIVOR_SECONDS
                for process in self.alive:
                    os.kill(process, signal.SIGTERM)
            time.sleep(0.002)
        hangs = not is_stopping and bool(self.alive)
        for process in self.alive:
            os.kill(process, signal.SIGKILL)
            self.statuses[process] = os.waitpid(process, 0)[1]
        self.alive.clear()
        if hangs:
            raise TimeoutError(f"{self.journals[0].name} hangs")
        return not any(self.statuses.values())


@dataclass(frozen=True)
class Unbroken:
    """A run that was not killed."""

    losses: dict[str, str]
    """Step -> loss."""
    states: list[dict[str, str]]
    """Iteration -> digest of the state, for each rank."""
    events: list[int]
    """Number of events in saves, for each rank."""
    save_seconds: float
    step_seconds: float


def unbroken(folder: Path, ranks: int, save: str) -> Unbroken:
    """A run without kills, from the start to the end."""
    folder.mkdir()
    begin = time.monotonic()
    life = Life(folder, "life", ranks, save)
    if not life.end():
        raise RuntimeError(f"a run that was not killed failed: {ranks} processes, {save} saves")
    duration = time.monotonic() - begin
    both = zip(life.entries("saves"), life.entries("saved"), strict=True)
    times = [float(end[1]) - float(start[2]) for start, end in both]
    states = [
        {line[0]: line[1] for kind in ("resumed", "saves", "end") for line in life.entries(kind, rank)}
        for rank in range(ranks)
    ]
    return Unbroken(
        dict(life.entries("step")),
        states,
        [int(life.entries("end", rank)[0][2]) for rank in range(ranks)],
        max(times),
        duration / STEPS,
    )


def choose(generator: random.Random, moment: str, ranks: int, save: str, reference: Unbroken) -> Kill:
    """A random kill of that kind."""
    victims = ["all", "one"] + ["writer"] * (save == "asynchronous" and moment == MOMENTS[2])
    rank = generator.randrange(ranks)
    saves = moment == MOMENTS[2]
    longest = 2 * reference.save_seconds + (1.0 if save == "asynchronous" else 0.0) if saves else reference.step_seconds
    return Kill(
        moment,
        generator.choice(victims),
        rank,
        INTERVAL * generator.randint(1, STEPS // INTERVAL) if saves else generator.randrange(STEPS),
        generator.uniform(0, longest),
        generator.randint(1, reference.events[rank]),
    )


def strike(life: Life, kill: Kill) -> bool:
    """Wait for the moment and kill; returns False if the run ended before it."""
    if kill.moment != MOMENTS[1]:
        word = "saves" if kill.moment == MOMENTS[2] else "step"
        if kill.step and not life.wait_until(lambda: [str(kill.step)] in [line[:1] for line in life.entries(word)]):
            return False
        end = time.monotonic() + kill.seconds
        if not life.wait_until(lambda: time.monotonic() > end):
            return False
        with contextlib.suppress(ProcessLookupError):
            if kill.victim == "all":
                os.killpg(life.group, signal.SIGKILL)
            elif kill.victim == "one":
                os.kill(life.ranks[kill.rank], signal.SIGKILL)
            else:
                writers = _children(life.ranks[kill.rank])
                if not writers:
                    return False
                os.kill(writers[0], signal.SIGKILL)
    life.end()
    return kill.victim == "writer" or any(os.WIFSIGNALED(status) for status in life.statuses.values())


def _children(process: int) -> list[int]:
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{process}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []


def trial(name: str, seed: int, references: dict[tuple[int, str], Unbroken], folder: Path) -> Any:
    """Kill a run, resume it, and compare with the run without kills."""
    number, generator = int(name.split()[1]), random.Random(f"{seed} {name}")
    ranks, save = list(LAYOUTS)[number % len(LAYOUTS)], list(SAVES)[number // len(LAYOUTS) % len(SAVES)]
    moment = MOMENTS[number // (len(LAYOUTS) * len(SAVES)) % len(MOMENTS)]
    reference = references[ranks, save]
    for _ in range(TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        kill = choose(generator, moment, ranks, save, reference)
        first = Life(folder, "first", ranks, save, kill)
        if strike(first, kill):
            break
        first.end()
    else:
        return {"kind": f"{ranks} {save}", "outcome": _trials.WRONG, "detail": f"no kill in {TRIES} runs: {kill}"}
    store = CheckpointStore(folder / "checkpoints")
    begun = [int(line[0]) for line in first.entries("saves")]
    done = [int(line[0]) for line in first.entries("saved")] if save == "plain" else [store.latest() or 0]
    last_begun, last_done = max(begun, default=0), max(done, default=0)
    returned = max([int(line[0]) for line in first.entries("saved")], default=0)  # an asynchronous save: copied
    second = Life(folder, "second", ranks, save)
    wrong = [] if second.end() else ["the second run failed"]
    wrong += differences([first, second], reference)
    resumed = int(next(iter(second.entries("resumed")), ["-1"])[0])
    if resumed < max(last_done, returned - INTERVAL):
        wrong.append(f"resumed from {resumed}, last saves: {returned} returned, {last_done} ended")
    wrong += [f"{path.name} was left" for path in store.folder.iterdir() if path.name.startswith(".iter_")]
    lost = max((int(line[0]) for line in first.entries("step")), default=0) - resumed
    inside = last_begun > last_done
    detail = f"{'; '.join(wrong)} after {kill}" if wrong else f"{moment}, {kill.victim}, step {resumed + lost}"
    outcome = _trials.WRONG if wrong else "in a save" if inside else "between"
    return {"kind": f"{ranks} {save}", "outcome": outcome, "detail": detail, "lost_steps": lost}


def differences(lives: list[Life], reference: Unbroken) -> list[str]:
    """Differences between a run and the run without kills."""
    wrong = []
    for rank, states in enumerate(reference.states):
        for life in lives:
            for step, loss in life.entries("step", rank):
                if loss != reference.losses[step]:
                    wrong.append(f"{life.journals[rank].name}: step {step} has loss {loss}")
            for kind in ("resumed", "saves", "end"):
                for line in life.entries(kind, rank):
                    if line[1] != states.get(line[0]):
                        wrong.append(f"{life.journals[rank].name}: {kind} {line[0]} with another state")
        if not lives[-1].entries("end", rank):
            wrong.append(f"{lives[-1].journals[rank].name} has no end")
    return wrong


@contextlib.contextmanager
def worker(references: dict[tuple[int, str], Unbroken], seed: int, folder: Path) -> Iterator[Callable[[str], Any]]:
    """Performs trials in the folder."""
    yield lambda name: trial(name, seed, references, folder / "run")


def drill(arguments: argparse.Namespace, scratch: Path) -> int:
    """Perform the trials; returns the exit status."""
    import_for_ranks()
    references = {
        (ranks, save): unbroken(scratch / f"{save}{ranks}", ranks, save) for ranks in LAYOUTS for save in SAVES
    }
    names = [f"kill {index}" for index in range(arguments.count)]
    results = _trials.run(arguments, names, partial(worker, references, arguments.seed), scratch)
    status = _trials.report(results, ("in a save", "between"))
    lost = [result["lost_steps"] for result in results if "lost_steps" in result]
    print(f"steps taken again: {sum(lost) / max(len(lost), 1):.1f} on average, at most {max(lost, default=0)}")
    return status


def main() -> int:
    """Run the drill; returns 0 if each killed run continued as if it had not been killed."""
    return _trials.in_scratch(partial(drill, _trials.parser(__doc__ or "", 30, "runs to kill").parse_args()))


if __name__ == "__main__":
    sys.exit(main())
