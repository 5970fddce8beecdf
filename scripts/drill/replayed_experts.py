"""Two runs of a small mixture of experts on text, with sequential and with grouped experts: the routing of the first is
replayed in the second, so that both train the same experts on the same tokens.

python scripts/drill/replayed_experts.py [CONFIG] [--count 200] [a.b=c ...]

In fp32, on one process. The routing of each step is that of a forward pass of the first run before the step. Prints the
largest difference of a step's loss, and the share of choices that differ from the second run's own. Exits with 1 if
losses differ by more than 1e-4.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_wrap.core import MegatronWrap, exit_on_user_error

ROOT = Path(__file__).parents[2]
CONFIG = "configs/tiny-mixtral-sft.yaml"
ROUTED_EXPERTS = "routed_experts"
BOUND = 1e-4
SETTINGS = (
    "megatron_lm.train.common.global_batch_size=4",
    "megatron_lm.train.common.seq_length=64",
    "megatron_lm.train.learning-rate.lr=3e-4",
    "megatron_lm.model.parallel.expert_model_parallel_size=1",
    "megatron_lm.train.common.router_replay=R2",
    "megatron_lm.train.common.save=null",
    "megatron_lm.train.common.save_interval=null",
    "megatron_lm.train.common.eval_interval=null",
    "megatron_wrap.init.platform=cpu",
    "megatron_wrap.logger.progress_bar=false",
)


def train(config: str, overrides: list[str], steps: int, replayed: list[list[Any]] | None) -> tuple[list[float], Any]:
    """The loss of each step, and the routing of each step's samples by the run's own routers before the step.

    Args:
        replayed: the routing of each step's samples; None: the run's own.
    """
    losses, recorded = [], []
    with MegatronWrap(config, overrides=[*SETTINGS, *overrides]) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        batches = wrap.batches()
        for number, batch in enumerate(itertools.islice(batches, steps)):
            samples = [dict(sample) for sample in batch]
            recorded.append([outputs[ROUTED_EXPERTS] for outputs in wrap.forward(samples)])
            routing = recorded[-1] if replayed is None else replayed[number]
            for sample, of_sample in zip(samples, routing, strict=True):
                sample[ROUTED_EXPERTS] = of_sample
            losses.append(wrap.train(samples)["loss"])
            if (number + 1) % 20 == 0:
                print(f"step {number + 1}: loss {losses[-1]:.4f}", flush=True)
        batches.close()
    return losses, recorded


def main() -> int:
    """Train both, compare."""
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
    kind = "megatron_lm.model.arch.experts_impl="
    first, routing = train(arguments.config, [*arguments.overrides, f"{kind}sequential"], arguments.count, None)
    second, chosen = train(arguments.config, [*arguments.overrides, f"{kind}grouped_mm"], arguments.count, routing)
    difference = max(abs(loss - other) for loss, other in zip(first, second, strict=True))
    different = total = 0
    for recorded, selected in zip(itertools.chain(*routing), itertools.chain(*chosen), strict=True):
        different += int((recorded.sort(dim=-1).values != selected.sort(dim=-1).values).sum())
        total += torch.numel(recorded)
    print(
        f"{len(first)} steps, loss {first[0]:.4f} to {first[-1]:.4f}; largest difference of a step's loss "
        f"{difference:.2e} (bound {BOUND:g}); {different} of {total} choices of experts differ from the run's own"
    )
    return int(not difference <= BOUND)


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main())
