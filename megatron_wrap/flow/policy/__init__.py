"""Policy optimization on rollouts: samples, losses, metrics and keys of `gpt_grpo`."""
