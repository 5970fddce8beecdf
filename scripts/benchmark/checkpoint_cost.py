"""What hashes cost a save and a load, and how long an asynchronous save holds training up; one process.

    python scripts/benchmark/checkpoint_cost.py --gib 1 --folder /dev/shm/cost [--folder outputs/cost] [--rounds 5]
        [--seconds 170] [--platform cuda] [--config scripts/benchmark/llama-1b.yaml] [KEY=VALUE ...]

The state is that of a Llama whose weights and optimizer have the given size, or that of a configuration. In each round
and folder, in changing order: a plain save as torch writes it (CRC-32, no SHA-256) and one with SHA-256, an
asynchronous save (the time until it returns, and until it is published), and a load without verification and one with
it, with the files in the system's cache and from the disk (not from a tmpfs, which has none). Prints each time at once,
with the processor seconds of this process; at the end medians, and the medians of the rounds' ratios. With `--seconds`,
counted from the start of the program, no measurement begins that would end later.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_wrap.core import MegatronWrap, exit_on_user_error

CONFIG = Path(__file__).with_name("overhead.yaml")
VOCABULARY, SEQUENCE = 4096, 64
STATE_BYTES = {"fp32": 12, "bf16": 14}
"""Dtype -> bytes of state per parameter: weight and two moments; with bf16 also the fp32 weight."""
BARE, PLAIN, BACKGROUND = "save as torch's", "save", "asynchronous save"
LOAD, UNVERIFIED = "load", "load without verification"
CACHED, FROM_DISK = "cached", "from disk"


def sizes(gib: float, dtype: str) -> list[str]:
    """Overrides for a model whose state has about the given size."""
    hidden = 512 if gib < 0.5 else 1024 if gib < 4 else 2048
    per_layer = 4 * hidden**2 + 3 * hidden * 4 * hidden
    parameters = gib * 2**30 / STATE_BYTES[dtype] - 2 * VOCABULARY * hidden
    values = {"hidden_size": hidden, "ffn_hidden_size": 4 * hidden, "num_layers": max(1, round(parameters / per_layer))}
    values |= {"num_attention_heads": hidden // 64, "num_query_groups": hidden // 64}
    arch = [f"megatron_lm.model.arch.{key}={value}" for key, value in values.items()]
    return [f"megatron_lm.train.dtype.__select__={dtype}", *arch]


@contextlib.contextmanager
def without_hashes() -> Iterator[None]:
    """Make plain saves write no SHA-256 of tensor files."""
    from megatron_wrap.checkpoint import save
    from megatron_wrap.checkpoint.files import run_folder
    from megatron_wrap.checkpoint.files.hashed_files import write_files

    def write(*arguments: Any) -> Any:
        return write_files(*arguments, hashed=False)

    def hash_small(folder: Path, names: Any) -> Any:
        return hash_files(folder, [name for name in names if not name.endswith(".distcp")])

    hash_files = run_folder.hash_files
    with (
        mock.patch.object(save, "write_files", write),
        mock.patch.object(run_folder, "hash_files", hash_small),
    ):
        yield


@contextlib.contextmanager
def without_verification() -> Iterator[None]:
    """Make loads skip the comparison of tensor files with their SHA-256."""
    from megatron_wrap.checkpoint import load

    with mock.patch.object(load, "read_manifest", return_value={}):
        yield


def drop_from_cache(folder: Path) -> None:
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
        self.kind = file_system(folder)
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.gib = 0.0
        """Size of a checkpoint in GiB."""

    def save(self, name: str, context: Callable[[], Any] = contextlib.nullcontext, background: Any = None) -> None:
        """Make a save; the earlier checkpoint is removed before. With `background`, measure the time until it returns,
        and until the checkpoint is published."""
        from megatron_wrap.checkpoint.save import run_record, save_checkpoint
        from megatron_wrap.checkpoint.saved_tensors import layout_record

        shutil.rmtree(self._folder, ignore_errors=True)
        state = self._wrap.state
        record = run_record(state.config, layout_record(state.parallel, state.platform.name), state.shape.vocab_size)
        started = time.perf_counter()
        with context():
            self._timed(name, lambda: save_checkpoint(state, self._folder, record, asynchronous=background))
        if background:
            background.wait()
            self._record(f"{name}, until published", time.perf_counter() - started, 0.0)
        [self._newest] = self._folder.glob("iter_*")
        self.gib = sum(path.stat().st_size for path in self._newest.iterdir()) / 2**30

    def load(self, kind: str, way: str) -> None:
        """Load the newest checkpoint."""
        from megatron_wrap.checkpoint.load import load_checkpoint

        if kind == FROM_DISK:
            drop_from_cache(self._newest)
        with without_verification() if way == UNVERIFIED else contextlib.nullcontext():
            self._timed(f"{way}, {kind}", lambda: load_checkpoint(self._wrap.state, self._newest))

    def round(self, number: int) -> None:
        """Make each measurement once, in an order that changes from round to round; in round 0 the saves come first,
        because they set up more."""
        if number == 0:
            self.save(f"first {PLAIN}")
            self.save(f"first {BACKGROUND}", background=self._background)
            return
        order = 1 if number % 2 else -1
        for name, context in ((BARE, without_hashes), (PLAIN, contextlib.nullcontext))[::order]:
            self.save(name, context)
        self.save(BACKGROUND, background=self._background)
        for kind in (CACHED,) if self.kind == "tmpfs" else (CACHED, FROM_DISK):
            for way in (UNVERIFIED, LOAD)[::order]:
                self.load(kind, way)

    def ratios(self) -> dict[str, list[float]]:
        """Ratios of the times within each round."""
        pairs = {"hashing: save / torch's": (PLAIN, BARE), "hold-up: asynchronous / plain save": (BACKGROUND, PLAIN)}
        for kind in (CACHED, FROM_DISK):
            pairs[f"verification, {kind}: load / without"] = (f"{LOAD}, {kind}", f"{UNVERIFIED}, {kind}")
        return {
            label: [above / below for above, below in zip(self.seconds[first], self.seconds[second], strict=False)]
            for label, (first, second) in pairs.items()
            if self.seconds.get(first) and self.seconds.get(second)
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

    def _record(self, name: str, seconds: float, processor_seconds: float) -> None:
        self.seconds[name].append(seconds)
        print(f"{self._folder}: {name}: {seconds:.3f} s, {processor_seconds:.2f} s of processors", flush=True)

    def print_table(self, platform: str) -> None:
        """Medians and ratios."""
        processors = len(os.sched_getaffinity(0))
        print(f"\n{self.gib:.2f} GiB in {self._folder} ({self.kind}), {processors} processors, {platform}")
        for name, seconds in self.seconds.items():
            middle = statistics.median(seconds)
            print(f"{name:<50} {middle:8.3f} s  {self.gib / middle:7.2f} GiB/s  (of {len(seconds)})")
        for label, values in self.ratios().items():
            print(f"{label:<50} {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")


def measure(wrap: Any, folders: list[Path], end: float, rounds: int) -> list[Measurement]:
    """Make all rounds, or as many as the limit allows."""
    from megatron_wrap.checkpoint.asynchronous_saves import AsynchronousSaves

    background = AsynchronousSaves(wrap.platform.device, lambda: None)
    measurements = [Measurement(wrap, background, folder / "checkpoints", end) for folder in folders]
    try:
        for number in range(rounds + 1):
            for measurement in measurements:
                measurement.round(number)
    except TimeIsOver:
        print("the time is over")
    finally:
        background.close()
    return measurements


def main(started: float) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.5, help="size of a checkpoint, without --config")
    parser.add_argument("--config", type=Path, help="a run whose state is saved")
    parser.add_argument("--folder", type=Path, action="append", help="a new folder; may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="limit of the whole program")
    parser.add_argument("--platform", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    folders = [folder.absolute() for folder in arguments.folder or [Path("outputs/checkpoint_cost")]]
    for folder in folders:
        folder.mkdir(parents=True)
    common = "megatron_lm.train.common"
    overrides = [
        *([] if arguments.config else sizes(arguments.gib, "bf16" if arguments.platform == "cuda" else "fp32")),
        *(f"{common}.seq_length={SEQUENCE}", f"{common}.global_batch_size=1", f"{common}.micro_batch_size=1"),
        f"megatron_wrap.init.platform={arguments.platform}",
        f"megatron_wrap.logger.output_dir={folders[0] / 'records'}",
        *arguments.overrides,
    ]
    try:
        with MegatronWrap(arguments.config or CONFIG, overrides=overrides) as wrap:
            wrap.initialize()
            wrap.setup_model_and_optimizer()
            tokens = [index % VOCABULARY for index in range(SEQUENCE + 1)]
            wrap.train([{"input_ids": tokens, "loss_mask": [1] * len(tokens)}])  # the optimizer has a state then
            measurements = measure(wrap, folders, started + arguments.seconds, arguments.rounds)
        for measurement in measurements:
            measurement.print_table(arguments.platform)
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    with exit_on_user_error():
        main(time.perf_counter())
