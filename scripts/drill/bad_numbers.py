"""NaN, Inf and spikes injected into a step, in a sample, a weight, an activation or a gradient, on six layouts: each
ends as its policy defines, with the same words on every rank.

python scripts/drill/bad_numbers.py --count 66 [--jobs 2] [--results FILE]

`stop` must name the micro-batch, the sample and the first module, parameter or gradient, and change nothing; `skip`
must equal batches without a trained token; `rollback` must equal a run that never had the bad samples, resumed too, bit
for bit. Exits with 1 otherwise.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "distributed"))
import _bad_step_runs as bad
import _trials
from _checkpoint_runs import DISTRIBUTED, OVERLAP
from _engine_runs import options
from _rank_pools import RankPools

LAYOUTS = {
    "one": (1, ()),
    "dp2": (2, (*DISTRIBUTED, *OVERLAP)),
    "tp2-sp": (2, options(tp=2, sp=True)),
    "pp2-vpp2": (2, options(pp=2, layers_per_chunk=1)),
    "cp2": (2, options(cp=2)),
    "tp2-sp-pp2": (4, options(tp=2, sp=True, pp=2)),
}
NAMED = {
    "loss": "the loss (",
    "gradient": "the gradient of the loss with respect to the output of the model;",
    "activation": f"the output of {bad.MODULE};",
    "backward": f"the gradient from the backward pass of {bad.MODULE};",
    "weight": "",
}
"""Origin of the bad value -> its description in the error."""
CASES = [
    *(f"stop {kind}" for kind in NAMED),
    *(f"stop {kind} inf" for kind in ("activation", "backward", "weight")),
    *("stop spike", "skip", "rollback"),
]
TRIALS = [
    f"{list(LAYOUTS)[(number + shift) % len(LAYOUTS)]}: {case}"
    for shift in range(len(LAYOUTS))
    for number, case in enumerate(CASES)
]
RIGHT = "right"


def bad_sample(layout: str) -> str:
    """Description of the bad sample's position: the third micro-batch, or on two replicas the second one of replica
    0."""
    micro_batch = "micro-batch 1 of 2 of replica 0" if layout.startswith("dp2") else "micro-batch 2 of 4"
    return f"{micro_batch}, sample {bad.BAD} of a batch of 8"


def of_stop(run: Callable[..., list[Any]], layout: str, overrides: Sequence[str], kind: str) -> list[str]:
    """Mistakes of a step that is refused; empty: none."""
    results = run(bad.refused, overrides, (kind,))
    errors = [result["errors"][0] for result in results]
    name = kind.partition(" ")[0]
    words = f"before the step, {bad.PARAMETER} had nan or infinite values"
    if name != "weight":
        words = f"in {bad_sample(layout)}, the first such value is {NAMED[name]}"
    wrong = [f"another error: {error}" for error in errors if words not in error]
    if name != "weight" and not all(result["unchanged"][0] for result in results):
        wrong.append("the state has changed")
    return [*wrong, *(["other words on another rank"] if len(set(errors)) > 1 else [])]


def of_spike(run: Callable[..., list[Any]], layout: str, overrides: Sequence[str]) -> list[str]:
    """Mistakes of a run with a spike after nine losses, which becomes the tenth, and a further spike; empty: none."""
    keys = ("megatron_wrap.bad_steps.spike_threshold=20", "megatron_wrap.bad_steps.spike_window=10")
    more = ("megatron_lm.train.common.train_iters=30", *overrides)
    results = run(bad.in_a_row, (*keys, *more), ("",) * 9 + ("spike", "spike", ""))
    refused = results[0][10]
    is_named = (
        "of iteration 11 is a spike: " in refused and f"the largest loss is in {bad_sample(layout)}; nothing" in refused
    )
    wrong = [] if is_named and results[0][11] == "0 of 11" else [f"another error: {results[0][9:]}"]
    return [*wrong, *(["other words on another rank"] if any(result != results[0] for result in results) else [])]


def of_skip(run: Callable[..., list[Any]], overrides: Sequence[str]) -> list[str]:
    """Mistakes of a run with two skipped steps between two good ones; empty: none."""
    wrong = []
    for result in run(bad.skipped, overrides, ("loss", "gradient")):
        counts = [(step["bad_steps"], step["skipped_iterations"]) for step in result["metrics"]]
        if not result["equal"] or counts != [(0, 0), (1, 1), (2, 2), (2, 2)]:
            wrong.append(f"equal {result['equal']}, counts {counts}")
    return wrong


def of_rollback(run: Callable[..., list[Any]], overrides: Sequence[str], folder: Path) -> list[str]:
    """Mistakes of a run that goes back to its checkpoint, and of one that is resumed afterwards; empty: none."""
    wrong = []
    for result in run(bad.rolled_back, overrides, str(folder), ("whole", "resumed", "without")):
        for name in ("whole", "resumed"):
            if result[name]["counts"] != (1, 1, list(range(40, 48))):
                wrong.append(f"{name}: counts {result[name]['counts']}")
            if result[name]["end"] != result["without"]["end"]:
                wrong.append(f"{name}: the end differs")
    return wrong


@contextlib.contextmanager
def worker(folder: Path, seed: int) -> Iterator[Callable[[str], _trials.Result]]:
    """Performs trials on pools of ranks of its own."""
    with RankPools() as pools:
        os.chdir(folder)

        def trial(name: str) -> _trials.Result:
            layout, _, case = name.partition(": ")
            ranks, overrides = LAYOUTS[layout]
            policy, _, kind = case.partition(" ")
            with pools.of(ranks) as pool:
                if case == "stop spike":
                    wrong = of_spike(pool.run, layout, overrides)
                elif policy == "stop":
                    wrong = of_stop(pool.run, layout, overrides, kind)
                elif policy == "skip":
                    wrong = of_skip(pool.run, overrides)
                else:
                    wrong = of_rollback(pool.run, overrides, folder / "rollback")
                    shutil.rmtree(folder / "rollback")
            return {"kind": case, "outcome": _trials.WRONG if wrong else RIGHT, "detail": "; ".join(wrong)}

        yield trial


if __name__ == "__main__":
    sys.exit(_trials.main(__doc__ or "", "cases on layouts, of 66", worker, [RIGHT], TRIALS))
