"""Distillation: a small student learns from a larger teacher, compared with the same student that learns from labels
alone.

python examples/distill/train.py [--on-policy] [a.b=value ...]

A teacher is fine-tuned, then one student on the labels and one on the teacher's distributions and the labels, from the
same initial weights and data. With --on-policy the second student continues on completions that it generates itself
(GKD, arXiv:2306.13649). Each part that has written its folder is not repeated; overrides apply to all parts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_wrap.core import MegatronWrap, exit_on_user_error
from megatron_wrap.utils.dist_logger import logger

HERE = Path(__file__).parent
SFT, DISTILL = HERE / "sft.yaml", HERE / "distill.yaml"
ARCH, TRAIN = "megatron_lm.model.arch", "megatron_lm.train.common"
SIZES = {"num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 352, "num_attention_heads": 8, "num_query_groups": 4}
TEACHER = tuple(f"{ARCH}.{name}={size}" for name, size in SIZES.items())
REVERSE = ("megatron_wrap.flow.beta=1.0", "megatron_wrap.flow.label_weight=0.0")
"""Divergence of the student's own completions, which are no labels."""
MAX_NEW_TOKENS, NUM_EVALUATED = 32, 32


def started(config: Path, folder: Path, overrides: Sequence[str]) -> MegatronWrap:
    """A run that writes to `folder` and is ready to train; close it."""
    wrap = MegatronWrap(config, overrides=[f"megatron_wrap.logger.output_dir={folder}", *overrides])
    wrap.initialize()
    wrap.setup_model_and_optimizer()
    return wrap


def train(config: Path, folder: Path, overrides: Sequence[str]) -> None:
    """Train to the end and write the weights to `folder`, unless it has them."""
    if (folder / "model.safetensors").is_file():
        logger.info_rank_0(f"{folder}: is there already")
        return
    with started(config, folder, overrides) as wrap:
        wrap.fit()
        wrap.save_pretrained(folder)


def compared(folder: Path, overrides: Sequence[str]) -> tuple[float, float]:
    """Cross-entropy of the labels and forward KL divergence from the teacher, per token of the validation set."""
    start = f"megatron_wrap.model_provider.hf_path={folder}"
    with started(DISTILL, folder, [*overrides, start]) as wrap:
        metrics = wrap.evaluate()
    return metrics["eval/validation/nll_loss"], metrics["eval/validation/divergence"]


def prompts_of(file: str, tokenizer: Any) -> list[list[int]]:
    """Token ids of the first user's turn of each conversation, with the beginning of an answer."""
    rows = [json.loads(line)["messages"][:1] for line in Path(file).read_text(encoding="utf-8").splitlines()]
    return [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        for messages in rows
    ]


def completed(wrap: MegatronWrap, prompts: list[list[int]], seed: int) -> list[dict[str, list[int]]]:
    """Samples of `gpt_distill`: the prompts with completions by the student, whose tokens have a loss. Collective."""
    completions = wrap.generate(
        prompts, max_new_tokens=MAX_NEW_TOKENS, temperature=1.0, seed=seed, batch_size=len(prompts)
    )
    return [
        {
            "input_ids": prompt + completion["token_ids"],
            "loss_mask": [0] * len(prompt) + [1] * len(completion["token_ids"]),
        }
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def learn_on_policy(start: Path, folder: Path, iterations: int, overrides: Sequence[str]) -> tuple[float, float]:
    """Train on the student's own completions; their reverse KL divergence for validation prompts, before and after."""
    settings = [*overrides, *REVERSE, f"megatron_wrap.model_provider.hf_path={start}"]
    settings += [f"{TRAIN}.train_iters={iterations}", "megatron_lm.train.learning-rate.lr=1.0e-3"]
    with started(DISTILL, folder, settings) as wrap:
        data = wrap.config.data
        prompts = prompts_of(data.train[0].path, wrap.tokenizer)
        held_out = prompts_of(data.validation["validation"][0].path, wrap.tokenizer)[:NUM_EVALUATED]

        def divergence() -> float:
            return wrap.evaluate({"own": completed(wrap, held_out, seed=0)})["eval/own/divergence"]

        before, size = divergence(), wrap.global_batch_size
        while wrap.iteration < wrap.train_iters:
            start = wrap.iteration * size % (len(prompts) - size)
            wrap.train(completed(wrap, prompts[start : start + size], seed=wrap.iteration + 1))
            wrap.log_last_metrics()
        after = divergence()
        wrap.save_pretrained(folder)
        return before, after


def main(words: list[str] | None = None) -> None:
    """The command line; `words` are those of the program if None."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on-policy", action="store_true", help="continue on the student's own completions")
    parser.add_argument("--iterations", type=int, default=40, help="steps on own completions (default: 40)")
    parser.add_argument("--output", type=Path, default=Path("outputs/distill"), help="folder (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="of sft.yaml and distill.yaml")
    arguments = parser.parse_args(words)
    output, overrides = arguments.output, arguments.overrides
    teacher, labels, distilled = output / "teacher", output / "labels", output / "distilled"
    from_teacher = [*overrides, f"megatron_wrap.models.teacher={{hf_path: {teacher}}}"]
    train(SFT, teacher, [*TEACHER, *overrides])
    train(SFT, labels, overrides)
    train(DISTILL, distilled, from_teacher)
    for name, folder in (("labels alone", labels), ("teacher and labels", distilled)):
        nll, divergence = compared(folder, from_teacher)
        logger.info_rank_0(f"{name}: cross-entropy {nll:.3f}, KL divergence from the teacher {divergence:.3f}")
    if arguments.on_policy:
        before, after = learn_on_policy(distilled, output / "on-policy", arguments.iterations, from_teacher)
        logger.info_rank_0(f"own completions: reverse KL divergence {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    with exit_on_user_error():
        main()
