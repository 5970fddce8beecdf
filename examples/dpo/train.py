"""Two algorithms on one small model: supervised fine-tuning, then preference optimization from its checkpoint.

torchrun --nproc-per-node 2 examples/dpo/train.py [a.b=value ...]
"""

import sys

from megatron_wrap.core import MegatronWrap, exit_on_user_error

SFT, DPO = "configs/tiny-llama-sft.yaml", "configs/tiny-llama-dpo.yaml"
START = (
    "megatron_lm.train.common.load=outputs/tiny-llama-sft/checkpoints",
    "megatron_lm.train.common.finetune=true",  # its weights; iteration and optimizer start new
)


def train(config: str, *overrides: str) -> dict[str, float]:
    """Run a configuration to its end (nothing if it has finished before); metrics of a last evaluation."""
    with MegatronWrap(config, overrides=[*overrides, *sys.argv[1:]]) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        for batch in wrap.batches():
            wrap.train(batch)
            wrap.log_last_metrics()
        wrap.save()
        return wrap.evaluate()


def main() -> None:
    """Fine-tune, then optimize preferences from that checkpoint, and print the accuracy on the validation pairs."""
    train(SFT)
    metrics = train(DPO, *START)
    accuracy = metrics["eval/validation/rewards/accuracies"]
    print(f"{accuracy:.0%} of the validation pairs are ranked right")


if __name__ == "__main__":
    with exit_on_user_error():
        main()
