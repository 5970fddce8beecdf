"""The task of every program: the sizes of a run's model and batch, its tokens, and the clock of its steps."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy
import torch

from comparison.length_mix import length_mix
from megatron_wrap.bridge.adapters.trained_parameters import trained_shape
from megatron_wrap.bridge.export.export_format import export_format
from megatron_wrap.config import RunConfig
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.model import AdapterConfig, ArchConfig
from megatron_wrap.errors import ConfigError
from megatron_wrap.plan.flops import tflops_per_device, training_flops

FORCED_BALANCE = "moe_router_force_load_balancing"


@dataclass(frozen=True)
class Task:
    """A training job on random tokens: a model of any Hugging Face family, of which all weights or an adapter are
    trained. Sizes are global. Programs other than Megatron-Core's train without model parallelism."""

    config: str
    """Path of the run's YAML, which megatron-wrap trains."""
    overrides: tuple[str, ...]
    platform: str
    """Platform, "cuda" or "cpu"."""
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    """Vocabulary size with padding; each program has this many rows."""
    rotary_base: float
    norm_epsilon: float
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    bf16: bool
    lr: float
    weight_decay: float
    adam_betas: tuple[float, float]
    adam_eps: float
    clip_grad: float
    world_size: int
    warmup: int
    """Number of steps before the measured ones, at least 1."""
    steps: int
    """Number of measured steps."""
    hf_config: dict[str, Any]
    """Content of config.json of the model, which transformers builds."""
    token_flops: float
    """Model FLOPs of training one token, without the FLOPs that grow with the square of its sequence's length."""
    square_flops: float
    """Model FLOPs of training a sequence, per square of its length."""
    no_bare_loop: str
    """Description of the parts of this model that the bare loop lacks; empty: it trains the same model."""
    qk_layernorm: bool = False
    num_experts: int = 0
    """Number of experts of each layer; 0: a dense model."""
    experts_per_token: int = 0
    expert_width: int = 0
    """Intermediate size of one expert."""
    shared_expert_width: int = 0
    """Intermediate size of the shared experts; 0: there are none."""
    score_function: str = "softmax"
    """Function from the router's logits to scores; with "sigmoid" there is also a bias for balance, as in
    DeepSeek-V3."""
    num_groups: int | None = None
    """Number of groups of experts, of which `group_topk` are chosen first; None: no groups."""
    group_topk: int | None = None
    scaling_factor: float | None = None
    """Factor of the experts' weights; None: 1."""
    balancing: str = "aux_loss"
    """Megatron-Core's kind of auxiliary loss; transformers has none in training."""
    aux_loss_coeff: float = 0.0
    router_dtype: str | None = None
    forced_balance: bool = False
    """Whether random logits choose the experts, where the program can do this."""
    expert_parallel: int = 1
    tensor_parallel: int = 1
    """Size of tensor parallelism; above 1 with sequence parallelism."""
    context_parallel: int = 1
    exchange: str | None = None
    """Megatron-Core's cp_comm_type; None: the program's default."""
    pipeline_parallel: int = 1
    virtual_stages: int = 1
    """Number of model chunks on each pipeline stage."""
    lora_rank: int = 0
    """Rank of adapters for all linear layers, without dropout; 0: all weights are trained."""
    lora_alpha: float = 0.0
    mixed_lengths: bool = False
    """Whether samples have the lengths of `length_mix`, the same in each step; no program pads them."""
    kv_lora_rank: int = 0
    """Width of the latent vector of keys and values; 0: attention is not latent, and the following four sizes have no
    effect."""
    q_lora_rank: int = 0
    qk_head_dim: int = 0
    """Width of a head without its rotary part."""
    qk_pos_emb_head_dim: int = 0
    v_head_dim: int = 0
    recompute: bool = False
    """Whether only the input of each layer is kept, and the backward pass computes the layer again."""

    @property
    def device(self) -> torch.device:
        """Device of this process; the coordinator shows each process only its GPUs."""
        import os

        return torch.device(self.platform, int(os.environ.get("LOCAL_RANK", "0")) if self.platform == "cuda" else None)

    @property
    def model_parallel(self) -> int:
        """Number of processes that share a replica."""
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel

    @property
    def num_replicas(self) -> int:
        """Number of replicas, the size of data parallelism."""
        return self.world_size // self.model_parallel

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches of each replica in a step."""
        return self.global_batch_size // (self.micro_batch_size * self.num_replicas)

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens of all replicas in a step; there is no padding."""
        return sum(self.sample_lengths)

    @property
    def sample_lengths(self) -> list[int]:
        """Number of tokens with a loss in each sample of a step."""
        if self.mixed_lengths:
            return length_mix(self.global_batch_size, self.seq_length)
        return [self.seq_length] * self.global_batch_size

    def tflops(self, step_seconds: float) -> float:
        """Model TFLOP/s of each device, by one formula for all programs."""
        squares = sum(length**2 for length in self.sample_lengths)
        flops = self.token_flops * self.tokens_per_step + self.square_flops * squares
        return tflops_per_device(flops, step_seconds, self.world_size)

    def token_rows(self) -> numpy.ndarray:
        """The samples in order, int64 [(warmup + steps) * global_batch_size, seq_length + 1], the same in every
        program. Frequencies of tokens fall as 1 / rank, as those of words do, so that a falling loss shows learning."""
        count = (self.warmup + self.steps) * self.global_batch_size
        uniform = numpy.random.default_rng(0).random((count, self.seq_length + 1))
        return (self.vocab_size**uniform).astype(numpy.int64) - 1

    def samples(self) -> list[list[int]]:
        """The rows as lists of tokens, cut to the samples' lengths; each list has one token more, which is only a
        label."""
        lengths = self.sample_lengths * (self.warmup + self.steps)
        pairs = zip(self.token_rows().tolist(), lengths, strict=True)
        return [row[: length + 1] for row, length in pairs]

    def as_json(self) -> dict[str, Any]:
        """Values of the fields by name."""
        return asdict(self)


