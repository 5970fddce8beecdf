"""Loading: a run that was killed resumes at the very next sample in each mode, also with another data-parallel size or
number of workers; what workers prepare equals what a step prepares; errors and the end of workers."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
from _checkpoint_runs import TRAIN, VOCAB, in_new_processes, started
from _covering import quick
from _started import refusal_of

from megatron_wrap.testing.ranks import RankError

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


DATA, FLOW = "megatron_wrap.data", "megatron_wrap.flow"
PACKED = (f"{FLOW}.packing=true", f"{TRAIN}.max_tokens_per_micro_batch=64")
BUDGET = (f"{TRAIN}.global_batch_tokens=128", f"{TRAIN}.max_tokens_per_micro_batch=64", f"{DATA}.packing_window=12")
SKIP = (f"{DATA}.on_bad_sample=skip",)


def single_file(folder: Path) -> str:
    return f"{folder}/one.jsonl"


def streaming(folder: Path) -> str:
    return f"{{path: {folder}/one.jsonl, streaming: true}}"


def mixture(folder: Path) -> str:
    return f"[{{path: {folder}/one.jsonl, epochs: 0.5}}, {{path: {folder}/bad.jsonl, samples: 9}}]"


@dataclass(frozen=True)
class Mode:
    """A source, further keys, and (processes, workers) before and after the kill."""

    source: object
    overrides: tuple[str, ...]
    before: tuple[int, int]
    after: tuple[int, int]


MODES = {
    "map": Mode(single_file, (), (1, 2), (2, 0)),
    "streaming": Mode(streaming, (f"{DATA}.shuffle_buffer=16",), (2, 1), (1, 2)),
    "budget-packed-skip": Mode(mixture, (*PACKED, *BUDGET, *SKIP), (2, 2), (1, 0)),
    "budget-padded": Mode(single_file, BUDGET, (1, 0), (2, 2)),
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_samples(tmp_path / "one.jsonl", 50, seed=1)
    write_samples(tmp_path / "bad.jsonl", 20, seed=2, bad_rows=(3, 4, 11))
    return tmp_path


def overrides_of(mode: Mode, folder: Path, workers: int) -> tuple[str, ...]:
    source = mode.source(folder)  # type: ignore[operator]
    return (f"{DATA}.train={source}", f"{DATA}.num_workers={workers}", *mode.overrides)


@pytest.mark.parametrize("name", quick(MODES, ("budget-packed-skip",)))
def test_a_killed_run_resumes_at_the_next_sample(data: Path, name: str, ranks) -> None:
    mode = MODES[name]
    (before, workers), (after, workers_after) = mode.before, mode.after
    overrides = overrides_of(mode, data, workers)
    straight = ranks(before).run(train, data / "straight", overrides, 30)
    assert all(steps == straight[0] for steps in straight)
    with pytest.raises(RankError):
        in_new_processes(before, train, data / "killed", overrides, 30, 10, 12)
    resumed = in_new_processes(after, train, data / "killed", overrides_of(mode, data, workers_after), 30)
    for steps in resumed:
        assert [ids for ids, _, _ in steps] == [ids for ids, _, _ in straight[0][10:]]
        assert [skipped for _, _, skipped in steps] == [skipped for _, _, skipped in straight[0][10:]]
        assert [loss for _, loss, _ in steps] == pytest.approx([loss for _, loss, _ in straight[0][10:]], rel=1e-5)
    assert len(straight[0]) == 30
    taken = [sample for ids, _, _ in straight[0] for sample in ids]
    if "skip" in name:
        assert straight[0][-1][2] > 3
        assert not {(2, 3), (2, 4), (2, 11)} & set(taken)
    elif "budget" not in name:
        assert len(set(taken[:50])) == 50


@pytest.mark.parametrize(
    "keys", [pytest.param((), id="samples", marks=pytest.mark.matrix), pytest.param((*PACKED, *BUDGET), id="budget")]
)
def test_a_batch_a_copy_and_the_batches_of_rank_0_give_the_same_bits(data: Path, keys: tuple[str, ...]) -> None:
    overrides = (f"{DATA}.train={single_file(data)}", f"{DATA}.num_workers=1", *keys)
    yielded = in_new_processes(2, train_on, data / "a", overrides, "yielded", 5)
    assert len(yielded[0]) == 5
    assert yielded[0] == yielded[1]
    for how in ("copy", "rank 0"):
        assert in_new_processes(2, train_on, data / how.replace(" ", ""), overrides, how, 5) == yielded


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.matrix), 2])
def test_a_bad_row_ends_the_run_with_its_file_and_line(data: Path, workers: int) -> None:
    overrides = (f"{DATA}.train={data}/bad.jsonl", f"{DATA}.num_workers={workers}", f"{DATA}.shuffle=false")
    for text, seconds in in_new_processes(2, error_of_a_batch, data / "run", overrides):
        assert text.startswith(f"{data}/bad.jsonl:4: not JSON")
        assert seconds < 20
