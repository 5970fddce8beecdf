"""What hashes cost a save and a load, and how long an asynchronous save holds training up; one process.

    python scripts/benchmark/checkpoint_cost.py --gib 1 --folder /dev/shm/cost [--folder outputs/cost] [--rounds 5]
        [--seconds 170] [--platform cuda] [--config scripts/benchmark/llama-1b.yaml] [KEY=VALUE ...]
    python scripts/benchmark/checkpoint_cost.py --gib 4 --folder /dev/shm/cost --pairs 6 --seconds 90
        [--platform cuda] [--hash-threads 8x2 8x2+unhashed 8x2+pageable 8x2+held8 12x2]

The state is that of a Llama whose weights and optimizer have the given size, or that of a configuration. In each round
and folder, in changing order: a plain save as torch writes it (CRC-32, no SHA-256) and one with SHA-256, an
asynchronous save (the time until it returns, and until it is published), and a load as torch reads it, one tensor after
the other, one without verification, whose tensors are read ahead by threads, and one with it; with the files in the
system cache and from the disk (not from a tmpfs, which has none). Each time is printed at once, with the processor
seconds of this process; at the end medians, and the medians of the rounds' ratios. The last line has all values as
JSON. With `--pairs` only loads without verification and with it are measured, in turn, and what their threads do is
printed as well. `--hash-threads` compares ways to verify: 8x16+pageable are eight threads that read and hash 16 MiB at
once into memory that is not page-locked, 8+held8 has eight blocks in memory besides those of the threads, 8+unhashed
reads in the same way and computes no SHA-256. With `--seconds`, counted from the start of the program, no measurement
begins that would end later.
"""

import argparse
import contextlib
import functools
import json
import os
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from load_timeline import Timeline, print_timelines
from train_speed import random_tokens

from megatron_wrap.checkpoint.files.hashes import BLOCK_BYTES
from megatron_wrap.checkpoint.files.verification import HASH_BYTES, HASHERS
from megatron_wrap.core import MegatronWrap, exit_on_user_error

CONFIG = Path(__file__).with_name("overhead.yaml")
VOCABULARY, SEQUENCE = 4096, 64
STATE_BYTES = {"fp32": 12, "bf16": 14}
"""Of a parameter: weight and two moments; with bf16 also the fp32 weight."""
TMPFS = "tmpfs"
UNHASHED = "unhashed"
BARE, PLAIN, BACKGROUND = "save as torch's", "save", "asynchronous save"
LOAD, UNVERIFIED, TORCH = "load", "load without verification", "load as torch's"
LOADS = {"cached": True, "from disk": False}


