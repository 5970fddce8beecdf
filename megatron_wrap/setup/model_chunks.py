"""Builds this process's chunks of the model: layers, weights, gradient buffers, and their communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron_wrap.bridge.loading.hf_path import folder_arch, tokens_new_to_folder
from megatron_wrap.bridge.loading.load_weights import fill_new_rows, load_weights
from megatron_wrap.bridge.loading.weight_folder import WeightFolder
from megatron_wrap.bridge.mapping.model_parameters import mapped_parameters
from megatron_wrap.config.defaults import FP8_GATHER_FROM, experts_choice
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.errors import ConfigError, PlatformError
from megatron_wrap.model.chunks import bare_model
from megatron_wrap.model.initial_weights import fill_initial_weights, is_expert
from megatron_wrap.model.provider import MegatronModelProviderEntry
from megatron_wrap.model.request import ModelRequest, padded_vocab_size
from megatron_wrap.model.transformer_config import same_named, use_transformer_engine
from megatron_wrap.parallel.agreement import on_rank_0
from megatron_wrap.parallel.collectives import reduce_in_place
from megatron_wrap.parallel.state import ParallelState
from megatron_wrap.platform.base.machine import megatron_core_version
from megatron_wrap.platform.base.platform import Platform
from megatron_wrap.platform.megatron_core.added_gradients import sum_over_ranks
from megatron_wrap.platform.megatron_core.versions import accepts, version
from megatron_wrap.setup.adapter import quantize_base
from megatron_wrap.setup.freeze import check_model_inputs, freeze_parameters
from megatron_wrap.utils.garbage import delayed_collection

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron_wrap.data.chat.tokenizer import NewTokens


def predicted_ids(config: RunConfig, common_vocab_size: int | None) -> int | None:
    """Argument `predicted_ids` of `build_chunks`: for a teacher the number of rows that the student has as well, so
    that the teacher's distributions are over the same ids on every layout; None for other models.

    Args:
        config: with the architecture of the model.
        common_vocab_size: of both models of the run; None: they have the same number of rows.
    """
    is_teacher = config.policy is not None and config.policy.models.role == "teacher"
    return common_vocab_size if is_teacher else None


@delayed_collection()  # the many new objects of a model would start one of all that was imported
def build_chunks(
    config: RunConfig,
    platform: Platform,
    parallel: ParallelState,
    model_config: TransformerConfig,
    vocab_size: int,
    tokenizer: Any,
    new_weights: bool = True,
    weight_folder: WeightFolder | None = None,
    defer_logits: bool = False,
    predicted_ids: int | None = None,
) -> list[torch.nn.Module]:
    """This process's model chunks; in half precision each is wrapped in Megatron-Core's Float16Module. Collective.

    Args:
        vocab_size: number of rows of embedding and output layer, without padding.
        tokenizer: of the run, or None; rows of tokens that are new to `weight_folder` are the mean of the others'.
        new_weights: set initial weights; False: leave the weights unset.
        weight_folder: a Hugging Face folder, whose weights are loaded instead of the initial ones.
        defer_logits: see `ModelRequest.defers_logits`.
        predicted_ids: the rows from this one on have probability 0, as padding has; None: `vocab_size`.
    """
    from megatron.core.transformer.module import Float16Module

    provider = MegatronModelProviderEntry.get_provider(config.model_provider.provider_key)
    ids = vocab_size if predicted_ids is None else predicted_ids
    padded = padded_vocab_size(vocab_size, config.arch.make_vocab_size_divisible_by, parallel.tp.size)
    # Here, not between the chunks: the constructors of the first and the last one, which are on other processes, wait
    # for each other. On one rank, because a node's cache of the hub may lack the folder's tokenizer.
    new_tokens = on_rank_0(lambda: tokens_new_to_folder(config, tokenizer, ids)) if weight_folder is not None else None
    chunks = []
    for stage in range(parallel.virtual_size or 1):
        virtual_stage = stage if parallel.virtual_size else None
        last_stage = parallel.virtual_size - 1 if parallel.virtual_size else 0
        request = ModelRequest(
            config=config,
            transformer_config=model_config,
            state=parallel,
            transformer_engine=use_transformer_engine(config, platform),
            experts_impl=experts_choice(config.arch, fp8=bool(model_config.fp8)).value,
            vocab_size=ids,
            padded_vocab_size=padded,
            pre_process=parallel.pp.rank == 0 and stage == 0,
            post_process=parallel.is_last_stage and stage == last_stage,
            virtual_stage=virtual_stage,
            defers_logits=defer_logits,
        )
        chunk = _built(config, provider, request)
        platform.synchronize()  # with CUDA graphs of layers the first one has changed the stream
        chunk.to(platform.device)
        _mark_experts(chunk)
        if new_weights and (weight_folder is None or weight_folder.omitted):
            fill_initial_weights(
                chunk, config.arch, vocab_size, config.train.seed, parallel.tp, expert_tp=parallel.expert_tp
            )
        half = config.dtype.bf16 or config.dtype.fp16
        chunks.append(Float16Module(model_config, chunk) if half else chunk)
        if weight_folder is not None:  # after Float16Module, which also converts the buffers that must stay fp32
            _load_folder(chunk, config, weight_folder, new_tokens, parallel)
    return chunks


def _load_folder(
    chunk: torch.nn.Module,
    config: RunConfig,
    folder: WeightFolder,
    new_tokens: NewTokens | None,
    parallel: ParallelState,
) -> None:
    arch = folder_arch(config)
    load_weights(chunk, arch, folder, parallel)
    if new_tokens is not None:
        mapped = mapped_parameters(chunk, folder.family, arch)
        fill_new_rows([weight for _, weight, mapping in mapped if mapping.padded], new_tokens, parallel.tp)


def _built(config: RunConfig, provider: Callable[[ModelRequest], torch.nn.Module], request: ModelRequest) -> Any:
    """Build a chunk. With `adapter.base_weights` its linear layers have no values yet, and keep them quantized
    later."""
    if config.adapter.base_weights == "bf16":
        return provider(request)
    from megatron_wrap.nn.layers.quantized_weights import weights_without_memory

    with weights_without_memory():
        chunk = provider(request)
    quantize_base(chunk, config)
    return chunk


def _mark_experts(chunk: torch.nn.Module) -> None:
    """Mark the experts' parameters, which then have separate gradient buffers and optimizer states for every EP.

    Megatron-Core marks them only if EP > 1 (tensor_parallel/layers.py). Without the mark a checkpoint saved with EP 1
    would have another format, and with an expert TP smaller than TP the gradients of an expert's copies would not be
    reduced.
    """
    for name, parameter in chunk.named_parameters():
        if is_expert(name):
            parameter.allreduce = False  # type: ignore[attr-defined]


def trainable_chunks(
    config: RunConfig,
    platform: Platform,
    parallel: ParallelState,
    model_config: TransformerConfig,
    bare: list[torch.nn.Module],
    vocab_size: int,
) -> list[torch.nn.Module]:
    """Freeze parameters of the chunks, and wrap them for training."""
    check_model_inputs(config, bare)
    freeze_parameters(config, bare, parallel, vocab_size)
    platform.refuse_unsafe(derived.optimizer_settings(config.optimizer), platform.has_transformer_engine)
    return wrap_chunks(config, parallel, model_config, bare)


def wrap_chunks(
    config: RunConfig, parallel: ParallelState, model_config: TransformerConfig, chunks: list[torch.nn.Module]
) -> list[torch.nn.Module]:
    """Wrap the chunks in Megatron-Core's DistributedDataParallel, and set the hooks that its schedules call."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    ddp = config.ddp
    settings: dict[str, Any] = {
        **same_named(ddp, DistributedDataParallelConfig),
        "grad_reduce_in_fp32": ddp.accumulate_allreduce_grads_in_fp32,
        "use_distributed_optimizer": config.optimizer.use_distributed_optimizer,
        # Megatron-Core's check raises on one rank only, during the backward pass, and synchronizes for each bucket;
        # ours checks the norm of the full gradient on all ranks (checked_optimizer.py)
        "check_for_nan_in_grad": False,
        "bucket_size": ddp.ddp_bucket_size,
        "fp8_param_gather": model_config.fp8_param,
        **ddp.upstream,
    }
    ddp_config = DistributedDataParallelConfig(**accepts(DistributedDataParallelConfig, settings))
    if model_config.fp8_param and ddp.overlap_param_gather and megatron_core_version() < FP8_GATHER_FROM:
        raise PlatformError(
            "megatron_lm.misc.ddp.overlap_param_gather: with fp8_param_gather it gives wrong gradients after an "
            f"evaluation with megatron-core {version()}; write null or false, or install 0.19"
        )
    # later chunks are not split into buckets: their reduction overlaps with the computation of the first chunk
    # (Megatron-LM, megatron/training/training.py, get_model)
    wrapped = [
        DistributedDataParallel(model_config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    single = len(wrapped) == 1
    model_config.finalize_model_grads_func = with_tied_gradients(finalize_model_grads, wrapped)
    if ddp.overlap_grad_reduce:
        model_config.no_sync_func = wrapped[0].no_sync if single else [chunk.no_sync for chunk in wrapped]
        if not single and ddp_config.align_param_gather:
            model_config.grad_sync_func = [chunk.start_grad_sync for chunk in wrapped]
    size = parallel.dp.size * parallel.cp.size
    if size > 1 and not ddp_config.average_in_collective:
        sum_over_ranks(wrapped)
        # the schedule averages the losses, those of routers too
        model_config.grad_scale_func = lambda loss: loss / size
    return wrapped


def with_tied_gradients(finalize: Callable[..., Any], chunks: Sequence[torch.nn.Module]) -> Callable[..., Any]:
    """The function that completes the gradients of a step: Megatron-Core's, followed by the sum over both stages of the
    gradients of parameters that both stages have."""
    from megatron.core import parallel_state

    copied = list(_copied(chunks))
    if not copied:
        return finalize
    group = parallel_state.get_embedding_group()

    def finalized(*arguments: Any, **named: Any) -> Any:
        result = finalize(*arguments, **named)
        for parameter in copied:
            reduce_in_place(parameter.main_grad, "sum", group)
        return result

    return finalized


def _copied(chunks: Sequence[torch.nn.Module]) -> Iterator[Any]:
    """Parameters that the first and the last stage both have: trained rows of tied embeddings, and embeddings that
    layers for multi-token prediction use."""
    from megatron_wrap.model.gpt_model import BatchFirstGPTModel
    from megatron_wrap.nn.adapters.embedding_rows import ROWS, embedding_rows_of

    models = [*map(bare_model, chunks)]
    yield from (rows.get_parameter(ROWS) for rows in embedding_rows_of(models) if rows.tied_over_stages)
    for model in models:
        weight = model.copied_embedding if isinstance(model, BatchFirstGPTModel) else None
        if weight is not None and weight.requires_grad:
            yield weight


_KEY = "megatron_lm.model.parallel.tp_comm_overlap"


def start_user_buffers(config: RunConfig, platform: Platform, model_config: TransformerConfig) -> None:
    """Allocate the buffers of a model of Transformer Engine's layers with `tp_comm_overlap`, before its first pass; do
    nothing for other models. The buffers have the size of one micro-batch, as in Megatron-LM
    (megatron/training/initialize.py), and belong to the process: `Platform.uninstall` releases them. Collective over
    all processes.

    Raises:
        ConfigError: micro-batches differ in size, or the GPUs here have no multicast and UB_SKIPMC is not set.
    """
    if not (model_config.tp_comm_overlap and use_transformer_engine(config, platform)):
        return
    if derived.varies_in_length(config):
        raise ConfigError(
            f"{_KEY}: the user buffers of Transformer Engine hold micro-batches of one size, and samples differ in "
            "length; write collate_type: fixed_length without packing, transformer_impl: torch, or false"
        )
    from transformer_engine.pytorch.module.base import UserBufferQuantizationMode, initialize_ub

    tokens = config.train.seq_length * config.train.micro_batch_size // config.parallel.context_parallel_size
    mode = UserBufferQuantizationMode.FP8 if model_config.fp8 else UserBufferQuantizationMode.NONE
    try:
        initialize_ub(
            [tokens, config.arch.hidden_size],
            config.parallel.tensor_model_parallel_size,
            quantization_modes=[mode],
            dtype=model_config.params_dtype if not model_config.fp8 else torch.bfloat16,
            bootstrap_backend=model_config.tp_comm_bootstrap_backend,
        )
    except RuntimeError as error:
        raise ConfigError(f"{_KEY}: Transformer Engine has no user buffers here: {error}; or write false") from error
