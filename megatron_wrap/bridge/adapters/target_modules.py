"""The weights that get adapters, are trained whole, or in rows of tokens, chosen by peft's rules from the options of
`megatron_wrap.adapter`. Needs no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from megatron_wrap.bridge.adapters.factors import EXPERTS, PEFT_PREFIX, AdaptedLayer, TargetModule, with_runs
from megatron_wrap.bridge.mapping.family import EMBEDDING, HEAD, SCORE
from megatron_wrap.bridge.mapping.tensors import Mapping as WeightMapping
from megatron_wrap.bridge.mapping.tensors import Run, replicated
from megatron_wrap.config.schema.model import AdapterConfig
from megatron_wrap.config.schema.run import SECTION_PATHS
from megatron_wrap.errors import ConfigError
from megatron_wrap.nearest_names import did_you_mean

Number = TypeVar("Number", int, float)

ROWS = {EMBEDDING: "embedding.word_embeddings_adapter.token_rows", HEAD: "output_layer_adapter.token_rows"}
"""Global name of a weight -> global name of its trained rows; tied weights use those of the embedding."""
_ROWS_KEY = "megatron_wrap.adapter.trainable_token_indices"
_WHOLE = re.compile(r"(?:embedding|output_layer|.*norm)\.(?:\w+\.)?(?:weight|bias)")
"""Pattern of the global names of parameters that can be trained whole."""
_LINEAR = re.compile(r"(decoder\.layers\.\d+\.(?:.*\.)?(?:linear_\w+|in_proj|out_proj))\.weight")


def is_linear(layer: str) -> bool:
    """Whether the global name of a layer is that of a linear layer of the decoder."""
    return _LINEAR.fullmatch(f"{layer}.weight") is not None


@dataclass(frozen=True)
class _Candidate:
    """A weight that can have adapters, under the names by which peft's options choose it."""

    layer: str
    """Global name of the linear layer; for a stack, that of the first expert without the expert's number."""
    weight: WeightMapping
    """Mapping of the layer's weight."""
    name: str
    """Name of the Hugging Face module, or of the fused tensor of all experts."""
    is_module: bool
    """Whether target_modules can choose it."""
    parameter: str | None
    """Name by which target_parameters can choose it; None if it cannot."""
    experts: int = 0
    """Number of experts of a fused tensor; 0 for another weight."""


def _candidates(table: Mapping[str, WeightMapping]) -> list[_Candidate]:
    """All candidates in model order, with fused tensors last."""
    linear = {match[1]: mapping for name, mapping in table.items() if (match := _LINEAR.fullmatch(name))}
    # peft 0.21 takes the names of an MLP's modules in a mixture of experts as those of all of its experts, which
    # transformers 5 stores in one tensor (peft/utils/transformers_weight_conversion.py, _convert_peft_config_moe)
    has_experts = any(".mlp.experts." in layer for layer in linear)
    modules, stacks = [], []
    for layer, weight in linear.items():
        owner, is_expert, expert = layer.partition(".mlp.experts.")
        names = list(dict.fromkeys(run.name.removesuffix(".weight") for part in weight.parts for run in part))
        if not is_expert:
            is_module = not has_experts or ".self_attention." in layer
            for name in names:  # factors of a transposed parameter would be exchanged in peft
                parameter = None if weight.transposed else f"{name}.weight"
                modules.append(_Candidate(layer, weight, name, is_module, parameter))
        elif expert.startswith("0."):
            # transformers 5 has one name for the MLPs of all families
            fused = EXPERTS[0] if expert == "0.linear_fc1" else EXPERTS[1]
            name = f"{names[0].partition('.experts.')[0].rpartition('.')[0]}.mlp.experts.{fused}"
            stack = f"{owner}{is_expert}{expert.removeprefix('0.')}"
            count = sum(other.startswith(f"{owner}{is_expert}") and other.endswith("linear_fc1") for other in linear)
            stacks.append(_Candidate(stack, weight, name, False, name, count))
    return [*modules, *stacks]


