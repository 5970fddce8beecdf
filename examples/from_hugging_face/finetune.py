"""Fine-tune a Hugging Face folder (or hub id) and write a Hugging Face folder.

torchrun --nproc-per-node 2 examples/from_hugging_face/finetune.py FROM TO [a.b.c=value ...]
"""

import sys
from pathlib import Path

from megatron_wrap.core import MegatronWrap, exit_on_user_error

CONFIG = Path(__file__).with_name("sft.yaml")


def main(from_folder: str, to_folder: str, *overrides: str) -> None:
    """Train on the data that sft.yaml names, from the weights in `from_folder`, and export to `to_folder`."""
    with MegatronWrap.from_pretrained(from_folder, CONFIG, overrides=overrides) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()  # every process reads its own slices of the weights
        for batch in wrap.batches():
            wrap.train(batch)
            wrap.log_last_metrics()
        wrap.evaluate()
        wrap.save_pretrained(to_folder)  # AutoModelForCausalLM.from_pretrained(to_folder) loads it


if __name__ == "__main__":
    with exit_on_user_error():
        main(*sys.argv[1:])
