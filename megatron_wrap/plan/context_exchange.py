"""Choice of `cp_comm_type`, the exchange in the attention of context-parallel processes, by the bytes that it sends.

With s tokens in a sequence, cp processes, h query and g key heads on each of them (after tensor parallelism), of sizes
d (queries, keys) and d_v (values), each process sends for a layer and a sequence, in elements, both passes together:

- all_gather: 2 (cp - 1) / cp * s * g (d + d_v): keys and values are gathered, their gradients reduced and scattered.
- a2a: 2 (cp - 1) / cp * s / cp * (h + g') (d + d_v): queries, keys and values, then outputs are exchanged, and their
  gradients; g' = max(g, cp), because key heads that are fewer than the processes are sent to several.
- p2p: 3 (cp - 1) / cp * s * g (d + d_v): keys and values pass around a ring in both passes, their gradients once;
  torch's attention keeps those that arrived last, so it sends s / cp * g (d + d_v) less. With a causal mask it sends
  only half of an earlier rank's keys; this is not counted, since processes differ in it.

So a2a sends less than all_gather if h + g' < cp * g: with cp 2 never, without grouped queries from cp 4 on, with four
query heads for each key head from cp 8 on. With cp 2 the ring of torch's attention sends as much as all_gather.

Only the ring's transfers overlap with attention (`scripts/benchmark/gpu_two.sh` measures the three).
"""

from __future__ import annotations

import math

from megatron_wrap.config.defaults import Choice
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.run import RunConfig

EXCHANGE_KEY = "parallel.cp_comm_type"
_HIDDEN_RING_TOKENS = 2048
"""Tokens of a process from which attention takes longer than the ring's transfers, if key heads have one query head.
A step of the forward pass computes 2 (s / cp)^2 h d FLOPs of causal attention and receives 4 s / cp g d bytes in bf16;
at 290 TFLOP/s (`pipeline_split`) and 300 GB/s between GPUs of a node, both take as long for s / cp = 1,930 g / h."""


def exchange_choice(config: RunConfig, transformer_engine: bool, saved: str | None = None) -> Choice | None:
    """`cp_comm_type` of a run that names none; None: it names one, or sequences are not shared.

    p2p where attention takes longer than the ring's transfers, else the fewest bytes; equal ones: p2p, then all_gather.
    Torch's attention exchanges by all_gather or a2a where `_torch_has_ring` is false, and of a packed row, whose
    documents the configuration does not have, the row's length counts. Transformer Engine's exchanges packed rows by
    p2p only. Its layers keep torch's attention with all_gather for windows and sinks, for which Transformer Engine
    would need a2a.

    Args:
        transformer_engine: whether the layers are Transformer Engine's.
        saved: the value of the checkpoint from which the run continues on the same layout.
    """
    parallel = config.parallel
    if parallel.context_parallel_size == 1 or parallel.cp_comm_type is not None:
        return None
    if saved is not None:
        return Choice(EXCHANGE_KEY, saved, "as in the checkpoint from which the run resumes")
    if transformer_engine and can_use_attention_of_transformer_engine(config):
        return _of_transformer_engine(config)
    if transformer_engine and _only_by_heads(config) and not config.flow.packing:
        return Choice(EXCHANGE_KEY, "all_gather", "windows and sinks are computed by torch's attention")
    return _of_torch(config)


def can_use_attention_of_transformer_engine(config: RunConfig, deterministic: bool = False) -> bool:
    """Whether a backend of Transformer Engine supports the attention (dot_product_attention/utils.py,
    get_attention_backend): sinks not in packed rows before cuDNN 9.18; with context parallelism not fp32, and sliding
    windows and sinks only by all-to-all exchange of heads (`cp_comm_type: a2a`), not of packed rows. Latent
    attention exchanges by `p2p` only (context_parallel.py, attn_forward_func_with_cp, in 2.11). `a2a` needs an even
    number of key heads that the context-parallel size divides, and with sinks a kernel that is not deterministic.

    Args:
        deterministic: whether attention has to use deterministic kernels
            (`torch.are_deterministic_algorithms_enabled`).
    """
    arch = config.arch
    if arch.query_scaling_beta is not None or arch.attn_logit_softcapping is not None:
        return False  # it takes neither positions nor a cap
    if arch.softmax_type != "vanilla" and config.flow.packing:
        return False
    if config.parallel.context_parallel_size == 1:
        return True
    if not (config.dtype.bf16 or config.dtype.fp16):
        return False
    if arch.multi_latent_attention and config.parallel.cp_comm_type not in (None, "p2p"):
        return False
    if config.parallel.cp_comm_type != "a2a":
        return not _only_by_heads(config)
    if not _divides_key_heads(config) or (config.flow.packing and _only_by_heads(config)):
        return False
    return arch.softmax_type == "vanilla" or not deterministic


