"""Train any configuration: torchrun --nproc-per-node 2 examples/train.py configs/tiny-llama-sft.yaml [a.b=value ...]"""

import sys

from megatron_wrap.core import MegatronWrap, exit_on_user_error


def main() -> None:
    """Train to the last iteration, evaluate and save."""
    config, *overrides = sys.argv[1:]
    with MegatronWrap(config, overrides=overrides) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        for batch in wrap.batches():  # lists of wrap.global_batch_size samples; a resumed run goes on where it stopped
            if wrap.evaluation_due:
                wrap.evaluate()
            wrap.train(batch)
            wrap.log_last_metrics()
        wrap.evaluate()
        if wrap.config.train.save is not None:
            wrap.save()


if __name__ == "__main__":
    with exit_on_user_error():
        main()
