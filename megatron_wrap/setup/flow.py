"""Builds the run's flow with the values and collectives that the framework provides to it, and the preparation of its
samples, with outputs of a reference model that were computed before training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_wrap.config.checks.vocabulary import model_vocab_size
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.data.cache.precomputed import MANIFEST, PrecomputedOutputs, sample_hash
from megatron_wrap.data.chat.tokenizer import fingerprint
from megatron_wrap.errors import ConfigError, DataError
from megatron_wrap.flow import FlowContext, MegatronWrapFlowEntry, MegatronWrapTrainingFlowBase
from megatron_wrap.flow.contract.config import decode_flow_config
from megatron_wrap.flow.contract.prediction import MultiTokenPrediction
from megatron_wrap.flow.contract.routing import RoutingShape
from megatron_wrap.parallel.collectives import average_detached, gather_sequence, sum_on_group
from megatron_wrap.parallel.state import ParallelState


def build_flow(
    config: RunConfig,
    tokenizer: Any,
    vocab_size: int,
    parallel: ParallelState | None = None,
    reference: RunConfig | None = None,
) -> MegatronWrapTrainingFlowBase:
    """The flow of `megatron_wrap.flow.flow_key`.

    Args:
        tokenizer: the run's Hugging Face tokenizer, or None.
        vocab_size: of the model, without padding.
        parallel: None: the flow encodes one sample at a time in this process, without process groups.
        reference: the configuration of the reference or teacher model; None: there is none with its own vocabulary.

    Raises:
        ConfigError: an unknown flow, or unknown keys. FlowError: the flow is incomplete.
    """
    flow_class = MegatronWrapFlowEntry.get_flow_class(config.flow.flow_key)
    context = FlowContext(
        micro_batch_size=1 if parallel is None else config.train.micro_batch_size,
        seq_length=config.train.seq_length,
        vocab_size=vocab_size,
        cp_size=1 if parallel is None else parallel.cp.size,
        sum_on_cp_group=lambda partial: partial if parallel is None else sum_on_group(partial, parallel.cp.group),
        average_across_dp_ranks=lambda value: value if parallel is None else average_detached(value, parallel.dp.group),
        gather_on_cp_group=lambda part, dim: (
            part if parallel is None else gather_sequence(part, dim, parallel.cp.group)
        ),
        tokenizer=tokenizer,
        sources=tuple(source.name for source in config.data.train),
        routing=_routing_shape(config),
        prediction=_prediction(config.arch),
        common_vocab_size=common_vocab_size(config, tokenizer, vocab_size, reference),
    )
    return flow_class(decode_flow_config(flow_class, config), context)


def common_vocab_size(
    config: RunConfig, tokenizer: Any, vocab_size: int, reference: RunConfig | None = None
) -> int | None:
    """Number of vocabulary entries that both models of a run have; None if their vocabularies have the same size.
    Models of one tokenizer may have different sizes: Qwen2.5 has 151,936 at 0.5B and 152,064 at 7B.

    Args:
        config: of one of the models.
        vocab_size: of this model, without padding.
        reference: of the other model; None: the run's, if `config` is that of a reference or teacher model.
    """
    settings, other = config.models.reference_or_teacher, reference or config.policy
    if other is not None:
        size = model_vocab_size(other.arch, tokenizer, other.model_provider.hf_path)
    elif settings is not None and settings.precomputed is not None:
        size = stored_vocab_size(settings.precomputed) or vocab_size
    else:
        return None
    return None if size == vocab_size else min(size, vocab_size)


def _prediction(arch: ArchConfig) -> MultiTokenPrediction | None:
    count = derived.trained_prediction_layers(arch)
    return MultiTokenPrediction(count, arch.mtp_loss_scaling_factor) if count else None


def _routing_shape(config: RunConfig) -> RoutingShape | None:
    arch, mode = config.arch, config.train.router_replay
    if mode == "disabled" or arch.num_experts is None:
        return None
    pattern = derived.moe_layer_pattern(arch)
    layers = tuple(layer for layer, with_experts in enumerate(pattern) if with_experts)
    return RoutingShape(layers, len(pattern), arch.num_experts, arch.moe_router_topk, mode)


_VOCAB_SIZE = "vocab_size"


def sample_preparation(flow: MegatronWrapTrainingFlowBase, config: RunConfig) -> Callable[[Any], Any]:
    """The function with which the run prepares a sample: the flow's `prepare_sample`. With `precomputed` it receives
    each sample with the computed outputs of the reference model as `reference_NAME`.

    Raises:
        DataError: there are no outputs. ConfigError: they were computed for another flow, tokenizer or sequence length.
    """
    settings = config.models.reference_or_teacher
    if settings is None or settings.precomputed is None:
        return flow.prepare_sample
    computed = PrecomputedOutputs(settings.precomputed)
    expected = run_metadata(flow, config)
    for name, value in expected.items():
        if computed.metadata.get(name) != value:
            raise ConfigError(
                f"{config.models.path}: the outputs in {computed.folder} were computed with another {name}: "
                f"{computed.metadata.get(name)} there and {value} here; run megatron-wrap precompute with this "
                f"configuration, or set {name} back"
            )
    models = config.models

    def prepare_with_outputs(sample: Any) -> Any:
        outputs = computed.get(sample_hash(sample))
        if outputs is None:
            flow.prepare_sample(sample)  # a mistake of the sample comes first
            raise DataError(
                f"{computed.folder} has no output of the {models.role} model for the sample {_shown(sample)}; run "
                "megatron-wrap precompute with the data of this run"
            )
        both = sorted(outputs.keys() & sample.keys())
        if both:
            raise DataError(
                f"the sample contains {', '.join(both)}, which {models.path}.precomputed adds; remove them from the "
                f"samples, or set {models.path} to null"
            )
        return flow.prepare_sample({**sample, **{name: _value(value) for name, value in outputs.items()}})

    return prepare_with_outputs


def run_metadata(flow: MegatronWrapTrainingFlowBase, config: RunConfig) -> dict[str, Any]:
    """Everything besides the sample and the model that computed outputs depend on."""
    return {
        "flow_key": config.flow.flow_key,
        "seq_length": config.train.seq_length,
        _VOCAB_SIZE: flow.context.num_token_ids,
        "tokenizer": None if flow.context.tokenizer is None else fingerprint(flow.context.tokenizer, "samples"),
    }


def stored_vocab_size(folder: str) -> int | None:
    """Number of token ids that the models had in common when the outputs in a folder were computed; None: not recorded,
    or the folder has no complete outputs, which `sample_preparation` refuses."""
    try:
        manifest = json.loads((Path(folder).expanduser() / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    size = manifest.get(_VOCAB_SIZE) if isinstance(manifest, dict) else None
    return size if isinstance(size, int) and size > 0 else None


def _value(value: Any) -> Any:
    return value if isinstance(value, float | int) else torch.from_numpy(value.copy())


def _shown(sample: Mapping[str, Any]) -> str:
    text = json.dumps({name: value for name, value in sample.items() if name != "source"}, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
