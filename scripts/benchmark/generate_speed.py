"""Time `wrap.generate` on random prompts of equal and of unequal length; one JSON line each.

torchrun --nproc-per-node 1 scripts/benchmark/generate_speed.py scripts/benchmark/llama-1b.yaml [a.b=c ...]
"""

import argparse
import json
import sys
import time

import numpy

from megatron_wrap.core import MegatronWrap, exit_on_user_error


def main() -> None:
    """Measure a batch of `--prompts` rows of `--longest` tokens each, then one of lengths from 1/16 of that up to
    it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--new", type=int, default=128, help="tokens of each completion")
    parser.add_argument("--name", default="")
    arguments = parser.parse_intermixed_args()
    with MegatronWrap(arguments.config, overrides=arguments.overrides) as wrap:
        wrap.initialize()
        wrap.setup_model()
        random = numpy.random.default_rng(0)
        vocabulary, count, longest = wrap.config.arch.vocab_size or 0, arguments.prompts, arguments.longest
        lengths = {
            "equal": [longest] * count,
            "unequal": numpy.linspace(longest // 16, longest, count).astype(int).tolist(),
        }
        for kind, chosen in lengths.items():
            prompts = [random.integers(0, vocabulary, length).tolist() for length in chosen]
            seconds = {}
            for new_tokens in (1, arguments.new):
                for _ in range(2):  # the first compiles kernels
                    wrap.platform.synchronize()
                    started = time.perf_counter()
                    wrap.generate(prompts, max_new_tokens=new_tokens, batch_size=count)
                    seconds[new_tokens] = time.perf_counter() - started
            report = {
                "name": f"{arguments.name} {kind}".strip(),
                "prompt_tokens": sum(chosen),
                "first_token_seconds": round(seconds[1], 3),
                "seconds": round(seconds[arguments.new], 3),
                "new_tokens_per_second": round(count * arguments.new / seconds[arguments.new], 1),
                "memory_max_gib": round(wrap.platform.memory_gib()["memory_max"], 2),
            }
            if wrap.state.parallel.world.rank == 0:
                sys.stdout.write("RESULT " + json.dumps(report) + "\n")


if __name__ == "__main__":
    with exit_on_user_error():
        main()
