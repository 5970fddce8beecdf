"""Policy optimization (GRPO) with rollouts by `wrap.generate`: a random model learns to add 1 to digits.

python examples/grpo/train.py [a.b=value ...]
torchrun --nproc-per-node 2 examples/grpo/train.py --updates 2

Each iteration completes 64 prompts eight times, rewards the completions, and takes an optimization step. A run that was
interrupted resumes from its last checkpoint. In the output folder, rollouts.jsonl has completions of every rollout, and
held-out.jsonl the mean reward on prompts that are not trained on.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import task

from megatron_wrap.core import MegatronWrap, exit_on_user_error
from megatron_wrap.errors import ConfigError
from megatron_wrap.utils.dist_logger import logger

CONFIG = Path(__file__).with_name("grpo.yaml")


class JsonLines:
    """A file of one JSON object with an `iteration` in each line, written by global rank 0.

    Args:
        iteration: of the resumed run; lines of this and later iterations are removed, because the run repeats them.
    """

    def __init__(self, path: Path, iteration: int) -> None:
        self._path = path if torch.distributed.get_rank() == 0 else None
        if self._path is not None:
            lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.is_file() else []
            whole = [line for line in lines if line.endswith("}")]  # the last line may be incomplete
            kept = [line + "\n" for line in whole if json.loads(line)["iteration"] < iteration]
            self._path.write_text("".join(kept), encoding="utf-8")

    def write(self, **values: Any) -> None:
        """Append a line."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")


def roll_out(wrap: MegatronWrap, prompts: list[str], num_completions: int, seed: int) -> list[dict[str, Any]]:
    """Samples of `gpt_grpo`: completions of each prompt, with their log-probabilities and rewards. Collective.

    Another rollout engine replaces this function; docs/policy.md shows it for vLLM.
    """
    completions = wrap.generate(
        prompts,
        n=num_completions,
        max_new_tokens=task.MAX_NEW_TOKENS,
        temperature=1.0,
        seed=seed,
        batch_size=len(prompts) * num_completions,
        log_probs=True,
    )
    return [
        {
            "prompt_ids": wrap.tokenizer(prompt)["input_ids"],
            "response_ids": completion["token_ids"],
            "rollout_log_probs": completion["log_probs"],
            "reward": task.reward_of(prompt, completion["text"] or ""),
            "group": prompt,
            "truncated": completion["finish_reason"] == "length",
            "text": completion["text"],  # for the log
        }
        for index, completion in enumerate(completions)
        for prompt in [prompts[index // num_completions]]
    ]


def held_out_reward(wrap: MegatronWrap, prompts: list[str]) -> float:
    """Mean reward of the most probable completions of prompts that are not trained on. Collective."""
    completions = wrap.generate(prompts, max_new_tokens=task.MAX_NEW_TOKENS, batch_size=len(prompts))
    rewards = [task.reward_of(prompt, each["text"] or "") for prompt, each in zip(prompts, completions, strict=True)]
    return sum(rewards) / len(rewards)


def check_intervals(wrap: MegatronWrap, arguments: argparse.Namespace) -> None:
    """No rollout spans a checkpoint or an evaluation, so that a resumed run begins with a new rollout.

    Raises:
        ConfigError: a number of iterations is not a multiple of the updates of a rollout, or the batch is not a
            multiple of the completions of a prompt.
    """
    train = wrap.config.train
    numbers = {name: getattr(train, name) for name in ("train_iters", "save_interval", "eval_interval")}
    for name, number in numbers.items():
        if number and number % arguments.updates:
            raise ConfigError(
                f"megatron_lm.train.common.{name} {number} must be a multiple of --updates {arguments.updates}"
            )
    if wrap.global_batch_size % arguments.completions:
        raise ConfigError(
            f"megatron_lm.train.common.global_batch_size {wrap.global_batch_size} must be a multiple of --completions "
            f"{arguments.completions}"
        )


def optimize(wrap: MegatronWrap, arguments: argparse.Namespace) -> None:
    """Rollouts and optimization steps until the end of the run, or until the held-out reward is reached."""
    prompts, held_out = task.split_prompts()
    bound, constant = task.best_constant(held_out)
    logger.info_rank_0(f"the best constant completion, {constant!r}, has a held-out reward of {bound:.3f}")
    rollouts = JsonLines(wrap.output_dir / "rollouts.jsonl", wrap.iteration)
    rewards = JsonLines(wrap.output_dir / "held-out.jsonl", wrap.iteration)
    num_prompts, difference = wrap.global_batch_size // arguments.completions, 0.0
    while True:
        iteration = wrap.iteration
        if wrap.evaluation_due or iteration == wrap.train_iters:
            reward = held_out_reward(wrap, held_out)
            rewards.write(iteration=iteration, reward=reward, best_constant=bound)
            logger.info_rank_0(
                f"iteration {iteration}: held-out reward {reward:.3f}; log-probabilities of rollout and training differ"
                f" at most by {difference:.1e}"
            )
            if iteration == wrap.train_iters or (arguments.until is not None and reward >= arguments.until):
                return
        # drawn from seed and iteration alone, so that a resumed run continues with the same rollouts
        seed = wrap.config.train.seed * 1_000_000 + iteration
        chosen = random.Random(seed).sample(prompts, num_prompts)
        batch = roll_out(wrap, chosen, arguments.completions, seed)
        shown = batch[: arguments.completions]
        rollouts.write(
            iteration=iteration,
            prompt=chosen[0],
            answer=task.answer_of(chosen[0]),
            completions=[sample["text"] for sample in shown],
            rewards=[sample["reward"] for sample in shown],
        )
        if arguments.updates > 1:
            for sample, outputs in zip(batch, wrap.forward(batch), strict=True):
                sample["old_log_probs"] = outputs["log_probs"]
        for _ in range(arguments.updates):
            metrics = wrap.train(batch)
            wrap.log_last_metrics()
        difference = max(difference, metrics["sampling/sampling_logp_difference/max"])


def main(words: list[str] | None = None) -> None:
    """The command line; `words` are those of the program if None."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=8, help="completions of a prompt (default: 8)")
    parser.add_argument("--updates", type=int, default=1, help="optimization steps on a rollout (default: 1)")
    parser.add_argument("--until", type=float, help="end the run at this held-out reward")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="of grpo.yaml")
    arguments = parser.parse_args(words)
    with MegatronWrap(CONFIG, overrides=arguments.overrides) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        check_intervals(wrap, arguments)
        optimize(wrap, arguments)
        wrap.save()


if __name__ == "__main__":
    with exit_on_user_error():
        main()
