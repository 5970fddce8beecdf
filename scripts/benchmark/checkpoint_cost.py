"""What hashes cost a save and a load, and how long an asynchronous save holds training up; one process.

    python scripts/benchmark/checkpoint_cost.py --gib 1 --folder /dev/shm/cost [--rounds 5] [--platform cuda]

A Llama whose weights and optimizer have the given size. In each round, in changing order: a plain save without and with
SHA-256, an asynchronous save (the time until `wrap.save()` returns, and until it is published), and a load without and
with verification, once with the files in the system's cache and once from the disk (not from a tmpfs, which has no
other place). Printed are medians, and the medians of the rounds' ratios; the last line has all values as JSON.
"""

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from train_speed import random_tokens

from megatron_wrap.core import MegatronWrap, exit_on_user_error

CONFIG = Path(__file__).with_name("overhead.yaml")
VOCABULARY, SEQUENCE = 4096, 64
STATE_BYTES = {"fp32": 12, "bf16": 14}
"""Of a parameter: weight and two moments; with bf16 also the fp32 weight."""
TMPFS = "tmpfs"


def sizes(gib: float, dtype: str) -> list[str]:
    """Overrides for a model whose state has about that size."""
    hidden = 512 if gib < 0.5 else 1024 if gib < 4 else 2048
    per_layer = 4 * hidden**2 + 3 * hidden * 4 * hidden
    parameters = gib * 2**30 / STATE_BYTES[dtype] - 2 * VOCABULARY * hidden
    arch = "megatron_lm.model.arch"
    values = {"hidden_size": hidden, "ffn_hidden_size": 4 * hidden, "num_layers": max(1, round(parameters / per_layer))}
    values |= {"num_attention_heads": hidden // 64, "num_query_groups": hidden // 64}
    return [f"{arch}.{key}={value}" for key, value in values.items()]


@contextlib.contextmanager
def without_hashes() -> Iterator[None]:
    """Plain saves write no SHA-256 of tensor files."""
    from megatron_wrap.checkpoint import store, strategy
    from megatron_wrap.checkpoint.files.writing import write_files

    def write(*arguments: Any) -> Any:
        return write_files(*arguments, hashed=False)

    def hash_small(folder: Path, names: Any) -> Any:
        return hash_files(folder, [name for name in names if not name.endswith(".distcp")])

    hash_files = store.hash_files
    with mock.patch.object(strategy, "write_files", write), mock.patch.object(store, "hash_files", hash_small):
        yield


@contextlib.contextmanager
def without_verification() -> Iterator[None]:
    """Loads compare no tensor file with its SHA-256."""
    from megatron_wrap.checkpoint import save_load

    with mock.patch.object(save_load, "read_facts", return_value={}):
        yield


def uncached(folder: Path) -> None:
    """Remove the files of a checkpoint from the system's cache."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def file_system(folder: Path) -> str:
    """Kind of the file system that contains the folder."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    around = [(point, kind) for point, kind in mounts if folder.is_relative_to(point)]
    return max(around, key=lambda entry: len(entry[0]))[1]


class Measurement:
    """Times of the rounds.

    Args:
        wrap: the run.
        folder: of its checkpoints.
    """

    def __init__(self, wrap: Any, folder: Path) -> None:
        self._wrap, self._folder = wrap, folder
        self._batches = itertools.cycle([random_tokens(wrap.global_batch_size, SEQUENCE, VOCABULARY)])
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.newest = folder

    def timed(self, name: str, action: Callable[[], Any]) -> None:
        """Measure the action, until the device has finished."""
        self._wrap.platform.synchronize()
        started = time.perf_counter()
        action()
        self._wrap.platform.synchronize()
        self.seconds[name].append(time.perf_counter() - started)

    def save(self, name: str, context: Any = contextlib.nullcontext) -> None:
        """A plain save of another step."""
        self._wrap.train(next(self._batches))
        with context():
            self.timed(name, self._wrap.save)
        self._remove_older()

    def save_in_background(self, name: str) -> None:
        """The part of an asynchronous save that holds the training up, and all of it."""
        self._wrap.train(next(self._batches))
        started = time.perf_counter()
        self.timed(name, self._wrap.save)
        self._wrap._run.checkpoints.wait()
        self.seconds[f"{name}, until published"].append(time.perf_counter() - started)
        self._remove_older()

    def load(self, name: str, context: Any = contextlib.nullcontext, cached: bool = True) -> None:
        """A load of the newest checkpoint."""
        if cached:
            for path in self.newest.iterdir():
                path.read_bytes()
        else:
            uncached(self.newest)
        with context():
            self.timed(name, lambda: self._wrap.load(self.newest))

    def _remove_older(self) -> None:
        folders = sorted(self._folder.glob("iter_*"))
        self.newest = folders[-1]
        for folder in folders[:-1]:
            shutil.rmtree(folder)

    def ratio(self, name: str, base: str) -> float:
        """Median of the rounds' ratios."""
        pairs = zip(self.seconds[name], self.seconds[base], strict=True)
        return statistics.median(one / other for one, other in pairs)


PLAIN, HASHED, BACKGROUND = "plain save without SHA-256", "plain save", "asynchronous save"
LOADS = {"cached": True, "from disk": False}


def rounds(measurement: Measurement, checkpoints: "Switch", count: int, is_tmpfs: bool) -> None:
    """Measure; the first round warms up and is not counted."""
    loads = {name: cached for name, cached in LOADS.items() if cached or not is_tmpfs}
    for index in range(count + 1):
        turns: list[Callable[[], None]] = [
            lambda: measurement.save(PLAIN, without_hashes),
            lambda: measurement.save(HASHED),
        ]
        for turn in turns if index % 2 else turns[::-1]:
            turn()
        checkpoints.in_background(True)
        measurement.save_in_background(BACKGROUND)
        checkpoints.in_background(False)
        for name, cached in loads.items():
            both = [(f"load without verification, {name}", without_verification), (f"load, {name}", None)]
            for label, context in both if index % 2 else both[::-1]:
                measurement.load(label, context or contextlib.nullcontext, cached)
        if index == 0:
            measurement.seconds.clear()


class Switch:
    """Turns asynchronous saves of a run on and off."""

    def __init__(self, checkpoints: Any) -> None:
        self._checkpoints, self._background = checkpoints, None

    def in_background(self, on: bool) -> None:
        """Whether the next saves are asynchronous."""
        from megatron_wrap.checkpoint.background import BackgroundSaves

        if on and self._background is None:
            device = self._checkpoints._state.platform.device
            self._background = BackgroundSaves(device, self._checkpoints._save_succeeded)
        self._checkpoints._background = self._background if on else None


def print_table(measurement: Measurement, gib: float) -> None:
    """Medians and ratios."""
    for name, seconds in measurement.seconds.items():
        print(f"{name:<42} {statistics.median(seconds):8.3f} s  {gib / statistics.median(seconds):7.2f} GiB/s")
    print(f"{'hashing: plain save / without SHA-256':<42} {measurement.ratio(HASHED, PLAIN):8.3f}")
    print(f"{'hold-up: asynchronous / plain save':<42} {measurement.ratio(BACKGROUND, HASHED):8.3f}")
    for name in LOADS:
        if f"load, {name}" in measurement.seconds:
            ratio = measurement.ratio(f"load, {name}", f"load without verification, {name}")
            print(f"{'verification: load / without, ' + name:<42} {ratio:8.3f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.5, help="size of a checkpoint")
    parser.add_argument("--folder", type=Path, default=Path("outputs/checkpoint_cost"), help="a new folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--platform", default="cpu", choices=("cpu", "cuda"))
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True)
    dtype = "bf16" if arguments.platform == "cuda" else "fp32"
    common, wrap_keys = "megatron_lm.train.common", "megatron_wrap"
    overrides = [
        *sizes(arguments.gib, dtype),
        *(f"megatron_lm.train.dtype.__select__={dtype}", f"{common}.save={folder / 'checkpoints'}"),
        *(f"{common}.seq_length={SEQUENCE}", f"{common}.global_batch_size=1", f"{common}.micro_batch_size=1"),
        *(f"{wrap_keys}.init.platform={arguments.platform}", f"{wrap_keys}.logger.output_dir={folder / 'records'}"),
    ]
    try:
        with MegatronWrap(CONFIG, overrides=overrides) as wrap:
            wrap.initialize()
            wrap.setup_model_and_optimizer()
            measurement = Measurement(wrap, folder / "checkpoints")
            switch = Switch(wrap._run.checkpoints)
            is_tmpfs = file_system(folder) == TMPFS
            rounds(measurement, switch, arguments.rounds, is_tmpfs)
            size = sum(path.stat().st_size for path in measurement.newest.iterdir()) / 2**30
            switch.in_background(True)  # closed with the run
        kind = file_system(folder)
        print(f"{size:.2f} GiB in {folder} ({kind}), {len(os.sched_getaffinity(0))} processors, {arguments.platform}")
        print_table(measurement, size)
        print("RESULT " + json.dumps({"gib": size, "file_system": kind, "seconds": measurement.seconds}))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()


if __name__ == "__main__":
    with exit_on_user_error():
        main()
