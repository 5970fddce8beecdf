"""Functions that the checkpoint tests run on each rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import _started
import numpy
from _started import refusal_of, train_until

CONFIG = Path(__file__).parent / "layouts.yaml"
ARCH, TRAIN, PARALLEL = "megatron_lm.model.arch", "megatron_lm.train.common", "megatron_lm.model.parallel"
OPTIMIZER = "megatron_lm.train.optimizer"
VOCAB = 300
"""Padded to 384 rows on one tensor-parallel rank and to 512 on two."""

TP2 = (f"{PARALLEL}.tensor_model_parallel_size=2", f"{PARALLEL}.sequence_parallel=true")
PP2 = (f"{PARALLEL}.pipeline_model_parallel_size=2",)
PP2_VPP2 = (*PP2, f"{PARALLEL}.num_layers_per_virtual_pipeline_stage=1")
CP2 = (f"{PARALLEL}.context_parallel_size=2",)
DISTRIBUTED = (f"{OPTIMIZER}.use_distributed_optimizer=true",)
OVERLAP = ("megatron_lm.misc.ddp.overlap_grad_reduce=true", "megatron_lm.misc.ddp.overlap_param_gather=true")
BF16 = ("megatron_lm.train.dtype.__select__=bf16",)
FP16 = ("megatron_lm.train.dtype.__select__=fp16", "megatron_lm.train.dtype.initial_loss_scale=65536")
SGD = (f"{OPTIMIZER}.__select__=sgd",)
MUON = (f"{OPTIMIZER}.__select__=muon",)
EXPERTS = (
    *(f"{ARCH}.num_experts=4", f"{ARCH}.moe_ffn_hidden_size=64", f"{ARCH}.moe_layer_freq=[0,1,1,1]"),
    *(f"{ARCH}.moe_router_score_function=sigmoid", f"{ARCH}.moe_router_enable_expert_bias=true"),
    *(f"{ARCH}.moe_shared_expert_intermediate_size=64", f"{ARCH}.moe_shared_expert_gate=true"),
)
ONLY_EP2 = (f"{PARALLEL}.expert_model_parallel_size=2",)
EP2 = (*EXPERTS, *ONLY_EP2)
MLA = (
    *(f"{ARCH}.multi_latent_attention=true", f"{ARCH}.num_query_groups=null", f"{ARCH}.qk_layernorm=true"),
    *(f"{ARCH}.q_lora_rank=16", f"{ARCH}.kv_lora_rank=16", f"{ARCH}.qk_head_dim=8"),
    *(f"{ARCH}.qk_pos_emb_head_dim=8", f"{ARCH}.v_head_dim=8"),
)
ETP1 = (f"{PARALLEL}.expert_tensor_parallel_size=1",)
TIED = (f"{ARCH}.untie_embeddings_and_output_weights=false",)
DROPOUT = (f"{ARCH}.hidden_dropout=0.1", f"{ARCH}.attention_dropout=0.1")
FROZEN = (f"{TRAIN}.freeze=[embedding, 'decoder.layers.[01].*']",)
"""With PP 2, all parameters of the first stage."""


STEPS, SAVED, BATCH, MOST_STEPS = 4, 2, 4, 6
"""Iterations of a run, the one that is saved in its middle, samples of an iteration, and iterations with samples."""


GPT_OSS = tuple(
    f"megatron_lm.model.arch.{text}"
    for text in (
        *("softmax_type=learnable", "window_size=[7,0]", "window_attn_skip_freq=2", "add_bias_linear=true"),
        *("swiglu=false", "quick_geglu=true", "glu_linear_offset=1.0", "activation_func_clamp_value=7.0"),
        *("num_experts=4", "moe_ffn_hidden_size=64", "moe_layer_freq=[0,1,1,1]"),
    )
)
OLMO = tuple(
    f"megatron_lm.model.arch.{text}"
    for text in ("norm_placement=after", "qk_layernorm=true", "qk_layernorm_type=per_layer")
)


LINEAR = tuple(
    f"megatron_lm.model.arch.{text}"
    for text in (
        *("experimental_attention_variant=gated_delta_net", "linear_attention_freq=[1,1,0,1]"),
        *("linear_num_key_heads=2", "linear_num_value_heads=6", "linear_key_head_dim=8", "linear_value_head_dim=12"),
        *("attention_output_gate=true", "apply_layernorm_1p=true", "qk_layernorm=true"),
    )
)


def samples() -> list[dict[str, list[int]]]:
    """Tokenized samples of unequal lengths for `MOST_STEPS` iterations."""
    generator = numpy.random.default_rng(11)
    lengths = [int(length) for length in generator.integers(12, 33, MOST_STEPS * BATCH)]
    return [{"input_ids": generator.integers(0, VOCAB, n).tolist(), "loss_mask": [1] * n} for n in lengths]


def started(folder: str | Path, overrides: tuple[str, ...] = ()) -> AbstractContextManager[Any]:
    """A run with checkpoints in `folder`, resumed if it contains one."""
    common = (
        f"{ARCH}.vocab_size={VOCAB}",
        f"{TRAIN}.global_batch_size={BATCH}",
        f"{TRAIN}.micro_batch_size=1",
        f"{TRAIN}.seq_length=32",
        f"{TRAIN}.save={folder}",
        f"megatron_wrap.logger.output_dir={folder}/records",
    )
    return _started.started(CONFIG, [*common, *overrides])


def train(
    folder: str | Path, overrides: tuple[str, ...] = (), until: int = STEPS, save_at: tuple[int, ...] = ()
) -> list[tuple[float, ...]]:
    """Train to iteration `until`; loss, grad_norm, learning rate and loss scale of each step taken here."""
    with started(folder, overrides) as wrap:
        taken = train_until(wrap, samples(), until, save_at)
    return [tuple(step[name] for name in ("loss", "grad_norm", "learning_rate", "loss_scale")) for step in taken]


def refusal(folder: str | Path, overrides: tuple[str, ...] = ()) -> str:
    """The message of the error that a run on `folder` raises."""
    return refusal_of(train, folder, overrides, 0)


def in_new_processes(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The result of `function` on each of `count` ranks, in new processes that end with this call."""
    from megatron_wrap.testing.ranks import RankPool, import_for_ranks

    import_for_ranks()
    pool = RankPool(count, timeout_seconds=90)
    try:
        return pool.run(function, *arguments)
    finally:
        pool.close()


def state_digest(wrap: Any) -> str:
    """A hash of all weights and optimizer states of this rank."""
    import hashlib

    state = wrap.state
    digest = hashlib.sha256()
    tensors = [parameter for chunk in state.chunks for parameter in chunk.parameters()]
    for part in state.optimizer.chained_optimizers:
        tensors += [value for entry in part.optimizer.state.values() for _, value in sorted(entry.items())]
    for tensor in tensors:
        digest.update(tensor.detach().float().numpy().tobytes())
    return digest.hexdigest()
