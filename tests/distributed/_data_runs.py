"""Functions that the tests of loading run on each rank."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy
from _checkpoint_runs import TRAIN, VOCAB, started
from _started import refusal_of

DATA = "megatron_wrap.data"


def write_samples(path: Path, count: int, seed: int, bad_rows: tuple[int, ...] = ()) -> None:
    """A file of tokenized samples of unequal lengths, each with its number as the first two tokens."""
    generator = numpy.random.default_rng(seed)
    with path.open("w") as file:
        for index in range(count):
            ids = [seed, index, *generator.integers(0, VOCAB, int(generator.integers(4, 30))).tolist()]
            sample = json.dumps({"input_ids": ids, "loss_mask": [1] * len(ids)})
            print("not JSON" if index in bad_rows else sample, file=file)


def train(
    folder: Path, overrides: tuple[str, ...], until: int, save_at: int | None = None, die_at: int | None = None
) -> list[Any]:
    """Train to iteration `until` with `wrap.batches()`; of each step the samples' numbers, loss and left-out rows. With
    `die_at`, each rank ends by SIGKILL after that step."""
    taken = []
    with started(folder, (f"{TRAIN}.train_iters=30", f"{DATA}.__select__=dataset", *overrides)) as wrap:
        for batch in wrap.batches():
            if wrap.iteration == until:
                break
            ids = [tuple(sample["input_ids"][:2]) for sample in batch]
            metrics = wrap.train(batch)
            taken.append((ids, metrics["loss"], metrics["skipped_samples"]))
            if wrap.iteration == save_at:
                wrap.save()
            if wrap.iteration == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
    return taken


def train_on(folder: Path, overrides: tuple[str, ...], how: str, steps: int) -> list[float]:
    """The loss of each step on the batches as yielded, on copies of them, or on those of rank 0."""
    with started(folder, (f"{TRAIN}.train_iters={steps}", f"{DATA}.__select__=dataset", *overrides)) as wrap:
        rank = wrap.state.parallel.world.rank
        if how == "rank 0" and rank > 0:
            return [wrap.train(None)["loss"] for _ in range(steps)]
        return [wrap.train(list(batch) if how == "copy" else batch)["loss"] for batch in wrap.batches()]


def error_of_a_batch(folder: Path, overrides: tuple[str, ...]) -> tuple[str, float]:
    """The error that a batch raises, and the seconds of the run."""
    begun = time.monotonic()
    return refusal_of(train, folder, overrides, 30), time.monotonic() - begun