def _divides_key_heads(config: RunConfig) -> bool:
    """Whether Transformer Engine's attention can give each process an equal share of the key heads."""
    groups = derived.attention_heads_of_process(config)[1]
    return groups % config.parallel.context_parallel_size == 0 and groups % 2 == 0


def exchanged_bytes(config: RunConfig, transformer_engine: bool) -> dict[str, int]:
    """cp_comm_type -> bytes that a process sends in a step for one layer and a sequence of `seq_length` tokens; without
    a2a if the heads cannot be divided.

    Args:
        transformer_engine: whether the attention is Transformer Engine's.
    """
    arch, size = config.arch, config.parallel.context_parallel_size
    width = 2 * derived.kv_channels(arch)
    if arch.multi_latent_attention:
        width = arch.qk_head_dim + arch.qk_pos_emb_head_dim + arch.v_head_dim
    heads, groups = derived.attention_heads_of_process(config)
    element = 2 if config.dtype.bf16 or config.dtype.fp16 else 4
    tokens = config.train.seq_length * (size - 1) // size
    sent = {"all_gather": 2 * tokens * groups * width * element, "p2p": 3 * tokens * groups * width * element}
    if not transformer_engine:
        sent["p2p"] -= config.train.seq_length // size * groups * width * element
    sent_groups = derived.exchanged_groups(config)
    if sent_groups is not None:
        sent["a2a"] = 2 * tokens * (heads + sent_groups) * width * element // size
    return sent


def _only_by_heads(config: RunConfig) -> bool:
    return config.arch.softmax_type != "vanilla" or config.arch.window_size is not None


def _torch_has_ring(config: RunConfig) -> bool:
    """Whether all layers of torch's attention can use the ring (`nn/attention/ring.py`), on a GPU by kernels that store
    no scores: those in half precision."""
    arch = config.arch
    is_exact = arch.attention_dropout == 0.0 and arch.attn_logit_softcapping is None and arch.window_size is None
    return is_exact and (config.dtype.bf16 or config.dtype.fp16)


def _of_torch(config: RunConfig) -> Choice:
    sent = exchanged_bytes(config, transformer_engine=False)
    if not _torch_has_ring(config):
        del sent["p2p"]
        return _fewest(sent, config)
    return _hidden_ring(config) or _fewest(sent, config)


def _of_transformer_engine(config: RunConfig) -> Choice:
    """Choice between p2p and a2a for Transformer Engine's attention."""
    if config.flow.packing or config.arch.multi_latent_attention:
        kind = "packed rows" if config.flow.packing else "latent attention"
        return Choice(EXCHANGE_KEY, "p2p", f"Transformer Engine exchanges no heads of {kind}")
    sent = exchanged_bytes(config, transformer_engine=True)
    del sent["all_gather"]
    if not _divides_key_heads(config):
        sent.pop("a2a", None)
    return _hidden_ring(config) or _fewest(sent, config)


def _hidden_ring(config: RunConfig) -> Choice | None:
    heads, groups = derived.attention_heads_of_process(config)
    tokens = config.train.seq_length // config.parallel.context_parallel_size
    if tokens * heads < _HIDDEN_RING_TOKENS * groups:
        return None
    return Choice(EXCHANGE_KEY, "p2p", f"attention over {tokens:,} tokens of a process hides the ring's transfers")


def _fewest(sent: dict[str, int], config: RunConfig) -> Choice:
    fewest = min(("p2p", "all_gather", "a2a"), key=lambda name: sent.get(name, math.inf))
    others = [f"{name} {sent[name] / 1e6:,.1f} MB" for name in sorted(sent) if name != fewest]
    compared = f", {', '.join(others)}" if others else "; the heads cannot be divided for a2a"
    reason = (
        f"each process sends {sent[fewest] / 1e6:,.1f} MB for a layer and a sequence of "
        f"{config.train.seq_length:,} tokens{compared}"
    )
    return Choice(EXCHANGE_KEY, fewest, reason)
