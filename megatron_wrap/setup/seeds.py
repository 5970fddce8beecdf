"""Seeds of the random generators of a run."""

from __future__ import annotations

import random

import numpy

from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.model.transformer_config import use_transformer_engine
from megatron_wrap.parallel.state import ParallelState
from megatron_wrap.platform.base.platform import Platform


def seed_everything(seed: int, platform: Platform, parallel: ParallelState, generators: str | None = None) -> None:
    """Seed Python, numpy, torch and Megatron-Core's tensor-parallel generators, each pipeline stage differently, as in
    Megatron-LM (megatron/training/initialize.py).

    Args:
        generators: the argument of Megatron-Core's `model_parallel_cuda_manual_seed` that selects another kind of them.
    """
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    stage_seed = seed + 100 * parallel.pp.rank
    random.seed(stage_seed)
    numpy.random.seed(stage_seed)
    platform.seed(stage_seed)
    if generators is None:
        model_parallel_cuda_manual_seed(stage_seed)
    else:
        model_parallel_cuda_manual_seed(stage_seed, **{generators: True}, force_reset_rng=True)


def generators_of_graphs(config: RunConfig, platform: Platform) -> str | None:
    """Argument `generators` for a model whose layers are captured as CUDA graphs, which draw random numbers from them.
    Transformer Engine's attention accepts only its own kind."""
    if not derived.captures_graphs(config.arch):
        return None
    return "te_rng_tracker" if use_transformer_engine(config, platform) else "use_cudagraphable_rng"
