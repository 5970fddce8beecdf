"""A run of 12 steps resumed after each of its steps: losses, gradient norms and states are those of the unbroken run,
bit for bit, on the CPU with dropout.

python scripts/drill/resume_equality.py --count 30 [--jobs 2] [--results FILE]

A trial is one of five kinds of runs (SFT, DPO, GRPO, pretraining on indexed documents, SFT of a mixture of experts) on
one of six layouts: the unbroken run saves after every step, and eleven runs begin from its checkpoints. Exits with 1 if
a loss, a gradient norm, a weight or a state of the optimizer of any step and rank differs.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "distributed"))
import _checkpoint_runs as runs
import _dpo_runs
import _grpo_runs
import _indexed_runs
import _trials
from _rank_pools import RankPools

from megatron_wrap.checkpoint.files.run_folder import CheckpointStore
from megatron_wrap.testing.ranks import RankPool

STEPS = 12
COMMON = (*runs.DROPOUT, f"{runs.TRAIN}.train_iters={STEPS}", f"{runs.ARCH}.vocab_size={_dpo_runs.VOCAB}")
FLOWS = {
    "sft": (),
    "dpo": (*_dpo_runs.DPO, *_dpo_runs.COPY),
    "grpo": _grpo_runs.GRPO,
    "pretraining": (),
    "experts": runs.EXPERTS,
}
LAYOUTS = {
    "one-rank": (1, ()),
    "dp2-distributed": (2, runs.DISTRIBUTED),
    "tp2-sp": (2, runs.TP2),
    "pp2-vpp2": (2, runs.PP2_VPP2),
    "cp2": (2, runs.CP2),
    "tp2-sp-pp2": (4, (*runs.TP2, *runs.PP2)),
}
"""Layout -> (number of processes, overrides); a mixture of experts has its experts on two ranks in dp2-distributed."""
TRIALS = [
    f"{flow} {list(LAYOUTS)[(number + shift) % len(LAYOUTS)]}"
    for shift in range(len(LAYOUTS))
    for number, flow in enumerate(FLOWS)
]
SAME, DIFFERENT = "same", _trials.WRONG


def batches(flow: str, wrap: Any) -> Iterator[Sequence[Any]]:
    """The batches from the run's next step on."""
    if flow == "pretraining":
        yield from wrap.batches()
        return
    made: Callable[[int], Sequence[Any]] = {"dpo": _dpo_runs.pairs, "grpo": _grpo_runs.rollouts}.get(flow, _tokens)
    size = wrap.global_batch_size
    samples = made(STEPS * size)
    while wrap.iteration < STEPS:
        yield samples[wrap.iteration * size : (wrap.iteration + 1) * size]


def _tokens(count: int) -> list[dict[str, list[int]]]:
    tokens = [pair["prompt_ids"] + pair["chosen_ids"] for pair in _dpo_runs.pairs(count)]
    return [{"input_ids": ids, "labels": ids} for ids in tokens]


def train(folder: str, flow: str, overrides: tuple[str, ...], saves: bool) -> list[tuple[str, ...]]:
    """Train on one rank; returns the state at the start and after each step, with its loss and gradient norm."""
    with runs.started(folder, overrides) as wrap:
        taken: list[tuple[str, ...]] = [(runs.state_digest(wrap),)]
        for batch in batches(flow, wrap):
            metrics = wrap.train(batch)
            values = (float(metrics[name]).hex() for name in ("loss", "grad_norm"))
            taken.append((runs.state_digest(wrap), *values))
            if saves:
                wrap.save()
        return taken


@contextlib.contextmanager
def worker(folder: Path, seed: int) -> Iterator[Callable[[str], _trials.Result]]:
    """Performs trials on pools of ranks of its own."""
    with RankPools() as pools:
        documents = _indexed_runs.write_prefix(folder / "documents", 200, seed=3)

        def trial(name: str) -> _trials.Result:
            flow, layout = name.split()
            ranks, overrides = LAYOUTS[layout]
            if flow == "experts" and layout == "dp2-distributed":
                overrides = (*overrides, f"{runs.PARALLEL}.expert_model_parallel_size=2")
            overrides = (*COMMON, *FLOWS[flow], *COMMON, *overrides)
            if flow == "pretraining":
                overrides = (*overrides, *_indexed_runs.keys_of(documents))
            with pools.of(ranks) as pool:
                wrong = differences(pool, folder, flow, overrides)
            return {"kind": flow, "outcome": DIFFERENT if wrong else SAME, "detail": "; ".join(wrong)}

        yield trial


def differences(pool: RankPool, folder: Path, flow: str, overrides: tuple[str, ...]) -> list[str]:
    """Differences between the unbroken run and the runs that begin at each of its checkpoints."""
    whole, begun = folder / "whole", folder / "begun"
    for path in (whole, begun):
        shutil.rmtree(path, ignore_errors=True)  # left by the previous trial
    unbroken = pool.run(train, str(whole), flow, overrides, True)
    wrong = [] if len(unbroken[0]) == STEPS + 1 else [f"the unbroken run took {len(unbroken[0]) - 1} steps"]
    for step in range(1, STEPS):
        others = {CheckpointStore(whole).folder_of(other).name for other in range(1, STEPS + 1) if other != step}
        shutil.copytree(whole, begun, ignore=shutil.ignore_patterns(*others))
        (begun / "latest_checkpointed_iteration.txt").write_text(str(step))
        resumed = pool.run(train, str(begun), flow, overrides, False)
        shutil.rmtree(begun)
        for rank, (actual, expected) in enumerate(zip(resumed, unbroken, strict=True)):
            if [actual[0][0], *actual[1:]] != [expected[step][0], *expected[step + 1 :]]:
                wrong.append(f"resumed after step {step}, rank {rank} differs")
    return wrong


if __name__ == "__main__":
    sys.exit(_trials.main(__doc__ or "", "kinds of runs on layouts, of thirty", worker, [SAME], TRIALS))