def sizes(gib: float, dtype: str) -> list[str]:
    """Overrides for a model whose state has about that size."""
    hidden = 512 if gib < 0.5 else 1024 if gib < 4 else 2048
    per_layer = 4 * hidden**2 + 3 * hidden * 4 * hidden
    parameters = gib * 2**30 / STATE_BYTES[dtype] - 2 * VOCABULARY * hidden
    arch = "megatron_lm.model.arch"
    values = {"hidden_size": hidden, "ffn_hidden_size": 4 * hidden, "num_layers": max(1, round(parameters / per_layer))}
    values |= {"num_attention_heads": hidden // 64, "num_query_groups": hidden // 64}
    return [f"megatron_lm.train.dtype.__select__={dtype}", *(f"{arch}.{key}={value}" for key, value in values.items())]


@contextlib.contextmanager
def without_hashes() -> Iterator[None]:
    """Plain saves write no SHA-256 of tensor files."""
    from megatron_wrap.checkpoint import strategy
    from megatron_wrap.checkpoint.files import publish_and_prune
    from megatron_wrap.checkpoint.files.write_tensor_files import write_files

    def write(*arguments: Any) -> Any:
        return write_files(*arguments, hashed=False)

    def hash_small(folder: Path, names: Any) -> Any:
        return hash_files(folder, [name for name in names if not name.endswith(".distcp")])

    hash_files = publish_and_prune.hash_files
    with (
        mock.patch.object(strategy, "write_files", write),
        mock.patch.object(publish_and_prune, "hash_files", hash_small),
    ):
        yield


@contextlib.contextmanager
def without_verification() -> Iterator[None]:
    """Loads compare no tensor file with its SHA-256."""
    from megatron_wrap.checkpoint import save_load

    with mock.patch.object(save_load, "read_facts", return_value={}):
        yield


@contextlib.contextmanager
def hashing_by(way: str) -> Iterator[None]:
    """Loads hash in a way of `--hash-threads`."""
    from megatron_wrap.checkpoint.files import block_memory, verification

    threads, *options = way.split("+")
    number, _, mebibytes = threads.partition("x")
    values = {"HASHERS": int(number), "HASH_BYTES": int(mebibytes) * 2**20 if mebibytes else HASH_BYTES}
    with contextlib.ExitStack() as stack:
        for option in options:
            if option.startswith("held"):
                values["HELD_BESIDE"] = int(option.removeprefix("held"))
            elif option == "pageable":
                stack.enter_context(mock.patch.object(block_memory.BlockMemory, "_lock"))
            elif option == UNHASHED:
                stack.enter_context(mock.patch.object(verification.BlockVerification, "_compare", _wait_alone))
                stack.enter_context(mock.patch.object(verification, "read_block", _read_unhashed))
            else:
                raise SystemExit(f"{way} has an unknown option {option}")
        stack.enter_context(mock.patch.multiple(verification, **values))
        yield


def _wait_alone(_: Any, block: Any, read: Any) -> None:
    """As BlockVerification compares, without the comparison."""
    read.result()


def _read_unhashed(path: Path, index: int, memory: memoryview, piece_bytes: int) -> tuple[str, int]:
    """As `read_block`, without SHA-256."""
    size = 0
    with path.open("rb", buffering=0) as stream:
        stream.seek(index * BLOCK_BYTES)
        while count := stream.readinto(memory[size : size - size % piece_bytes + piece_bytes]):
            size += count
    return "", size


@contextlib.contextmanager
def as_torch_reads() -> Iterator[None]:
    """Loads read one tensor after the other with torch's reader, and compare nothing."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    from megatron_wrap.platform.megatron_core.checkpoint_reader import RestrictedReader

    with without_verification(), mock.patch.object(RestrictedReader, "read_data", FileSystemReader.read_data):
        yield


CONTEXTS: dict[str, Callable[[], Any]] = {
    TORCH: as_torch_reads,
    UNVERIFIED: without_verification,
    LOAD: contextlib.nullcontext,
}
"""Of each way to load."""


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


def ratios_text(ratios: list[float]) -> str:
    """Median, extremes and number."""
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}, of {len(ratios)})"


class TimeIsOver(Exception):
    """The next measurement would end after the limit."""


class Measurement:
    """Saves and loads of a run in one folder, and their times.

    Args:
        wrap: the run, after a step.
        background: writes asynchronous saves.
        end: time.perf_counter() of the limit.
    """

    def __init__(self, wrap: Any, background: Any, folder: Path, end: float) -> None:
        self._wrap, self._background, self._folder, self._end = wrap, background, folder, end
        self._newest = folder
        self.timelines: dict[str, list[Timeline]] = defaultdict(list)
        """Of the loads of pairs."""
        self.is_tmpfs = file_system(folder) == TMPFS
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.gib = 0.0
        """Size of a checkpoint."""

    def save(self, name: str, context: Callable[[], Any] = contextlib.nullcontext) -> None:
        """A plain save; the earlier checkpoint is removed before."""
        from megatron_wrap.checkpoint.save_load import save_checkpoint

        self._remove()
        with context():
            self._timed(name, lambda: save_checkpoint(self._wrap.state, self._folder))
        self._keep()

    def save_in_background(self) -> None:
        """An asynchronous save: the time that it holds the training up, and all of it."""
        from megatron_wrap.checkpoint.save_load import save_checkpoint

        is_first = not self._background.copy.num_bytes  # its buffer is allocated and, on CUDA, page-locked
        name = f"{BACKGROUND}{', with the allocation of its buffer' * is_first}"
        self._remove()
        started = time.perf_counter()
        self._timed(name, lambda: save_checkpoint(self._wrap.state, self._folder, background=self._background))
        self._background.wait()
        self._record(f"{name}, until published", time.perf_counter() - started, None)
        self._keep()

    def load(self, kind: str, way: str, context: Callable[[], Any] | None = None) -> None:
        """A load of the newest checkpoint."""
        from megatron_wrap.checkpoint.save_load import load_checkpoint

        if not LOADS[kind]:
            uncached(self._newest)
        with (context or CONTEXTS[way])():
            self._timed(f"{way}, {kind}", lambda: load_checkpoint(self._wrap.state, self._newest))

    def pairs(self, kind: str, threads: list[str], count: int) -> None:
        """Loads without verification and with it, by each number of threads that hash, in turn and with timelines; the
        order changes. The first of each, which sets up more, is counted apart."""
        ways: dict[str, Callable[[], Any]] = {UNVERIFIED: without_verification}
        for number in threads:
            ways[f"{LOAD}, {number}"] = functools.partial(hashing_by, number)
        for number in range(count + 1):
            for way in list(ways)[:: 1 if number % 2 else -1]:
                timeline = Timeline()
                with ways[way](), timeline.recording():
                    self.load(kind, way, contextlib.nullcontext)
                if number:
                    self.timelines[f"{way}, {kind}"].append(timeline)
                else:
                    self.seconds[f"first {way}, {kind}"] = self.seconds.pop(f"{way}, {kind}")

    def ratios(self) -> dict[str, list[float]]:
        """Ratios of each round."""
        pairs = {"hashing: save / torch's": (PLAIN, BARE), "hold-up: asynchronous / plain save": (BACKGROUND, PLAIN)}
        for kind in LOADS:
            for name in self.seconds:
                if name.startswith(f"{LOAD}, ") and name.endswith(f", {kind}"):
                    pairs[f"verification, {kind}: {name.removesuffix(f', {kind}')} / without"] = (
                        name,
                        f"{UNVERIFIED}, {kind}",
                    )
            pairs[f"verification, {kind}: load / torch's"] = (f"{LOAD}, {kind}", f"{TORCH}, {kind}")
        every = {
            label: (self.seconds.get(numerator, []), self.seconds.get(denominator, []))
            for label, (numerator, denominator) in pairs.items()
        }
        return {
            label: [numerator / denominator for numerator, denominator in zip(numerators, denominators, strict=False)]
            for label, (numerators, denominators) in every.items()
            if numerators and denominators
        }

    def _timed(self, name: str, action: Callable[[], Any]) -> None:
        """Measure the action, until the device has finished."""
        if time.perf_counter() + max(self.seconds.get(name, [0.0])) > self._end:
            raise TimeIsOver
        self._wrap.platform.synchronize()
        started, processor = time.perf_counter(), time.process_time()
        action()
        self._wrap.platform.synchronize()
        self._record(name, time.perf_counter() - started, time.process_time() - processor)

    def _record(self, name: str, seconds: float, processor_seconds: float | None) -> None:
        self.seconds[name].append(seconds)
        processor = "" if processor_seconds is None else f", {processor_seconds:.2f} s of processors"
        print(f"{self._folder}: {name}: {seconds:.3f} s{processor}", flush=True)

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _keep(self) -> None:
        [self._newest] = self._folder.glob("iter_*")
        self.gib = sum(path.stat().st_size for path in self._newest.iterdir()) / 2**30


def one_round(measurement: Measurement, is_odd: bool) -> None:
    """One of each; the order changes from round to round."""
    turns: list[Callable[[], None]] = [
        lambda: measurement.save(BARE, without_hashes),
        lambda: measurement.save(PLAIN),
    ]
    for turn in turns if is_odd else turns[::-1]:
        turn()
    measurement.save_in_background()
    for kind, cached in LOADS.items():
        if cached or not measurement.is_tmpfs:
            for way in CONTEXTS if is_odd else reversed(CONTEXTS):
                measurement.load(kind, way)


def print_table(measurement: Measurement) -> None:
    """Medians and ratios."""
    for name, seconds in measurement.seconds.items():
        middle = statistics.median(seconds)
        print(f"{name:<66} {middle:8.3f} s  {measurement.gib / middle:7.2f} GiB/s  (of {len(seconds)})")
    for label, ratios in measurement.ratios().items():
        print(f"{label:<66} {ratios_text(ratios)}")
    for name, timelines in measurement.timelines.items():
        print(f"\n{name}")
        print_timelines(timelines)


def measure(
    wrap: Any, folders: list[Path], end: float, rounds: int, pairs: int, threads: list[str]
) -> list[Measurement]:
    """All rounds, or `pairs` of loads, or those that the limit allows. What a first save sets up is not counted."""
    from megatron_wrap.checkpoint.background import BackgroundSaves

    background = BackgroundSaves(wrap.platform.device, lambda: None)
    measurements = [Measurement(wrap, background, folder, end) for folder in folders]
    try:
        for measurement in measurements:
            measurement.save(f"first {PLAIN}")
            for kind, cached in LOADS.items():
                if pairs and (cached or not measurement.is_tmpfs):
                    measurement.pairs(kind, threads, pairs)
        for number in range(0 if pairs else rounds):
            for measurement in measurements:
                one_round(measurement, number % 2 == 1)
    except TimeIsOver:
        print("the time is over")
    finally:
        background.close()
    return measurements


def arguments_of_command() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, help="size of a checkpoint (default: 0.5, or that of --config)")
    parser.add_argument("--config", type=Path, help="a run whose state is saved")
    parser.add_argument("--folder", type=Path, action="append", help="a new folder; may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=0, help="only loads: so many pairs with and without verification")
    parser.add_argument("--hash-threads", nargs="+", default=[str(HASHERS)], help="of --pairs, as 6 or 8x16+unhashed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="limit of the whole program")
    parser.add_argument("--platform", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    return parser.parse_args()


def main(started: float) -> None:
    """Measure and print."""
    arguments = arguments_of_command()
    folders = [folder.absolute() for folder in arguments.folder or [Path("outputs/checkpoint_cost")]]
    for folder in folders:
        folder.mkdir(parents=True)
    common, wrap_keys = "megatron_lm.train.common", "megatron_wrap"
    overrides = [
        *([] if arguments.config else sizes(arguments.gib or 0.5, "bf16" if arguments.platform == "cuda" else "fp32")),
        *(f"{common}.seq_length={SEQUENCE}", f"{common}.global_batch_size=1", f"{common}.micro_batch_size=1"),
        *(f"{wrap_keys}.init.platform={arguments.platform}", f"{wrap_keys}.logger.output_dir={folders[0] / 'records'}"),
        *arguments.overrides,
    ]
    try:
        with MegatronWrap(arguments.config or CONFIG, overrides=overrides) as wrap:
            wrap.initialize()
            wrap.setup_model_and_optimizer()
            wrap.train(random_tokens(1, SEQUENCE, VOCABULARY))  # the optimizer has a state then
            print(f"set up after {time.perf_counter() - started:.1f} s", flush=True)
            paths, end = [folder / "checkpoints" for folder in folders], started + arguments.seconds
            measurements = measure(wrap, paths, end, arguments.rounds, arguments.pairs, arguments.hash_threads)
        for folder, measurement in zip(folders, measurements, strict=True):
            kind, processors = file_system(folder), len(os.sched_getaffinity(0))
            print(f"\n{measurement.gib:.2f} GiB in {folder} ({kind}), {processors} processors, {arguments.platform}")
            print_table(measurement)
            values = {"gib": measurement.gib, "file_system": kind, "processors": processors}
            values |= {"ratios": measurement.ratios(), "seconds": measurement.seconds}
            print("RESULT " + json.dumps(values), flush=True)
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    with exit_on_user_error():
        main(time.perf_counter())
