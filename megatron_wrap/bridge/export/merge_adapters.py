"""The merge of adapters into the weights for which they were trained, for exports without adapters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.errors import ConfigError
from megatron_wrap.model.initial_weights import global_names
from megatron_wrap.nn.linear_layers.quantized_weights import quantized_of


def merges(model: torch.nn.Module, arch: ArchConfig) -> dict[str, Callable[[Tensor], Tensor]]:
    """Global name of each weight with an adapter -> the fp32 values that a merge makes of the weight's."""
    from megatron_wrap.nn.adapters.lora import adapters_by_weight
    from megatron_wrap.nn.adapters.token_rows import token_rows_of
    from megatron_wrap.nn.experts.lora import ExpertAdapter

    adapters, rows = adapters_by_weight(model), {id(rows.base_weight()): rows for rows in token_rows_of([model])}
    folded: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, parameter, index in global_names(model, tied=not arch.untie_embeddings_and_output_weights):
        adapter = adapters.get(id(parameter))
        if isinstance(adapter, ExpertAdapter):
            assert index is not None
            folded[name] = partial(_sum, partial(adapter.delta, index))
        elif adapter is not None:
            folded[name] = partial(_sum, adapter.delta)
        elif id(parameter) in rows:
            folded[name] = rows[id(parameter)].merged
    return folded


def _sum(delta: Callable[[], Tensor], values: Tensor) -> Tensor:
    return values + delta()


def refuse_quantized(parameter: Tensor) -> None:
    """Raises `ConfigError` about a weight in 4 or 8 bits, into which nothing is merged."""
    quantized = quantized_of(parameter)
    if quantized is not None:
        raise ConfigError(
            f"megatron_wrap.adapter.base_weights: an adapter cannot be merged into a base in {quantized.kind}; export "
            "the adapter alone (save_pretrained(FOLDER), export-hf without --merge, weight_source(adapter=True)), and "
            "merge it into the model's own weights: MegatronWrap.from_pretrained(FOLDER, CONFIG, "
            "['megatron_wrap.adapter.base_weights=bf16']), then save_pretrained(..., merge=True)"
        )
