"""Time to fill the initial weights of a model on this device.

python scripts/benchmark/initial_weights.py CONFIG [a.b=c ...]
"""

import json
import sys
import time

from megatron_wrap.core import MegatronWrap, exit_on_user_error


def main() -> None:
    """Build the bare model, then fill it twice: the first time includes the loading of kernels."""
    with MegatronWrap(sys.argv[1], overrides=sys.argv[2:]) as wrap:
        wrap.initialize()
        from megatron_wrap.engine.setup.build import build_chunks
        from megatron_wrap.model.initial_weights import fill_initial_weights
        from megatron_wrap.model.transformer_config import transformer_config

        config, parallel = wrap.config, wrap._initialized()
        vocab_size = config.arch.vocab_size or 0
        model_config = transformer_config(config, wrap.platform)
        [chunk] = build_chunks(config, wrap.platform, parallel, model_config, vocab_size, new_weights=False)
        model = getattr(chunk, "module", chunk)
        seconds = []
        for _ in range(2):
            wrap.platform.synchronize()
            started = time.perf_counter()
            fill_initial_weights(model, config.arch, vocab_size, config.train.seed, parallel.tp)
            wrap.platform.synchronize()
            seconds.append(round(time.perf_counter() - started, 3))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        report = {"parameters": parameters, "first_seconds": seconds[0], "second_seconds": seconds[1]}
        sys.stdout.write(json.dumps(report) + "\n")  # not print, which a configuration may send to the log


if __name__ == "__main__":
    with exit_on_user_error():
        main()
