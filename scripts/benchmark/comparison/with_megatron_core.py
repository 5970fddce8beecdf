"""A training loop on Megatron-Core alone, as in a plain script, with the flags that its user chooses."""

from __future__ import annotations

import functools
import gc
import inspect
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed

from comparison.flags import Flags
from comparison.task import Outcome, StepClock, Task


def run(task: Task, options: dict[str, Any]) -> Outcome:
    """Train with `options["flags"]`."""
    flags = Flags(**options["flags"])
    if task.platform == "cpu":
        from megatron_wrap.platform import choose_platform

        choose_platform("cpu").install()  # Megatron-Core does not run on a CPU without it
    _start(task)
    try:
        if flags.user_buffers:
            _start_user_buffers(task)
        return _train(task, flags)
    finally:
        if flags.user_buffers:
            from transformer_engine.pytorch.module.base import destroy_ub

            destroy_ub()
        gc.enable()
        gc.unfreeze()
        from megatron_wrap.parallel.state import destroy_parallel_state

        destroy_parallel_state()  # all groups at once; Megatron-Core's own function leaves them to torch, one by one
        torch.distributed.destroy_process_group()


def _start(task: Task) -> None:
    from megatron.core import parallel_state, tensor_parallel

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)
    cuda = task.platform == "cuda"
    if cuda:
        torch.cuda.set_device(task.device)
    torch.distributed.init_process_group("nccl" if cuda else "gloo", device_id=task.device if cuda else None)
    parallel_state.initialize_model_parallel(
        task.tensor_parallel,
        task.pipeline_parallel,
        task.virtual_stages if task.virtual_stages > 1 else None,
        context_parallel_size=task.context_parallel,
        expert_model_parallel_size=task.expert_parallel,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)


def _start_user_buffers(task: Task) -> None:
    """Start user buffers as Megatron-LM does (megatron/training/initialize.py, _initialize_tp_communicators)."""
    from transformer_engine.pytorch.module.base import UserBufferQuantizationMode, initialize_ub

    tokens = task.seq_length * task.micro_batch_size // task.context_parallel
    initialize_ub(
        [tokens, task.hidden_size],
        task.tensor_parallel,
        quantization_modes=[UserBufferQuantizationMode.NONE],
        bootstrap_backend="nccl",
    )


def _train(task: Task, flags: Flags) -> Outcome:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks, optimizer = _build(task, flags)
    positions = torch.arange(task.seq_length, device=task.device).expand(task.micro_batch_size, -1)
    mask = None
    if flags.implementation == "local":
        square = torch.ones(1, 1, task.seq_length, task.seq_length, device=task.device, dtype=torch.bool)
        mask = torch.triu(square, 1)

    def forward_step(iterator: Iterator[torch.Tensor], module: torch.nn.Module) -> Any:
        tokens = next(iterator).to(task.device, non_blocking=True)
        rows = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), "positions": positions}
        if task.context_parallel > 1:
            rows = part_of_this_rank(rows)
        mean = functools.partial(_mean, context_parallel=task.context_parallel)
        return module(rows["tokens"], rows["positions"], mask, labels=rows["labels"]), mean

    steps = _steps(task)
    step, clock, losses = get_forward_backward_func(), StepClock(task), []
    if not flags.collect_garbage:
        gc.collect()
        gc.freeze()
        gc.disable()
    for micro_batches in steps:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reported = step(
            forward_step_func=forward_step,
            data_iterator=[iter(micro_batches) for _ in chunks] if len(chunks) > 1 else iter(micro_batches),
            model=chunks,
            num_microbatches=task.num_microbatches,
            seq_length=task.seq_length,
            micro_batch_size=task.micro_batch_size,
            forward_only=False,
        )
        optimizer.step()
        clock.step_ends()
        if reported:
            losses.append(torch.stack([micro_batch["loss"] for micro_batch in reported]).mean())
    seconds = clock.measured_seconds()
    outcome = Outcome(seconds, _of_the_replica(task, losses), flags.text())
    for chunk in chunks if flags.overlap else ():
        chunk.disable_forward_pre_hook(param_sync=False)  # with these hooks the model is never freed
    # fp32 shards of the distributed optimizer are views, whose graphs lead back to it where the collector cannot see
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        vars(part).clear()
    return outcome


