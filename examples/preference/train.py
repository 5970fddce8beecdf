"""Supervised fine-tuning of a small model, then one of four flows on preferences from its weights.

torchrun --nproc-per-node 2 examples/preference/train.py {kto,cpo,orpo,reward} [a.b=value ...]
"""

import sys

from megatron_wrap.core import MegatronWrap, exit_on_user_error
from megatron_wrap.utils.dist_logger import logger

SFT, FOLDER = "configs/tiny-llama-sft.yaml", "outputs/tiny-llama-sft/hf"
SHOWN = {
    "kto": ("rewards/chosen", "rewards/rejected", "rewards/margins"),
    "cpo": ("logps/chosen", "logps/rejected", "rewards/accuracies"),
    "orpo": ("logps/chosen", "logps/rejected", "rewards/accuracies"),
    "reward": ("margin", "accuracy"),
}
"""Flow -> metrics of the validation set that the program logs, before and after training."""


def fine_tune(overrides: list[str]) -> None:
    """Train SFT to its end (nothing if it has finished before), and write its weights as a folder."""
    with MegatronWrap(SFT, overrides=overrides) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        wrap.fit()
        wrap.save_pretrained(FOLDER)


def optimize(flow: str, overrides: list[str]) -> None:
    """Train the configuration of a flow from that folder, and log its metrics on the validation set."""
    start = f"megatron_wrap.model_provider.hf_path={FOLDER}"
    with MegatronWrap(f"configs/tiny-llama-{flow}.yaml", overrides=[start, *overrides]) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        before, after = wrap.evaluate(), wrap.fit()
        for name in SHOWN[flow]:
            key = f"eval/validation/{name}"
            logger.info_rank_0(f"{name}: {before[key]:.3f} before, {after[key]:.3f} after {wrap.iteration} iterations")


def main() -> None:
    """Both parts, for the flow that the command line names."""
    flow, *overrides = sys.argv[1:] or [""]
    if flow not in SHOWN:
        sys.exit(f"name a flow: {', '.join(SHOWN)}, not {flow!r}")
    fine_tune(overrides)
    optimize(flow, overrides)


if __name__ == "__main__":
    with exit_on_user_error():
        main()
