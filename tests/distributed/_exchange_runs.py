"""Functions that the tests of `cp_comm_type` run on each rank."""

from __future__ import annotations

from typing import Any

from _started import started
from layout_runs import CONFIG, token_samples

KEY = "megatron_lm.model.parallel.cp_comm_type"


def train(overrides: tuple[str, ...], steps: int) -> dict[str, Any]:
    """Train up to `steps`, from the last checkpoint if there is one, and save.

    Returns:
        the losses, the loss of an evaluation, generated tokens; cp_comm_type, what set it, and what each layer
        exchanges.
    """
    from megatron_wrap.nn.core_attention import TorchCoreAttention

    with started(CONFIG, overrides) as wrap:
        size = wrap.global_batch_size
        samples = token_samples(size * steps, wrap.config.train.seq_length)
        losses = [wrap.train(samples[step * size : (step + 1) * size])["loss"] for step in range(wrap.iteration, steps)]
        if wrap.config.train.save is not None:
            wrap.save()
        modules = [module for chunk in wrap.state.chunks for module in chunk.modules()]
        return {
            "losses": losses,
            "evaluation": wrap.evaluate({"samples": samples[:size]}),
            "generated": [
                completion["token_ids"] for completion in wrap.generate([[3, 4, 5], [6, 7]], max_new_tokens=6)
            ],
            "value": wrap.config.parallel.cp_comm_type,
            "set by": wrap.config.set_by(KEY).name,
            "exchanges": [core.exchange for core in modules if isinstance(core, TorchCoreAttention)],
        }