def adapted_layers(table: Mapping[str, WeightMapping], config: AdapterConfig) -> list[AdaptedLayer]:
    """The linear layers with adapters, in model order, and stacks of experts last.

    Args:
        table: the family's, global name of each parameter -> its Hugging Face tensors.

    Raises:
        ConfigError: an entry of target_modules, target_parameters or exclude_modules, or a pattern of ranks or alphas,
            matches nothing, or one of modules_to_save a module that cannot be trained whole; a rank is larger than a
            decomposed weight.
    """
    candidates = _candidates(table)
    _refuse_unmatched(config, candidates)
    chosen = {candidate: target for candidate in candidates if (target := _target(candidate, config)) is not None}
    names = {candidate.name for candidate in chosen}
    layers: dict[str, AdaptedLayer] = {}
    decomposed = config.decomposes_base
    for candidate, target in chosen.items():
        if decomposed:
            _refuse_large_rank(target, candidate.weight.shapes()[f"{target.name}.weight"])
        owner, _, fused = target.name.rpartition(".")
        nested = candidate.experts > 0 and fused == EXPERTS[0] and f"{owner}.{EXPERTS[1]}" in names
        before = layers[candidate.layer].modules if candidate.layer in layers else ()
        layers[candidate.layer] = AdaptedLayer(
            candidate.layer,
            candidate.weight,
            (*before, target),
            candidate.experts,
            nested,
            dora=config.use_dora,
            decomposed=decomposed,
        )
    if not layers:
        raise ConfigError("megatron_wrap.adapter: no linear layer remains; change target_modules or exclude_modules")
    return list(layers.values())


def _target(candidate: _Candidate, config: AdapterConfig) -> TargetModule | None:
    """The module with its rank and scale; None if it has no adapter. peft's patterns of ranks and alphas match the name
    by which its options have chosen the module."""
    by_module = candidate.is_module and _is_target(candidate.name, config)
    by_parameter = candidate.parameter is not None and _is_named(candidate.parameter, config.target_parameters)
    if by_module and by_parameter:
        raise ConfigError(
            f"megatron_wrap.adapter: target_modules and target_parameters both name {candidate.name}; remove it from "
            "one of the two"
        )
    if not (by_module or by_parameter):
        return None
    name = str(candidate.parameter) if by_parameter else candidate.name
    rank = _pattern_value(name, config.rank_pattern or {}, config.r)
    alpha = _pattern_value(name, config.alpha_pattern or {}, config.lora_alpha)
    scale = alpha / (math.sqrt(rank) if config.use_rslora else rank)
    return TargetModule(candidate.name, rank, scale, is_parameter=by_parameter)


def _refuse_large_rank(module: TargetModule, shape: Sequence[int]) -> None:
    if module.rank > min(shape):
        raise ConfigError(
            f"megatron_wrap.adapter.init_lora_weights: pissa has at most {min(shape)} vectors of {module.name}, whose "
            f"weight is {shape[0]} x {shape[1]}, and its rank is {module.rank}; write a smaller r, or one in "
            "rank_pattern"
        )


def saved_parameters(
    table: Mapping[str, WeightMapping], config: AdapterConfig, layers: Sequence[AdaptedLayer]
) -> dict[str, WeightMapping]:
    """Global name of each parameter that is trained whole in addition to the adapters (modules_to_save, biases, and the
    head of a value model) -> its tensors in peft's file.

    Args:
        table: the family's, global name of each parameter -> its Hugging Face tensors.
        layers: the result of `adapted_layers`.

    Raises:
        ConfigError: an entry matches no module, or one that cannot be trained whole; lora_only means a part of a bias.
    """
    _refuse_unsupported(table, config)
    # peft's rule (utils/other.py, _set_trainable): a name of a module ends with an entry, also within a word
    whole = {
        name: _renamed(mapping)
        for name, mapping in table.items()
        if any(owner.endswith(config.modules_to_save) for owner in _owners(mapping))
        or (name == HEAD and SCORE in mapping.shapes())
    }
    both = sorted(whole.keys() & trained_rows(table, config).keys())
    if both:
        raise ConfigError(
            f"megatron_wrap.adapter: trainable_token_indices trains rows of {_owners(table[both[0]])[0]}, which "
            "modules_to_save trains whole; remove it from one of the two"
        )
    return {**_trained_biases(table, config, layers), **whole}


def _trained_biases(
    table: Mapping[str, WeightMapping], config: AdapterConfig, layers: Sequence[AdaptedLayer]
) -> dict[str, WeightMapping]:
    """The biases of `config.bias`; peft's file has those of adapted modules as base_layer.bias."""
    if config.bias == "none":
        return {}
    adapted = {module.name for layer in layers for module in layer.modules}
    trained = {}
    for name, mapping in table.items():
        owners = set(_owners(mapping))
        if not name.endswith(".bias") or (config.bias == "lora_only" and not owners & adapted):
            continue
        if config.bias == "lora_only" and not owners <= adapted:
            missing = ", ".join(sorted(owner.rpartition(".")[2] for owner in owners - adapted))
            raise ConfigError(
                f"megatron_wrap.adapter.bias: lora_only means a part of {name}, which is one tensor here; adapt "
                f"{missing} as well, or write all or none"
            )
        trained[name] = _renamed(mapping, adapted)
    return trained


