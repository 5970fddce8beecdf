"""A save meets a full tmpfs, a read-only folder, a slow disk, or an object store that drops connections.

python scripts/drill/faulty_storage.py --count 40 [--jobs 2] [--results FILE] [--seed 0]

Each trial is a run in a process of its own: a save, then the fault, then a second save, plain or asynchronous, then the
end of the fault and a third. Disks are tmpfs of mount namespaces of the trials (`unshare --map-root-user --mount`), the
object store is moto's server behind a proxy.

Exits with 1 unless each trial ends within `LIMIT_SECONDS`; the second save is one CheckpointError (that to a slow disk
succeeds, and one to an object store is uploaded later); the first checkpoint is unchanged and stays the newest; no
hidden folder is left; and after the fault a save succeeds, and loads bit for bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "distributed"))
import _checkpoint_runs as runs
import _trials

from megatron_wrap.checkpoint import save as saving
from megatron_wrap.checkpoint.files import hashed_files
from megatron_wrap.checkpoint.files.downloads import RemoteStore
from megatron_wrap.checkpoint.files.run_folder import CheckpointStore
from megatron_wrap.errors import CheckpointError

FULL, READ_ONLY, SLOW, DROPPED = "full tmpfs", "read-only folder", "slow disk", "dropped connections"
FAULTS = (FULL, READ_ONLY, SLOW, DROPPED)
SAVES = {"plain": (), "asynchronous": ("megatron_wrap.checkpoint.async_save=true",)}
LIMIT_SECONDS, DISK_BYTES, OK = 300, 256 * 2**20, "as required"


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


@contextlib.contextmanager
def full(wrap: Any, disk: Path, generator: random.Random) -> Iterator[None]:
    """Fault in which the disk has less room than a checkpoint; in half of the trials the run cannot know that
    beforehand."""
    needed = sum(path.stat().st_size for path in (disk / "run/iter_0000001").iterdir())
    room, ballast = int(generator.uniform(0, 0.95) * needed), disk / "ballast"
    with ballast.open("wb") as file:
        left = shutil.disk_usage(disk).free - room
        for _ in range(left >> 20):
            file.write(bytes(1 << 20))
        file.write(bytes(left % (1 << 20)))
    is_unknown = generator.random() < 0.5
    with mock.patch.object(saving, "free_bytes", return_value=None) if is_unknown else contextlib.nullcontext():
        yield
    ballast.unlink()


@contextlib.contextmanager
def read_only(wrap: Any, disk: Path, generator: random.Random) -> Iterator[None]:
    """Fault in which nothing can be written to the disk, except to files that are open, such as the run's lock."""
    _mount("--bind", str(disk), str(disk))
    _mount("-o", "remount,bind,ro", str(disk))
    yield
    subprocess.run(["umount", str(disk)], check=True)


@contextlib.contextmanager
def slow(wrap: Any, disk: Path, generator: random.Random) -> Iterator[None]:
    """Fault in which the writes of a plain save and the flush at their end take long; the process that writes
    asynchronous saves is stopped for nine tenths of the time."""
    file_class = hashed_files._HashedFile
    seconds, write, finish = generator.uniform(0.05, 0.3), file_class.write, file_class.finish

    def slow_write(file: Any, data: bytes) -> int:
        time.sleep(seconds * len(data) / 2**20)
        return write(file, data)

    def slow_finish(file: Any) -> dict[str, Any]:
        time.sleep(10 * seconds)
        return finish(file)

    ends = threading.Event()
    with mock.patch.multiple(file_class, write=slow_write, finish=slow_finish):
        thread = threading.Thread(target=_hinder, args=(wrap._run.checkpoints._asynchronous, ends))
        thread.start()
        yield
        ends.set()
        thread.join()


def _hinder(background: Any, ends: threading.Event) -> None:
    """Stop the process that writes, repeatedly."""
    while background is not None and not ends.wait(0.01):
        process = background.writer_process
        if process is not None:
            os.kill(process, signal.SIGSTOP)
            time.sleep(0.09)
            os.kill(process, signal.SIGCONT)


