"""Selects the rows of the embedding and the output layer that are trained in addition to an adapter, by peft's rules,
and maps them to the tensors of peft's files. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_wrap.bridge.mapping.tensors import Mapping as WeightMapping
from megatron_wrap.bridge.mapping.tensors import replicated
from megatron_wrap.bridge.mapping.value_model import HEAD, SCORE
from megatron_wrap.config.schema.model import AdapterConfig
from megatron_wrap.errors import ConfigError, did_you_mean

EMBEDDING = "embedding.word_embeddings.weight"
"""Global name of the embedding."""
ROWS = {EMBEDDING: "embedding.word_embeddings_adapter.token_rows", HEAD: "output_layer_adapter.token_rows"}
"""Global name of a weight -> global name of its trained rows; tied weights use those of the embedding."""
_KEY = "megatron_wrap.adapter.trainable_token_indices"


def trained_rows(table: Mapping[str, WeightMapping], config: AdapterConfig) -> dict[str, tuple[int, ...]]:
    """Global name of each weight with rows that are trained -> their indices, in the order of peft's file.

    Args:
        table: the family's, global name of each parameter -> its Hugging Face tensors.

    Raises:
        ConfigError: a name is no embedding or output layer, an index is none or twice in a list, or the rows of tied
            weights would differ.
    """
    wanted = config.trainable_token_indices
    if not wanted:
        return {}
    modules = {name: _module(table[name]) for name in ROWS if name in table and SCORE not in table[name].shapes()}
    if not isinstance(wanted, Mapping):
        wanted = {modules[EMBEDDING]: wanted}
    rows: dict[str, tuple[int, ...]] = {}
    for entry, indices in wanted.items():
        if HEAD not in table and entry == "lm_head":
            if _by_entry(wanted, modules[EMBEDDING]) != list(indices):
                raise ConfigError(
                    f"{_KEY}: the output layer's weights are tied to the embedding's in this model, so rows of lm_head "
                    f"are those of {modules[EMBEDDING].rpartition('.')[2]}; list the embedding alone"
                )
            continue
        matched = [name for name, module in modules.items() if module.endswith(entry)]
        if len(matched) != 1:
            endings = sorted(module.rpartition(".")[2] for module in modules.values())
            raise no_match(_KEY, entry, "module with rows of tokens", endings)
        rows[matched[0]] = _checked(entry, indices)
    return rows


def no_match(key: str, entry: str, wanted: str, possible: Sequence[str]) -> ConfigError:
    """The error about an entry of a key that matches nothing of the wanted kind."""
    listed = ", ".join(possible)
    return ConfigError(f"{key}: {entry} matches no {wanted}{did_you_mean(entry, possible)}; possible are {listed}")


def refuse_unknown_tokens(rows: Mapping[str, tuple[int, ...]], vocab_size: int) -> None:
    """Raise a ConfigError if one of `trained_rows` is not in the vocabulary, whose padding is not counted."""
    for index in (index for indices in rows.values() for index in indices):
        if index >= vocab_size:
            raise ConfigError(f"{_KEY}: {index} is no index of the model's {vocab_size} tokens; remove it")


def row_factors(table: Mapping[str, WeightMapping], config: AdapterConfig, prefix: str) -> dict[str, WeightMapping]:
    """Global name of each parameter of trained rows -> its tensor in peft's file, whose names begin with `prefix`."""
    factors = {}
    for name, indices in trained_rows(table, config).items():
        (shape,) = table[name].shapes().values()
        file_name = f"{prefix}{_module(table[name])}.token_adapter.trainable_tokens_delta"
        factors[ROWS[name]] = replicated(file_name, len(indices), shape[1])
    return factors


def as_in_peft(config: AdapterConfig) -> list[int] | dict[str, list[int]] | None:
    """The value of trainable_token_indices in adapter_config.json."""
    wanted = config.trainable_token_indices
    if isinstance(wanted, Mapping):
        return {name: list(indices) for name, indices in wanted.items()}
    return list(wanted) or None


def _module(mapping: WeightMapping) -> str:
    (name,) = mapping.shapes()
    return name.rpartition(".")[0]


def _by_entry(wanted: Mapping[str, Any], module: str) -> list[int] | None:
    return next((list(indices) for entry, indices in wanted.items() if module.endswith(entry)), None)


def _checked(entry: str, indices: Any) -> tuple[int, ...]:
    if not isinstance(indices, (list, tuple)) or not indices:
        raise ConfigError(f"{_KEY}: {entry} needs a list of indices of tokens, not {indices!r}")
    for index in indices:
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise ConfigError(f"{_KEY}: {index!r} is no index of a token of {entry}; remove it")
    if len(set(indices)) < len(indices):
        double = next(index for index in indices if indices.count(index) > 1)
        raise ConfigError(f"{_KEY}: {double} is listed twice; remove one")
    return tuple(indices)
