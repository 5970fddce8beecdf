"""Train any configuration: torchrun --nproc-per-node 2 examples/train.py configs/tiny-llama-sft.yaml [a.b=value ...]"""

import sys

from megatron_wrap.core import MegatronWrap, exit_on_user_error

if __name__ == "__main__":
    with exit_on_user_error(), MegatronWrap(sys.argv[1], overrides=sys.argv[2:]) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        wrap.fit()  # docs/reference/megatron-wrap.md has the loop that this stands for