def digests(checkpoint: Path) -> dict[str, str]:
    """Hash of each file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(checkpoint.iterdir())}


def step_and_save(wrap: Any) -> str:
    """Train a step and save; returns the message of a CheckpointError, if any."""
    at = wrap.iteration * runs.BATCH
    wrap.train(runs.samples()[at : at + runs.BATCH])
    try:
        wrap.save()
        wrap._run.checkpoints.wait()
    except CheckpointError as error:
        return str(error)
    return ""


def local_trial(fault: str, save: str, generator: random.Random, folder: Path) -> list[str]:
    """Perform a trial on a disk of its own; returns its mistakes."""
    disk = folder / "disk"
    disk.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(disk))
    store, wrong = CheckpointStore(disk / "run"), []
    (disk / "run").mkdir()
    records = f"megatron_wrap.logger.output_dir={folder}/records"
    with runs.started(disk / "run", (*SAVES[save], records)) as wrap:
        wrong += [f"the first save failed: {error}" for error in [step_and_save(wrap)] if error]
        before = digests(store.folder_of(1))
        with {FULL: full, READ_ONLY: read_only, SLOW: slow}[fault](wrap, disk, generator):
            error = step_and_save(wrap)
            newest = 2 if fault == SLOW else 1
            if (not error) != (fault == SLOW):
                wrong.append(f"the save under the fault: {error or 'no error'}")
            if store.latest() != newest:
                wrong.append(f"the newest checkpoint is {store.latest()}")
            if digests(store.folder_of(1)) != before:
                wrong.append("the first checkpoint has changed")
        wrong += [f"the save after the fault failed: {error}" for error in [step_and_save(wrap)] if error]
        wrong += [f"{path.name} was left" for path in store.folder.iterdir() if path.name.startswith(".iter_")]
        digest = runs.state_digest(wrap)
    with runs.started(disk / "run", (records,)) as wrap:
        if (wrap.iteration, runs.state_digest(wrap)) != (3, digest):
            wrong.append(f"resumed from {wrap.iteration} with another state")
    return wrong


def store_trial(save: str, generator: random.Random, folder: Path) -> list[str]:
    """Perform a trial with an object store; returns its mistakes."""
    from _object_store import object_store

    url, wrong = "s3://runs/drill", []
    nowait = "megatron_wrap.checkpoint.upload_wait_minutes=0.02"
    remote = (f"{runs.TRAIN}.save={url}", "megatron_wrap.checkpoint.keep=2", *SAVES[save])
    with object_store() as server:
        with runs.started(folder / "here", remote) as wrap:
            wrong += [f"the first save failed: {error}" for error in [step_and_save(wrap)] if error]
        server.drop_after = generator.randrange(500, 100_000)
        with runs.started(folder / "here", (*remote, nowait)) as wrap:
            error = step_and_save(wrap)
        if error or RemoteStore(url).newest_first() != [1]:
            wrong.append(f"under the fault: {error or RemoteStore(url).newest_first()}")
        if not server.dropped:
            wrong.append("no connection was dropped")
        server.drop_after = None
        with runs.started(folder / "here", remote) as wrap:
            wrong += [f"the save after the fault failed: {error}" for error in [step_and_save(wrap)] if error]
            digest = runs.state_digest(wrap)
        with runs.started(folder / "there", (f"{runs.TRAIN}.load={url}",)) as wrap:
            if (wrap.iteration, runs.state_digest(wrap)) != (3, digest):
                wrong.append(f"loaded {wrap.iteration} with another state")
    return wrong


def trial(name: str, seed: int, folder: Path) -> _trials.Result:
    """Run a trial in a process and mount namespace of its own."""
    number = int(name.split()[1])
    fault, save = FAULTS[number % len(FAULTS)], list(SAVES)[number // len(FAULTS) % len(SAVES)]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    namespace = [] if fault == DROPPED else ["unshare", "--map-root-user", "--mount"]
    command = [*namespace, sys.executable, __file__, "--trial", fault, save, f"{seed} {name}", str(folder)]
    begin = time.monotonic()
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
        last = (ended.stdout.splitlines() or [""])[-1]
        wrong = json.loads(last) if ended.returncode == 0 else [f"exit code {ended.returncode}: {ended.stderr[-800:]}"]
    except subprocess.TimeoutExpired:
        wrong = [f"not ended after {LIMIT_SECONDS} s"]
    outcome = _trials.WRONG if wrong else OK
    seconds = round(time.monotonic() - begin, 1)
    return {"kind": f"{fault}, {save}", "outcome": outcome, "detail": "; ".join(wrong), "ended_after": seconds}


@contextlib.contextmanager
def worker(folder: Path, seed: int) -> Iterator[Callable[[str], _trials.Result]]:
    """Performs trials in the folder."""
    yield lambda name: trial(name, seed, folder / "run")


def run_trial(fault: str, save: str, seed: str, folder: str) -> None:
    """Print the mistakes of a trial, as JSON."""
    generator = random.Random(seed)
    if fault == DROPPED:
        print(json.dumps(store_trial(save, generator, Path(folder))))
    else:
        print(json.dumps(local_trial(fault, save, generator, Path(folder))))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trial"]:
        run_trial(*sys.argv[2:])
    else:
        sys.exit(_trials.main(__doc__ or "", "runs, each with one fault", worker, [OK], count=40))