def part_of_this_rank(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows [b, s] of the dictionary cut to this process's positions under context parallelism, [b, s / size] each;
    changes the dictionary."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    needs_kind = "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters  # from 0.19 on
    kind = {"is_hybrid_cp": False} if needs_kind else {}
    part: dict[str, torch.Tensor] = get_batch_on_this_cp_rank(
        rows, cp_group=parallel_state.get_context_parallel_group(), **kind
    )
    return part


def _mean(output: torch.Tensor, context_parallel: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mean loss over this process's positions, divided by the size of context parallelism: the schedule multiplies
    by it, which suits a mean over all positions."""
    loss = output.float().mean()
    return loss / context_parallel, {"loss": loss.detach()}


def _of_the_replica(task: Task, losses: list[torch.Tensor]) -> list[float]:
    """Loss of each step over all positions of the replica; only processes of the last pipeline stage have `losses`."""
    from megatron.core import parallel_state

    shown = torch.stack(losses) if losses else torch.empty(task.warmup + task.steps, device=task.device)
    if task.pipeline_parallel > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        torch.distributed.broadcast(shown, last, parallel_state.get_pipeline_model_parallel_group())
    if task.context_parallel > 1:
        torch.distributed.all_reduce(shown, group=parallel_state.get_context_parallel_group())
        shown /= task.context_parallel
    values: list[float] = shown.tolist()
    return values


def _steps(task: Task) -> list[tuple[torch.Tensor, ...]]:
    """This replica's micro-batches of each step, for a GPU in page-locked memory that it reads directly."""
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    rows = torch.from_numpy(task.token_rows()).view(task.warmup + task.steps, task.global_batch_size, -1)
    share = task.global_batch_size // task.num_replicas
    replica_rows = rows[:, rank * share : (rank + 1) * share].contiguous()
    if task.platform == "cuda":
        replica_rows = replica_rows.pin_memory()
    return [step.split(task.micro_batch_size) for step in replica_rows]


def _build(task: Task, flags: Flags) -> tuple[list[Any], Any]:
    """Build the model chunks in Megatron-Core's DDP, and the optimizer."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = _transformer_config(task, flags)
    distributed = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=task.world_size > 1 or task.platform == "cuda",
        overlap_grad_reduce=flags.overlap,
        overlap_param_gather=flags.overlap,
        bucket_size=40_000_000 if flags.overlap else None,
    )
    chunks = [
        DistributedDataParallel(config, distributed, _model(task, flags, config, stage), disable_bucketing=stage > 0)
        for stage in range(task.virtual_stages)
    ]
    settings = OptimizerConfig(
        optimizer="adam",
        lr=task.lr,
        bf16=task.bf16,
        params_dtype=torch.bfloat16 if task.bf16 else torch.float32,
        use_distributed_optimizer=distributed.use_distributed_optimizer,
        clip_grad=task.clip_grad,
        weight_decay=task.weight_decay,
        adam_beta1=task.adam_betas[0],
        adam_beta2=task.adam_betas[1],
        adam_eps=task.adam_eps,
        overlap_param_gather=flags.overlap,
    )
    optimizer = get_megatron_optimizer(settings, chunks)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if flags.overlap:
        functions = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = functions if len(functions) > 1 else functions[0]
    return chunks, optimizer


def _model(task: Task, flags: Flags, config: Any, stage: int) -> Any:
    """Build the model chunk of a virtual stage."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module

    interleaved = {"ignore_virtual": False, "vp_stage": stage} if task.virtual_stages > 1 else {}
    model: Any = GPTModel(
        config=config,
        transformer_layer_spec=_layers(task, flags),
        vocab_size=task.vocab_size,
        max_sequence_length=task.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(**interleaved),
        post_process=parallel_state.is_pipeline_last_stage(**interleaved),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=int(task.rotary_base),
        vp_stage=stage if task.virtual_stages > 1 else None,
    ).to(task.device)
    return Float16Module(config, model) if task.bf16 else model


def _layers(task: Task, flags: Flags) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )

    local = flags.implementation == "local"
    arguments: dict[str, Any] = {"qk_layernorm": task.qk_layernorm}
    if task.num_experts:
        arguments |= {"num_experts": task.num_experts, "moe_grouped_gemm": not local}
    if task.kv_lora_rank:
        arguments["multi_latent_attention"] = True
    if local:
        return get_gpt_layer_local_spec(normalization="RMSNorm", **arguments)
    return get_gpt_layer_with_transformer_engine_spec(**arguments)


def _transformer_config(task: Task, flags: Flags) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    dtype = torch.bfloat16 if task.bf16 else torch.float32
    config = MLATransformerConfig if task.kv_lora_rank else TransformerConfig
    return config(
        num_layers=task.num_layers,
        hidden_size=task.hidden_size,
        ffn_hidden_size=task.ffn_hidden_size,
        num_attention_heads=task.num_attention_heads,
        num_query_groups=task.num_query_groups,
        kv_channels=task.kv_channels,
        normalization="RMSNorm",
        layernorm_epsilon=task.norm_epsilon,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
        bf16=task.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        apply_rope_fusion=flags.rope_fusion,
        bias_activation_fusion=flags.swiglu_fusion,
        bias_dropout_fusion=task.platform == "cuda",
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=flags.weight_gradient_fusion,
        cross_entropy_loss_fusion=flags.cross_entropy != "unfused",
        cross_entropy_fusion_impl="te" if flags.cross_entropy == "te" else "native",
        qk_layernorm=task.qk_layernorm,
        **_split(task, flags),
        **_experts(task, flags),
        **_latent_attention(task),
    )


def _split(task: Task, flags: Flags) -> dict[str, Any]:
    """Settings of tensor, context and pipeline parallelism, with Megatron-LM's defaults
    (megatron/training/arguments.py)."""
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": task.tensor_parallel,
        "sequence_parallel": task.tensor_parallel > 1 and flags.implementation != "local",  # its norms do not have it
        "tp_comm_overlap": flags.user_buffers,
        "context_parallel_size": task.context_parallel,
        "pipeline_model_parallel_size": task.pipeline_parallel,
    }
    if task.exchange is not None:
        fields["cp_comm_type"] = task.exchange
    if task.platform == "cuda" and task.pipeline_parallel > 1:
        fields["deallocate_pipeline_outputs"] = True
    if task.virtual_stages > 1:
        fields["virtual_pipeline_model_parallel_size"] = task.virtual_stages
        overlapped = task.platform == "cuda"
        fields |= {"overlap_p2p_comm": overlapped, "batch_p2p_comm": not overlapped}
    if flags.more_on_first_stage:
        fields["num_layers_in_first_pipeline_stage"] = task.num_layers // 2 + flags.more_on_first_stage
    return fields