def _owners(mapping: WeightMapping) -> list[str]:
    """The Hugging Face modules of a parameter's tensors."""
    names = dict.fromkeys([run.name for part in mapping.parts for run in part])
    return [name.rpartition(".")[0] for name in names]


def _refuse_unsupported(table: Mapping[str, WeightMapping], config: AdapterConfig) -> None:
    possible = {owner for name, mapping in table.items() if _WHOLE.fullmatch(name) for owner in _owners(mapping)}
    parts = [owner.split(".") for mapping in table.values() for owner in _owners(mapping)]
    every = {".".join(part[:length]) for part in parts for length in range(1, len(part) + 1)}
    (embedding,) = _owners(table[EMBEDDING])
    tied = {embedding, "lm_head"} if HEAD not in table else set()
    key = "megatron_wrap.adapter.modules_to_save"
    if config.ensure_weight_tying and not tied:
        raise ConfigError(
            "megatron_wrap.adapter.ensure_weight_tying: embedding and output layer are not tied in this model; write "
            "false"
        )
    for entry in config.modules_to_save:
        matched = {name for name in every | tied if name.endswith(entry)}
        if matched & tied and config.ensure_weight_tying:
            if embedding not in matched:
                raise ConfigError(f"{key}: {entry} is tied to {embedding}; list that, with which peft ties its copy")
            continue
        if matched & tied:
            raise ConfigError(
                f"{key}: {entry} is the embedding and the output layer, whose weights are tied in this model; training "
                f"a copy of one of them is not supported: write ensure_weight_tying: true and list {embedding}, which "
                "trains both as one matrix, or remove it"
            )
        if not matched:
            endings = sorted({name.rpartition(".")[2] for name in possible - tied})
            raise _no_match(key, entry, "module of the model", endings)
        if not matched <= possible:
            raise ConfigError(
                f"{key}: {entry} matches {min(matched - possible)}; only embeddings, the output layer and norms can be "
                "trained whole, so list linear layers in target_modules"
            )


def _renamed(mapping: WeightMapping, adapted: Container[str] = ()) -> WeightMapping:
    """The mapping to the tensors of peft's file, where adapted modules are wrapped."""

    def renamed(run: Run) -> Run:
        owner, _, kind = run.name.rpartition(".")
        return replace(run, name=f"{PEFT_PREFIX}{owner}{'.base_layer' if owner in adapted else ''}.{kind}")

    return with_runs(mapping, renamed)


def _is_target(module: str, config: AdapterConfig) -> bool:
    if _matches(module, config.exclude_modules):
        return False
    if config.target_modules == "all-linear":
        return True
    if not _matches(module, config.target_modules):
        return False
    # peft's rule (tuners/tuners_utils.py, check_target_module_exists)
    number = re.match(r"(?:^|.*?\.)[^.]*\.(\d+)\.", module)
    return not config.layers_to_transform or (number is not None and int(number[1]) in config.layers_to_transform)


def _matches(module: str, patterns: str | Iterable[str]) -> bool:
    """peft's rule: a string is a regular expression for the whole name, a list has names or their endings."""
    return bool(re.fullmatch(patterns, module)) if isinstance(patterns, str) else _is_named(module, patterns)


def _is_named(name: str, entries: Iterable[str]) -> bool:
    """peft's rule of lists: a name is an entry, or ends with one after a dot."""
    return any(name == entry or name.endswith(f".{entry}") for entry in entries)


def _pattern_value(name: str, patterns: Mapping[str, Number], default: Number) -> Number:
    return next((value for pattern, value in patterns.items() if _matches_ending(name, pattern)), default)


