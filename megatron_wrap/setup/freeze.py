"""Freezes parameters that are not trained (`train.freeze`), and checks the modules that options of training need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_wrap.bridge.adapters.trained_parameters import frozen_names, hugging_face_names
from megatron_wrap.bridge.mapping.model_parameters import SEPARATE_NORMS
from megatron_wrap.config.checks.contradictions import refuse
from megatron_wrap.config.schema.derived import trained_prediction_layers
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.model.chunks import bare_model
from megatron_wrap.model.initial_weights import GlobalParameter, global_names, is_expert, split_dim
from megatron_wrap.parallel.collectives import gather_objects
from megatron_wrap.parallel.state import ParallelState
from megatron_wrap.utils.dist_logger import logger

_SHOWN = 4


@dataclass(frozen=True)
class _Named:
    """One parameter of the whole model."""

    hf_names: tuple[str, ...]
    """Hugging Face tensors of the parameter; () if there is no family that expresses the model."""
    numel: int
    """Elements of the unsharded parameter, without padding of the vocabulary."""


def freeze_parameters(
    config: RunConfig, chunks: Sequence[torch.nn.Module], parallel: ParallelState, vocab_size: int
) -> None:
    """Disable the gradients of layers for multi-token prediction without a loss, and of the parameters that
    `train.freeze` names; log how many of the latter remain. Collective.

    Raises:
        ConfigError: on every rank, if a pattern matches no parameter or only a part of one, or nothing remains.
    """
    from megatron_wrap.model.gpt_model import BatchFirstGPTModel

    if not trained_prediction_layers(config.arch):
        for model in map(bare_model, chunks):
            if isinstance(model, BatchFirstGPTModel) and model.mtp_block is not None:
                model.mtp_block.requires_grad_(False)
    patterns = config.train.freeze
    if not patterns:
        return
    of_this_rank = list(_named_parameters(config, chunks, parallel, vocab_size))
    named: dict[str, _Named] = {}
    for of_rank in gather_objects({name: about for name, about, _ in of_this_rank}):
        named |= of_rank
    frozen = frozen_names(config, {name: about.hf_names for name, about in named.items()})
    for name, _, parameter in of_this_rank:
        if name in frozen:
            parameter.tensor.requires_grad_(False)
    _refuse_parts_of_stacks(config, [(parameter, name in frozen) for name, _, parameter in of_this_rank])
    if config.recompute.recompute_granularity is not None:
        for chunk in chunks:
            keep_graph(bare_model(chunk))
    total = sum(about.numel for about in named.values())
    trained = total - sum(named[name].numel for name in frozen)
    shown = ", ".join(sorted(frozen)[:_SHOWN]) + (f" and {len(frozen) - _SHOWN} more" if len(frozen) > _SHOWN else "")
    logger.info_rank_0(
        f"trainable: {trained:,} of {total:,} parameters ({trained / total:.2%}), {len(named) - len(frozen)} of "
        f"{len(named)} tensors; frozen: {shown}"
    )


def _refuse_parts_of_stacks(config: RunConfig, parameters: list[tuple[GlobalParameter, bool]]) -> None:
    """Refuse to freeze only some of the experts that one tensor contains.

    Args:
        parameters: each parameter of this process, and whether it is frozen.
    """
    trained = {id(parameter.tensor) for parameter, is_frozen in parameters if not is_frozen}
    frozen = [parameter.name for parameter, is_frozen in parameters if is_frozen and id(parameter.tensor) in trained]
    failed = [name for names in gather_objects(frozen[:1]) for name in names]
    if failed:
        refuse(
            config,
            ["train.freeze"],
            f"{failed[0]} shares a tensor with experts that are trained (experts_impl grouped_mm); freeze all experts, "
            "or set megatron_lm.model.arch.experts_impl to sequential",
        )


def _named_parameters(
    config: RunConfig, chunks: Sequence[torch.nn.Module], parallel: ParallelState, vocab_size: int
) -> Iterator[tuple[str, _Named, GlobalParameter]]:
    """Global name, `_Named` and local tensor of each parameter of this process."""
    table = hugging_face_names(config) or {}
    for chunk in chunks:
        tied = not config.arch.untie_embeddings_and_output_weights
        for parameter in global_names(bare_model(chunk), tied):
            name = parameter.name
            for fused, separate in SEPARATE_NORMS.items():
                name = name.replace(fused, separate)
            axis = parallel.expert_tp if is_expert(name) else parallel.tp
            numel, dim = parameter.of(parameter.tensor).numel(), split_dim(name, parameter.tensor)
            numel *= 1 if dim is None else axis.size
            if name.startswith(("embedding.word_embeddings", "output_layer")) and dim == 0:
                numel = numel // (parameter.tensor.shape[0] * axis.size) * vocab_size
            yield name, _Named(table.get(name, ()), numel), parameter


def keep_graph(chunk: Any) -> None:
    """Let the embeddings require a gradient. Otherwise the recomputation of a module whose inputs require none would
    not compute the gradients of its parameters either (Megatron-Core's tensor_parallel/random.py,
    CheckpointFunction)."""

    def require_gradient(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output if output.requires_grad or not torch.is_grad_enabled() else output.requires_grad_()

    embedding = getattr(chunk, "embedding", None)
    if embedding is not None:
        embedding.register_forward_hook(require_gradient)


def check_model_inputs(config: RunConfig, chunks: Sequence[torch.nn.Module]) -> None:
    """Refuse `neftune_noise_alpha` and `mtp_num_layers` for a model that does not take the inputs that they need.

    Raises:
        ConfigError: the model provider builds another model than a `BatchFirstGPTModel`.
    """
    from megatron_wrap.model.gpt_model import BatchFirstGPTModel

    wanted = {
        "train.neftune_noise_alpha": config.train.neftune_noise_alpha,
        "arch.mtp_num_layers": config.arch.mtp_num_layers,
    }
    others = [model for model in map(bare_model, chunks) if not isinstance(model, BatchFirstGPTModel)]
    for key, value in wanted.items():
        if value is not None and others:
            refuse(
                config,
                [key],
                f"needs a GPT model of megatron_wrap, and provider_key {config.model_provider.provider_key} builds a "
                f"{type(others[0]).__name__}; set it to null",
            )
