"""Time of the phases of a GRPO step: rollout, log-probabilities, optimizer step and export of the weights.

    torchrun --nproc-per-node 1 scripts/benchmark/grpo_phases.py scripts/benchmark/llama-1b.yaml [a.b=c ...]

Prompts and rewards are random, so the responses have all their tokens. One JSON line for each step; the first step also
loads kernels.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy

from megatron_wrap.core import MegatronWrap, exit_on_user_error

TRAIN = "megatron_lm.train.common"


def overrides_of(arguments: argparse.Namespace) -> list[str]:
    """The overrides of the command line for a run of GRPO."""
    responses = arguments.prompts * arguments.responses
    return [
        "megatron_wrap.flow.__select__=gpt_grpo",
        "megatron_wrap.flow.packing=true",
        f"{TRAIN}.seq_length={arguments.prompt_tokens + arguments.new_tokens}",
        f"{TRAIN}.global_batch_size={responses}",
        f"{TRAIN}.micro_batch_size={arguments.micro_batch_size}",
        *arguments.overrides,
    ]


def one_step(wrap: MegatronWrap, arguments: argparse.Namespace, step: int) -> dict[str, Any]:
    """Seconds of each phase of one step."""
    random = numpy.random.default_rng(step)
    shape = (arguments.prompts, arguments.prompt_tokens)
    prompts = random.integers(0, wrap.config.arch.vocab_size, shape).tolist()
    count = arguments.prompts * arguments.responses
    phase_seconds: dict[str, Any] = {}
    with timed(wrap, phase_seconds, "rollout"):
        completions = wrap.generate(
            prompts,
            n=arguments.responses,
            max_new_tokens=arguments.new_tokens,
            temperature=1.0,
            seed=step,
            batch_size=arguments.rollout_batch_size,
        )
    samples: list[dict[str, Any]] = [
        {
            "prompt_ids": prompts[index // arguments.responses],
            "response_ids": completion["token_ids"],
            "group": index // arguments.responses,
            "reward": float(random.random()),
        }
        for index, completion in enumerate(completions)
    ]
    with timed(wrap, phase_seconds, "log-probabilities"):
        for sample, outputs in zip(samples, wrap.forward(samples), strict=True):
            sample["old_log_probs"] = outputs["log_probs"]
    with timed(wrap, phase_seconds, "step"):
        wrap.train(samples)
    with timed(wrap, phase_seconds, "export"):
        exported = sum(tensor.nbytes for _, tensor in wrap.weight_source(dtype="bfloat16"))
    return {
        "step": step,
        "seconds": {name: round(seconds, 3) for name, seconds in phase_seconds.items()},
        "responses": count,
        "rollout_tokens_per_second": round(count * arguments.new_tokens / phase_seconds["rollout"]),
        "exported_gb": round(exported / 1e9, 2),
        "memory_max_gib": round(wrap.platform.memory_gib()["memory_max"], 2),
    }


@contextmanager
def timed(wrap: MegatronWrap, phase_seconds: dict[str, Any], name: str) -> Iterator[None]:
    """Add the seconds of a phase to `phase_seconds`, with the device's work."""
    wrap.platform.synchronize()
    started = time.perf_counter()
    yield
    wrap.platform.synchronize()
    phase_seconds[name] = time.perf_counter() - started


def main() -> None:
    """Three steps by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--responses", type=int, default=8, help="of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--rollout-batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_intermixed_args()
    with MegatronWrap(arguments.config, overrides=overrides_of(arguments)) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        for step in range(arguments.steps):
            report = one_step(wrap, arguments, step)
            if wrap.state.parallel.world.rank == 0:
                sys.stdout.write("RESULT " + json.dumps(report) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    with exit_on_user_error():
        main()
