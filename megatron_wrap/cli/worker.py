"""What each process of `megatron-wrap train` runs: the loop of examples/train.py."""

import sys

from megatron_wrap.core import MegatronWrap, exit_on_user_error


def main(config: str, *overrides: str) -> None:
    """Train a configuration to its end, evaluating and saving where it says so."""
    with MegatronWrap(config, overrides=overrides) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        for batch in wrap.batches():
            if wrap.evaluation_due:
                wrap.evaluate()
            wrap.train(batch)
            wrap.log_last_metrics()
        wrap.evaluate()
        if wrap.config.train.save is not None:
            wrap.save()


if __name__ == "__main__":
    with exit_on_user_error():
        main(*sys.argv[1:])
