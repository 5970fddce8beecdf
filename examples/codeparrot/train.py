"""The processes of run.py: train, complete the prompts at each evaluation, and write a Hugging Face folder.

torchrun --nproc-per-node 2 examples/codeparrot/train.py FOLDER CONFIG [a.b.c=value ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from completions import EACH, MAX_NEW_TOKENS, PROMPTS

from megatron_wrap.core import MegatronWrap, exit_on_user_error
from megatron_wrap.utils.dist_logger import logger


def complete(wrap: MegatronWrap) -> list[str]:
    """The texts of the completions, the same for the same weights.

    The empty lines before a prompt show that it begins at the margin, and not within a class.
    """
    prompts = ["\n\n" + prompt for prompt in PROMPTS]
    completions = wrap.generate(
        prompts, MAX_NEW_TOKENS, temperature=0.4, seed=0, n=EACH, batch_size=len(PROMPTS) * EACH
    )
    return [completion["text"] or "" for completion in completions]


def main(folder: str, config: str, *overrides: str) -> None:
    """Train, or resume; FOLDER/completions.json has completions by iteration, and the last validation loss.

    They are made before the first step, at the first evaluation after it, and at the end.
    """
    path = Path(folder) / "completions.json"
    completions: dict[str, Any] = json.loads(path.read_text())["completions"] if path.is_file() else {}
    with MegatronWrap(config, overrides=overrides) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        wanted = {0, wrap.config.train.eval_interval, wrap.train_iters}

        def at_evaluations(wrap: MegatronWrap, _: dict[str, float]) -> None:
            if wrap.iteration in wanted:
                completions[str(wrap.iteration)] = complete(wrap)

        if wrap.iteration == 0:
            at_evaluations(wrap, {})
        metrics = wrap.fit(at_evaluations)
        wrap.save_pretrained(str(Path(folder) / "hf"))
        if logger.rank == 0:
            result = {"completions": completions, "validation_loss": metrics["eval/validation/loss"]}
            path.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    with exit_on_user_error():
        main(*sys.argv[1:])
