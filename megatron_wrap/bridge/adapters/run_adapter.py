"""The adapter of a run, derived once from its configuration: the layers that it adapts, the parameters that it trains
whole or in rows, and the format of its folder. Needs no torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from megatron_wrap.bridge.adapters.factors import PEFT_PREFIX, AdaptedLayer
from megatron_wrap.bridge.adapters.target_modules import (
    adapted_layers,
    row_factors,
    rows_in_peft,
    saved_parameters,
    trained_rows,
)
from megatron_wrap.bridge.export.export_format import ExportFormat, export_format
from megatron_wrap.bridge.mapping.family import SCORE, Family, has_scalar_head
from megatron_wrap.bridge.mapping.tensors import Mapping as WeightMapping
from megatron_wrap.config.schema.model import AdapterConfig
from megatron_wrap.config.schema.run import RunConfig

PEFT_VERSION = "0.19.0"
"""The release of peft that introduced the format that is written here."""
SEQUENCE_CLASSIFICATION = "SEQ_CLS"
"""peft's task type of a model with a scalar head."""
_SAME_IN_PEFT = ("r", "lora_dropout", "use_rslora", "use_dora", "init_lora_weights", "bias", "ensure_weight_tying")


@dataclass(frozen=True)
class RunAdapter:
    """What the adapter of a run adapts and trains."""

    hf_format: ExportFormat
    """Format of the base."""
    config: AdapterConfig
    layers: list[AdaptedLayer]
    """Linear layers of the whole model with adapters, in model order."""
    saved: dict[str, WeightMapping]
    """Global name of each parameter that is trained whole -> its tensors in peft's file."""
    rows: dict[str, tuple[int, ...]]
    """Global name of each weight with trained rows -> the indices of these rows."""

    def family(self, converted: bool = True) -> Family:
        """The family of peft's folders of this adapter: its parameters are the factors, the trained rows and `saved`.

        Args:
            converted: with `AdaptedLayer.all_factors`, an adapter of the original base; False: with `factors`, of one
                that begins with factors of the base and belongs to a changed one.
        """
        factors: dict[str, WeightMapping] = {}
        for layer in self.layers:
            factors |= layer.all_factors() if converted else layer.factors()
        parameters = {**factors, **row_factors(self.hf_format.parameters, self.rows), **self.saved}
        return replace(
            self.hf_format.family,
            parameters=lambda arch: parameters,
            base_prefix=PEFT_PREFIX,
            ignored=(re.escape(f"{PEFT_PREFIX}lm_head.weight"),) if self.config.ensure_weight_tying else (),
            new_if_missing=(),
            is_adapter=True,
        )

    @property
    def task_type(self) -> str:
        """peft's task type of the model's adapters."""
        return SEQUENCE_CLASSIFICATION if has_scalar_head(self.hf_format.family) else "CAUSAL_LM"

    def peft_config(self, base: str | None) -> dict[str, Any]:
        """Content of adapter_config.json, from which peft.PeftModel builds the same adapters: of
        `AdaptedLayer.all_factors`.

        Args:
            base: folder or hub id of the base model; None: unknown.
        """
        config = _of_twice_the_rank(self.config) if self.config.decomposes_base else self.config
        modules = [module for layer in self.layers for module in layer.modules]
        head = [SCORE.removesuffix(".weight")] if self.task_type == SEQUENCE_CLASSIFICATION else []
        return {
            "peft_type": "LORA",
            "peft_version": PEFT_VERSION,
            "task_type": self.task_type,
            "base_model_name_or_path": base,
            "inference_mode": True,
            **{key: getattr(config, key) for key in _SAME_IN_PEFT},
            "lora_alpha": int(config.lora_alpha) if config.lora_alpha == int(config.lora_alpha) else config.lora_alpha,
            "target_modules": [module.name for module in modules if not module.is_parameter],
            "target_parameters": list(config.target_parameters) or None,
            "rank_pattern": dict(config.rank_pattern or {}),
            "alpha_pattern": dict(config.alpha_pattern or {}),
            "fan_in_fan_out": any(layer.weight.transposed for layer in self.layers),
            "modules_to_save": list(dict.fromkeys([*config.modules_to_save, *head])) or None,
            "trainable_token_indices": rows_in_peft(config),
        }


def run_adapter(config: RunConfig, vocab_size: int | None = None) -> RunAdapter | None:
    """The adapter of a run; None without `megatron_wrap.adapter`.

    Args:
        vocab_size: of the model; None: that of the configuration. The factors of adapters do not depend on it.

    Raises:
        UnsupportedModel: no Hugging Face family can express the architecture, so its modules have no names.
        ConfigError: a pattern matches no module; a module cannot be trained whole, or rows are no tokens.
    """
    if config.adapter.adapter_type == "none":
        return None
    return adapter_of(export_format(config, vocab_size or config.arch.vocab_size or 1), config.adapter)


def adapter_of(hf_format: ExportFormat, config: AdapterConfig) -> RunAdapter:
    """The adapter with these options of a model; without an adapter, one that adapts no layer.

    Raises:
        ConfigError: as `run_adapter`.
    """
    table = hf_format.parameters
    layers = [] if config.adapter_type == "none" else adapted_layers(table, config)
    return RunAdapter(hf_format, config, layers, saved_parameters(table, config, layers), trained_rows(table, config))


def _of_twice_the_rank(config: AdapterConfig) -> AdapterConfig:
    """The adapter configuration of a doubled rank, whose factors are the trained and the initial ones, with the same
    scales."""
    more = math.sqrt(2) if config.use_rslora else 2
    return replace(
        config,
        r=2 * config.r,
        lora_alpha=more * config.lora_alpha,
        rank_pattern={pattern: 2 * rank for pattern, rank in (config.rank_pattern or {}).items()},
        alpha_pattern={pattern: more * alpha for pattern, alpha in (config.alpha_pattern or {}).items()},
        init_lora_weights=True,
    )