def _latent_attention(task: Task) -> dict[str, Any]:
    if not task.kv_lora_rank:
        return {}
    sizes = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    # without scaling YaRN is plain rotary embedding, which alone has no fused kernel there
    rope = {"rope_type": "yarn", "rotary_scaling_factor": 1.0, "rotary_base": task.rotary_base}
    return {name: getattr(task, name) for name in sizes} | {"multi_latent_attention": True, **rope}


def _experts(task: Task, flags: Flags) -> dict[str, Any]:
    """Settings of experts as in Megatron-Bridge's recipes of Qwen3-30B-A3B and DeepSeek-V3, without drops."""
    if not task.num_experts:
        return {}
    return {
        "num_moe_experts": task.num_experts,
        "moe_router_topk": task.experts_per_token,
        "moe_ffn_hidden_size": task.expert_width,
        "moe_grouped_gemm": flags.implementation == "transformer_engine",
        "moe_permute_fusion": flags.expert_fusion,
        "moe_router_fusion": flags.expert_fusion,
        "moe_router_load_balancing_type": task.balancing,
        "moe_router_score_function": task.score_function,
        "moe_router_enable_expert_bias": task.score_function == "sigmoid",
        "moe_router_num_groups": task.num_groups,
        "moe_router_group_topk": task.group_topk,
        "moe_router_topk_scaling_factor": task.scaling_factor,
        "moe_shared_expert_intermediate_size": task.shared_expert_width or None,
        "moe_aux_loss_coeff": task.aux_loss_coeff,
        "moe_router_dtype": task.router_dtype,
        "moe_router_force_load_balancing": task.forced_balance,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": task.expert_parallel,
    }
