"""Three runs of a small mixture of experts on text: with sequential experts, with grouped experts and the routing of
the first run, so that both train the same experts on the same tokens, and with grouped experts and their own routing.

python scripts/drill/replayed_experts.py [CONFIG] [--count 200] [a.b=c ...]

In fp32, on one process. The routing of each step is that of a forward pass of the first run before the step. Exits with
1 if the loss of a step of the second run differs by more than 1e-4, or the mean of ten steps of the third by more than
1%.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_wrap.core import MegatronWrap, exit_on_user_error

ROOT = Path(__file__).parents[2]
CONFIG = "configs/tiny-mixtral-sft.yaml"
ROUTED_EXPERTS = "routed_experts"
BOUND, BOUND_OF_MEANS, MEAN_OF = 1e-4, 0.01, 10
EXPERTS, REPLAY = "megatron_lm.model.arch.experts_impl=", "megatron_lm.train.common.router_replay="
SETTINGS = (
    "megatron_lm.train.common.global_batch_size=2",
    "megatron_lm.train.common.micro_batch_size=2",
    "megatron_lm.train.common.seq_length=64",
    "megatron_lm.train.learning-rate.lr=3e-4",
    "megatron_lm.model.parallel.expert_model_parallel_size=1",
    "megatron_lm.train.common.save=null",
    "megatron_lm.train.common.save_interval=null",
    "megatron_lm.train.common.eval_interval=null",
    "megatron_wrap.init.platform=cpu",
    "megatron_wrap.logger.progress_bar=false",
)


def train(config: str, overrides: list[str], steps: int, routing: list[list[Any]] | None) -> list[float]:
    """The loss of each step.

    Args:
        routing: of each step's samples, which is replayed; an empty list is filled with that of the run's own routers
            before each step. None: the run's own, without replay.
    """
    losses = []
    records, replay = routing == [], f"{REPLAY}{'disabled' if routing is None else 'R2'}"
    with MegatronWrap(config, overrides=[*SETTINGS, replay, *overrides]) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        batches = wrap.batches()
        for number, batch in enumerate(itertools.islice(batches, steps)):
            samples = [dict(sample) for sample in batch]
            if routing is not None:
                if records:
                    routing.append([outputs[ROUTED_EXPERTS] for outputs in wrap.forward(samples)])
                for sample, of_sample in zip(samples, routing[number], strict=True):
                    sample[ROUTED_EXPERTS] = of_sample
            losses.append(wrap.train(samples)["loss"])
            if (number + 1) % 20 == 0:
                print(f"step {number + 1}: loss {losses[-1]:.4f}", flush=True)
        batches.close()
    return losses


def largest_difference_of_means(losses: list[float], others: list[float]) -> float:
    """Of the means of every ten steps, relative to those of `others`."""
    starts = range(0, len(losses), MEAN_OF)
    pairs = [(fmean(losses[start : start + MEAN_OF]), fmean(others[start : start + MEAN_OF])) for start in starts]
    return max(abs(mean / other - 1.0) for mean, other in pairs)


def main() -> int:
    """Train all three, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("config", nargs="?", default=CONFIG)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    parser.add_argument("--count", type=int, default=200, help="steps")
    arguments = parser.parse_intermixed_args()
    if "=" in arguments.config:
        arguments.overrides.insert(0, arguments.config)
        arguments.config = CONFIG
    if arguments.config == CONFIG:
        os.chdir(ROOT)
        if not Path("examples/data/generated").is_dir():
            subprocess.run([sys.executable, "examples/data/build.py"], check=True, stdout=subprocess.DEVNULL)
    routing: list[list[Any]] = []
    grouped = [*arguments.overrides, f"{EXPERTS}grouped_mm"]
    first = train(arguments.config, [*arguments.overrides, f"{EXPERTS}sequential"], arguments.count, routing)
    replayed, own = (train(arguments.config, grouped, arguments.count, each) for each in (routing, None))
    difference = max(abs(loss - other) for loss, other in zip(replayed, first, strict=True))
    of_means = largest_difference_of_means(own, first)
    print(
        f"{len(first)} steps, loss {first[0]:.4f} to {first[-1]:.4f} with sequential experts; with grouped experts and "
        f"their routing a step's loss differs by {difference:.2e} at most (bound {BOUND:g}), with grouped experts' own "
        f"routing the mean of {MEAN_OF} steps by {100 * of_means:.2g}% (bound {BOUND_OF_MEANS:.0%})"
    )
    return int(not (difference <= BOUND and of_means <= BOUND_OF_MEANS))


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main())