def task_of(
    config: RunConfig, path: str, overrides: tuple[str, ...], platform: str, world_size: int, warmup: int, steps: int
) -> Task:
    """The task of a run's configuration.

    Raises:
        ConfigError: the other programs do not have this model or layout.
        UnsupportedModel: no Hugging Face family can express the model.
    """
    arch, train, optim = config.arch, config.train, config.optimizer
    _refuse_other_settings(config)
    layout = _layout(config, world_size, path)
    multiple = arch.make_vocab_size_divisible_by
    vocab_size = -(-(arch.vocab_size or 0) // multiple) * multiple
    return Task(
        config=path,
        overrides=overrides,
        platform=platform,
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=derived.ffn_hidden_size(arch),
        num_attention_heads=arch.num_attention_heads,
        num_query_groups=derived.num_query_groups(arch),
        kv_channels=derived.kv_channels(arch),
        vocab_size=vocab_size,
        rotary_base=arch.rotary_base,
        norm_epsilon=arch.norm_epsilon,
        seq_length=train.seq_length,
        micro_batch_size=train.micro_batch_size,
        global_batch_size=train.global_batch_size,
        bf16=config.dtype.bf16,
        lr=config.learning_rate.lr,
        weight_decay=optim.weight_decay,
        adam_betas=(optim.adam_beta1, optim.adam_beta2),
        adam_eps=optim.adam_eps,
        clip_grad=optim.clip_grad,
        world_size=world_size,
        warmup=warmup,
        steps=steps,
        no_bare_loop=_not_in_the_bare_loop(config, platform),
        recompute=config.recompute.recompute_granularity == "full",
        qk_layernorm=arch.qk_layernorm,
        num_experts=arch.num_experts or 0,
        experts_per_token=arch.moe_router_topk if arch.num_experts else 0,
        expert_width=derived.moe_ffn_hidden_size(arch) if arch.num_experts else 0,
        aux_loss_coeff=float(arch.moe_aux_loss_coeff) if arch.num_experts else 0.0,  # type: ignore[arg-type]
        router_dtype=arch.moe_router_dtype,
        forced_balance=bool(arch.upstream.get(FORCED_BALANCE)),
        **layout,
        lora_rank=config.adapter.r if config.adapter.adapter_type == "lora" else 0,
        lora_alpha=config.adapter.lora_alpha,
        mixed_lengths=config.flow.packing,
        **_of_the_family(config, vocab_size),
        **(_deepseek_fields(arch) if arch.multi_latent_attention else {}),
    )


def _layout(config: RunConfig, world_size: int, path: str) -> dict[str, Any]:
    """Fields of the parallel sizes, which must fit the devices and the batch."""
    parallel, train = config.parallel, config.train
    layout = {
        "tensor_parallel": parallel.tensor_model_parallel_size,
        "context_parallel": parallel.context_parallel_size,
        "pipeline_parallel": parallel.pipeline_model_parallel_size,
    }
    shared = math.prod(layout.values())
    if world_size % shared:
        raise ConfigError(f"{path}: {shared} processes share the model, and there are {world_size}; change the layout")
    replicas = world_size // shared
    if train.global_batch_size % (train.micro_batch_size * replicas):
        raise ConfigError(
            f"{path}: global_batch_size {train.global_batch_size} is no multiple of micro_batch_size "
            f"{train.micro_batch_size} on {replicas} replicas; change one of them"
        )
    chunks = derived.virtual_pipeline_size(config) or 1
    experts = parallel.expert_model_parallel_size
    return {**layout, "virtual_stages": chunks, "expert_parallel": experts, "exchange": parallel.cp_comm_type}


def _of_the_family(config: RunConfig, vocab_size: int) -> dict[str, Any]:
    """Content of config.json, without forced balance, which is no property of the model, and the model's FLOPs."""
    upstream = {key: value for key, value in config.arch.upstream.items() if key != FORCED_BALANCE}
    balanced_by_itself = replace(config, arch=replace(config.arch, upstream=upstream))
    flops = training_flops(trained_shape(balanced_by_itself, vocab_size))
    return {
        "hf_config": {**export_format(balanced_by_itself).config_json("bfloat16"), "vocab_size": vocab_size},
        "token_flops": flops.per_token,
        "square_flops": flops.per_square,
    }


def _deepseek_fields(arch: ArchConfig) -> dict[str, Any]:
    return {
        "shared_expert_width": arch.moe_shared_expert_intermediate_size,
        "score_function": arch.moe_router_score_function,
        "num_groups": arch.moe_router_num_groups,
        "group_topk": arch.moe_router_group_topk,
        "scaling_factor": arch.moe_router_topk_scaling_factor,
        "balancing": arch.moe_router_load_balancing_type,
        "kv_lora_rank": arch.kv_lora_rank,
        "q_lora_rank": arch.q_lora_rank,
        "qk_head_dim": arch.qk_head_dim,
        "qk_pos_emb_head_dim": arch.qk_pos_emb_head_dim,
        "v_head_dim": arch.v_head_dim,
    }


def _not_in_the_bare_loop(config: RunConfig, platform: str) -> str:
    """Description of the parts of the model that the bare loop lacks. It has an untied Llama, and Qwen3 and DeepSeek-V3
    with experts in all layers, and recomputes nothing."""
    arch = config.arch
    expected: dict[str, Any] = {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": arch.num_experts is not None,
        "use_rope_scaling": False,
        "untie_embeddings_and_output_weights": True,
        "multi_latent_attention": False,
        "moe_shared_expert_intermediate_size": None,
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "softmax",
        "moe_layer_freq": 1,
        "window_size": None,
        "norm_placement": "before",
        "qk_layernorm_type": "per_head",
        "embedding_multiplier": None,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "attention_output_gate": False,
        "experimental_attention_variant": None,
    }
    if arch.multi_latent_attention and arch.num_experts is not None:
        del expected["moe_shared_expert_intermediate_size"]
        deepseek = {"multi_latent_attention": True, "moe_router_score_function": "sigmoid", "rope_type": "rope"}
        expected |= {**deepseek, "moe_router_enable_expert_bias": True, "moe_shared_expert_gate": False}
    other = [f"{name} {getattr(arch, name)!r}" for name, value in expected.items() if getattr(arch, name) != value]
    other += ["recomputed activations"] if config.recompute.recompute_granularity else []
    if platform == "cpu" and config.parallel.context_parallel_size > 1:
        other.append("context parallelism without Transformer Engine")
    return ", ".join(other)


def _refuse_other_settings(config: RunConfig) -> None:
    arch = config.arch
    wrong = [f"{name} {getattr(arch, name)}" for name in ("hidden_dropout", "attention_dropout") if getattr(arch, name)]
    if arch.vocab_size is None:
        wrong.append("vocab_size null")
    adapter, shared = vars(config.adapter), ("adapter_type", "r", "lora_alpha")
    other = [key for key, value in vars(AdapterConfig()).items() if key not in shared and adapter[key] != value]
    wrong += [f"adapter.{key} {adapter[key]!r}" for key in other]
    if wrong:
        raise ConfigError(
            "the programs are compared without dropout and with the same adapters, not with "
            f"{', '.join(wrong)}; override these keys"
        )


class StepClock:
    """Records the time of its own creation and of the end of each step. On a GPU the times are events in the stream, so
    that the program need not wait for its GPU."""

    def __init__(self, task: Task) -> None:
        self._cuda = task.platform == "cuda"
        self._warmup = task.warmup
        self._ends: list[Any] = []
        self.step_ends()

    def step_ends(self) -> None:
        """Call after each step."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._ends.append(event)
        else:
            self._ends.append(time.perf_counter())

    def measured_seconds(self) -> list[float]:
        """Seconds of each step after the warm-up."""
        ends = self._ends[self._warmup :]
        pairs = list(itertools.pairwise(ends))
        if self._cuda:
            torch.cuda.synchronize()
            return [before.elapsed_time(after) / 1e3 for before, after in pairs]
        return [after - before for before, after in pairs]


@dataclass(frozen=True)
class Outcome:
    """The result of one run, on one process."""

    step_seconds: list[float]
    """Seconds of each measured step."""
    losses: list[float]
    """Mean loss of each step, the warm-up included, of this replica or of all, as the program reports it."""
    notes: str = ""
    """Layout and settings of the run, as text."""