def _matches_ending(name: str, pattern: str) -> bool:
    """peft's rule of rank_pattern and alpha_pattern (utils/other.py, get_pattern_key)."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def _refuse_unmatched(config: AdapterConfig, candidates: Sequence[_Candidate]) -> None:
    """Refuse an entry of an option that matches no name."""
    modules = [candidate.name for candidate in candidates if candidate.is_module]
    parameters = [candidate.parameter for candidate in candidates if candidate.parameter is not None]
    for entry in config.target_parameters:
        if not any(_is_named(name, (entry,)) for name in parameters):
            endings = sorted({".".join(name.split(".")[-3:]) for name in parameters})
            raise _no_match("megatron_wrap.adapter.target_parameters", entry, "weight of the model", endings)
    unmatched: list[tuple[str, str]] = []
    for key in ("target_modules", "exclude_modules"):
        patterns = getattr(config, key)
        rules = {patterns: patterns} if isinstance(patterns, str) else {entry: (entry,) for entry in patterns}
        for entry, rule in rules.items():
            if entry != "all-linear" and not any(_matches(name, rule) for name in modules):
                unmatched.append((key, entry))
    adapted = [*modules, *(name for name in parameters if _is_named(name, config.target_parameters))]
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = getattr(config, key) or {}
        unmatched += [(key, entry) for entry in patterns if not any(_matches_ending(name, entry) for name in adapted)]
    for key, entry in unmatched:
        endings = sorted({name.rpartition(".")[2] for name in modules})
        raise ConfigError(
            f"{SECTION_PATHS['adapter']}.{key}: {entry} matches no linear layer of the model"
            f"{did_you_mean(entry, endings)}; "
            f"its linear layers are {', '.join(endings)} (no adapters: output layer, embeddings and, in a mixture of "
            "experts, MLPs; target_parameters adapts experts)"
        )


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
                    f"{_ROWS_KEY}: the output layer's weights are tied to the embedding's in this model, so rows of "
                    f"lm_head are those of {modules[EMBEDDING].rpartition('.')[2]}; list the embedding alone"
                )
            continue
        matched = [name for name, module in modules.items() if module.endswith(entry)]
        if len(matched) != 1:
            endings = sorted(module.rpartition(".")[2] for module in modules.values())
            raise _no_match(_ROWS_KEY, entry, "module with rows of tokens", endings)
        rows[matched[0]] = _checked(entry, indices)
    return rows


def _no_match(key: str, entry: str, wanted: str, possible: Sequence[str]) -> ConfigError:
    """The error about an entry of a key that matches nothing of the wanted kind."""
    listed = ", ".join(possible)
    return ConfigError(f"{key}: {entry} matches no {wanted}{did_you_mean(entry, possible)}; possible are {listed}")


def refuse_unknown_tokens(rows: Mapping[str, tuple[int, ...]], vocab_size: int) -> None:
    """Raise a ConfigError if one of `trained_rows` is not in the vocabulary, whose padding is not counted."""
    for index in (index for indices in rows.values() for index in indices):
        if index >= vocab_size:
            raise ConfigError(f"{_ROWS_KEY}: {index} is no index of the model's {vocab_size} tokens; remove it")


def rows_in_peft(config: AdapterConfig) -> list[int] | dict[str, list[int]] | None:
    """The value of trainable_token_indices in adapter_config.json."""
    wanted = config.trainable_token_indices
    if isinstance(wanted, Mapping):
        return {name: list(indices) for name, indices in wanted.items()}
    return list(wanted) or None


def tied_copies(table: Mapping[str, WeightMapping], saved: Mapping[str, WeightMapping]) -> dict[str, str]:
    """Name of each tensor in peft's file that is a copy -> name of the original: the output layer's weights, if they
    are those of an embedding in the `saved_parameters`."""
    if HEAD in table or EMBEDDING not in saved:
        return {}
    (embedding,) = saved[EMBEDDING].shapes()
    return {f"{PEFT_PREFIX}lm_head.weight": embedding}


def row_factors(table: Mapping[str, WeightMapping], rows: Mapping[str, tuple[int, ...]]) -> dict[str, WeightMapping]:
    """Global name of each parameter of `trained_rows` -> its tensor in peft's file."""
    factors = {}
    for name, indices in rows.items():
        ((tensor, shape),) = table[name].shapes().items()
        file_name = f"{PEFT_PREFIX}{tensor.rpartition('.')[0]}.token_adapter.trainable_tokens_delta"
        factors[ROWS[name]] = replicated(file_name, len(indices), shape[1])
    return factors


def _module(mapping: WeightMapping) -> str:
    (name,) = mapping.shapes()
    return name.rpartition(".")[0]


def _by_entry(wanted: Mapping[str, Any], module: str) -> list[int] | None:
    return next((list(indices) for entry, indices in wanted.items() if module.endswith(entry)), None)


def _checked(entry: str, indices: Any) -> tuple[int, ...]:
    if not isinstance(indices, (list, tuple)) or not indices:
        raise ConfigError(f"{_ROWS_KEY}: {entry} needs a list of indices of tokens, not {indices!r}")
    for index in indices:
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise ConfigError(f"{_ROWS_KEY}: {index!r} is no index of a token of {entry}; remove it")
    if len(set(indices)) < len(indices):
        double = next(index for index in indices if indices.count(index) > 1)
        raise ConfigError(f"{_ROWS_KEY}: {double} is listed twice; remove one")
    return tuple(indices)
