"""What a rank does for the tests of generation, and what transformers generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _bridge_runs import CONFIG, VOCAB


def prompts(count: int = 5) -> list[list[int]]:
    """Random prompts of unequal length, the first not the shortest."""
    import numpy

    random = numpy.random.default_rng(5)
    return [random.integers(0, VOCAB, length).tolist() for length in (9, 3, 17, 5, 1, 12, 4)[:count]]


def expected(folder: Path, max_new_tokens: int) -> list[list[int]]:
    """The greedy new tokens of transformers, each prompt alone."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
        )
        found.append(output[0, len(prompt) :].tolist())
    return found


def generate(folder: str, overrides: tuple[str, ...], outputs: str, calls: list[dict[str, Any]]) -> Any:
    """The results of some calls of `wrap.generate` on this rank's layout, each with the arguments of `calls`."""
    from megatron_wrap.core import MegatronWrap

    with MegatronWrap.from_pretrained(
        folder, CONFIG, [*overrides, f"megatron_wrap.logger.output_dir={outputs}"]
    ) as wrap:
        wrap.initialize()
        wrap.setup_model()
        return [wrap.generate(**call) for call in calls]
