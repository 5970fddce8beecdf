"""Runs under Ray, and the same runs without it; each rank 0 records its steps."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _started

CONFIG = Path(__file__).parents[2] / "configs" / "tiny-llama-mock.yaml"
TRAIN, ARCH = "megatron_lm.train.common", "megatron_lm.model.arch"
STEPS, INTERVAL = 10, 3
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
"""Between two looks of Ray's controller at the workers; its default is 2 s."""


def overrides(folder: Path, steps: int = STEPS) -> list[str]:
    """A small run with checkpoints in `folder`."""
    return [
        f"{ARCH}.num_layers=2",
        f"{ARCH}.vocab_size=256",
        f"{TRAIN}.seq_length=32",
        f"{TRAIN}.micro_batch_size=1",
        f"{TRAIN}.train_iters={steps}",
        f"{TRAIN}.save={folder / 'checkpoints'}",
        f"{TRAIN}.save_interval={INTERVAL}",
        f"megatron_wrap.logger.output_dir={folder}",
        "megatron_wrap.init.platform=cpu",
    ]


def train(
    wrap: Any, journal: Path, after_step: Callable[[Any], None] = lambda wrap: None, until: int | None = None
) -> int:
    """Train to the last step, or to iteration `until`; returns the iteration."""
    for batch in wrap.batches():
        ids = hashlib.sha256(repr(batch).encode()).hexdigest()
        metrics = wrap.train(batch)
        if wrap.dp_rank == 0:
            step = [wrap.iteration, ids, float(metrics["loss"]).hex(), float(metrics["grad_norm"]).hex(), wrap.dp_size]
            with journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(step) + "\n")
        after_step(wrap)
        if wrap.iteration == until:
            break
    return int(wrap.iteration)


class RayLoop:
    """The loop of a worker. On `rank`, the first worker that reaches `iteration` dies `seconds` later."""

    def __init__(self, journal: Path, rank: int = -1, iteration: int = 0, seconds: float = 0.0) -> None:
        self.journal, self.rank, self.iteration, self.seconds = journal, rank, iteration, seconds

    def __call__(self, wrap: Any) -> int:
        """Train and report."""
        from megatron_wrap.launch.ray import report

        def after_step(wrap: Any) -> None:
            if wrap.iteration == self.iteration and wrap.dp_rank == self.rank:
                died = self.journal.with_suffix(".died")
                if not died.exists():
                    died.touch()
                    threading.Timer(self.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
            if wrap.iteration % INTERVAL == 0:
                report(wrap, {"loss": 0.0})

        return train(wrap, self.journal, after_step)


class WaitingLoop:
    """The loop of a worker that waits after the iterations of `waits` while the number of replicas is as given."""

    def __init__(self, journal: Path, waits: dict[int, int]) -> None:
        self.journal, self.waits = journal, waits

    def __call__(self, wrap: Any) -> int:
        """Train."""

        def after_step(wrap: Any) -> None:
            while self.waits.get(wrap.iteration) == wrap.dp_size:
                time.sleep(0.1)

        return train(wrap, self.journal, after_step)


def without_ray(folder: Path, steps: int = STEPS, further: Sequence[str] = ()) -> None:
    """On each rank of a pool; `further` are more overrides."""
    with _started.started(CONFIG, [*overrides(folder, steps), *further]) as wrap:
        train(wrap, folder / "journal")


def from_checkpoints(folder: Path, begins: Sequence[tuple[Path, int]], steps: int, further: Sequence[str] = ()) -> None:
    """On each rank of a pool: from each checkpoint, train to an iteration of a run of `steps`, and save nothing."""
    for number, (checkpoint, until) in enumerate(begins):
        load = [f"{TRAIN}.save=null", f"{TRAIN}.save_interval=null", f"{TRAIN}.load={checkpoint}"]
        with _started.started(CONFIG, [*overrides(folder / str(number), steps), *load, *further]) as wrap:
            folder.mkdir(exist_ok=True)
            train(wrap, folder / "journal", until=until)


def steps_of(journal: Path) -> dict[int, list[Any]]:
    """Iteration -> digest of the samples, loss, gradient norm and replicas; those of the last time it was taken."""
    return {line[0]: line[1:] for line in map(json.loads, journal.read_text(encoding="utf-8").splitlines())}
