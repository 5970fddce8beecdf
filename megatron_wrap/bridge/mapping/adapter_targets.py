"""The weights of a model that `megatron_wrap.adapter` adapts or trains whole, by peft's rules, and the tensors in
peft's files of their factors. Needs no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from megatron_wrap.bridge.mapping.expert_factors import EXPERTS, expert_factors
from megatron_wrap.bridge.mapping.family import Family
from megatron_wrap.bridge.mapping.tensors import Mapping as WeightMapping
from megatron_wrap.bridge.mapping.tensors import Run
from megatron_wrap.bridge.mapping.token_rows import EMBEDDING, as_in_peft, no_match, row_factors, trained_rows
from megatron_wrap.bridge.mapping.value_model import HEAD, SCORE, has_scalar_head
from megatron_wrap.config.schema.model import AdapterConfig
from megatron_wrap.config.schema.run import SECTION_PATHS
from megatron_wrap.errors import ConfigError, did_you_mean

Number = TypeVar("Number", int, float)

PEFT_PREFIX = "base_model.model."
"""Prefix of the names in adapter_model.safetensors."""
PEFT_VERSION = "0.19.0"
"""The release of peft that introduced the format that is written here."""
SEQUENCE_CLASSIFICATION = "SEQ_CLS"
"""peft's task type of a model with a scalar head."""
ADAPTER = "_adapter"
"""Suffix of the name of an adapter's module, after the name of its linear layer."""

_WHOLE = re.compile(r"(?:embedding|output_layer|.*norm)\.(?:\w+\.)?(?:weight|bias)")
"""Pattern of the global names of parameters that can be trained whole."""
_LINEAR = re.compile(r"(decoder\.layers\.\d+\.(?:.*\.)?(?:linear_\w+|in_proj|out_proj))\.weight")
_SAME_IN_PEFT = ("r", "lora_dropout", "use_rslora", "use_dora", "init_lora_weights", "bias", "ensure_weight_tying")


def is_linear(layer: str) -> bool:
    """Whether the global name of a layer is that of a linear layer of the decoder."""
    return _LINEAR.fullmatch(f"{layer}.weight") is not None


@dataclass(frozen=True)
class TargetModule:
    """A module of Hugging Face's model that gets an adapter."""

    name: str
    """Name of the module, such as model.layers.0.self_attn.q_proj."""
    rank: int
    scale: float
    """Factor of the adapter's output: alpha / rank, or alpha / sqrt(rank)."""
    is_parameter: bool = False
    """Whether target_parameters names the module's weight."""

    @property
    def key(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class AdaptedLayer:
    """A linear layer of Megatron-Core with adapters, or the stack of this layer over all experts."""

    name: str
    """Global name, such as decoder.layers.0.self_attention.linear_qkv."""
    weight: WeightMapping
    """Mapping of the layer's weight; for a stack, that of the first expert."""
    modules: tuple[TargetModule, ...]
    """Hugging Face modules of the layer; for a stack, the fused tensor, such as
    model.layers.0.mlp.experts.gate_up_proj."""
    experts: int = 0
    """Number of experts of the stack; 0: one linear layer."""
    nested: bool = False
    """Whether peft wraps a further tensor of the same experts around this one."""
    dora: bool = False
    """Whether the norms of the adapted rows are trained as well."""
    decomposed: bool = False
    """Whether the initial factors, whose product is subtracted from the base, are kept in addition to the trained
    ones."""

    @property
    def is_row_parallel(self) -> bool:
        """Whether tensor parallelism splits the layer's inputs."""
        return self.weight.split and self.weight.along == 1

    def file_stem(self, module: TargetModule) -> str:
        """Name of the module's factors in peft's file, without `.lora_A.weight`."""
        if not self.experts:
            return PEFT_PREFIX + module.name
        return PEFT_PREFIX + module.name.rpartition(".")[0] + (".base_layer" if self.nested else "")

    def runs_of(self, module: TargetModule) -> list[tuple[int, tuple[Run, ...]]]:
        """(index of the part of the layer's weight, the part's runs of this module) where there are any."""
        name = f"{module.name}.weight"
        parts = [tuple(run for run in part if run.name == name) for part in self.weight.parts]
        return [(index, runs) for index, runs in enumerate(parts) if runs]

    def factors(self) -> dict[str, WeightMapping]:
        """Global name of each trained factor -> its tensor in peft's file."""
        table: dict[str, WeightMapping] = {}
        for module in self.modules:
            table |= self._factors_of_experts(module) if self.experts else self._factors_of(module)
        return table

    def all_factors(self) -> dict[str, WeightMapping]:
        """The table of `factors`. With `decomposed` it also contains the initial factors, which follow the trained ones
        along the rank of the tensors, as peft's LoraModel.subtract_mutated_init makes them for an adapter of the
        original base."""
        table = self.factors()
        if not self.decomposed:
            return table
        initial = {
            name.replace(".lora_", ".initial_"): replace(mapping, other_start=mapping.other or 0)
            for name, mapping in table.items()
        }
        return {**table, **initial}

    def _factors_of(self, module: TargetModule) -> dict[str, WeightMapping]:
        """The factors of one linear layer; of each, `other` is the rank."""
        weight, runs = self.weight, self.runs_of(module)
        assert weight.other is not None, "a linear layer's weight has two dimensions"
        stem, file = f"{self.name}{ADAPTER}.lora_", f"{self.file_stem(module)}.lora_"
        if weight.along == 1:
            inputs = sum(run.stop - run.start for _, part in runs for run in part)
            parts: list[tuple[Run, ...]] = [(Run(f"{file}B.weight", 0, weight.other),)]
        else:
            inputs = weight.other
            parts = [tuple(replace(run, name=f"{file}B.weight") for run in part) for _, part in runs]
        a = WeightMapping(((Run(f"{file}A.weight", 0, inputs),),), module.rank, split=self.is_row_parallel, along=1)
        table = {f"{stem}A_{module.key}": a}
        for number, part in enumerate(parts):
            key = module.key if len(parts) == 1 else f"{module.key}_{number}"
            b = WeightMapping((part,), module.rank, split=weight.split and weight.along == 0)
            table[f"{stem}B_{key}"] = b
            if self.dora:
                norms = _with_runs(b, lambda run: replace(run, name=f"{file}magnitude_vector"))
                table[f"{stem}magnitude_{key}"] = replace(norms, other=None)
        return table

    def _factors_of_experts(self, module: TargetModule) -> dict[str, WeightMapping]:
        owner, _, layer = self.name.rpartition(".")
        table: dict[str, WeightMapping] = {}
        for expert in range(self.experts):
            first, second = expert_factors(self.weight, self.file_stem(module), module.rank, expert, self.experts)
            stem = f"{owner}.{expert}.{layer}{ADAPTER}"
            table |= {f"{stem}.lora_A_{module.key}": first, f"{stem}.lora_B_{module.key}": second}
        return table


def _with_runs(mapping: WeightMapping, changed: Callable[[Run], Run]) -> WeightMapping:
    return replace(mapping, parts=tuple(tuple(map(changed, part)) for part in mapping.parts))


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
    _refuse_unsupported(table, config)
    chosen = {candidate: target for candidate in candidates if (target := _target(candidate, config)) is not None}
    names = {candidate.name for candidate in chosen}
    layers: dict[str, AdaptedLayer] = {}
    for candidate, target in chosen.items():
        if config.decomposes_base:
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
            decomposed=config.decomposes_base,
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


def saved_parameters(table: Mapping[str, WeightMapping], config: AdapterConfig) -> dict[str, WeightMapping]:
    """Global name of each parameter that is trained whole in addition to the adapters (modules_to_save, biases, and the
    head of a value model) -> its tensors in peft's file.

    Args:
        table: the family's, global name of each parameter -> its Hugging Face tensors.

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
    return {**_trained_biases(table, config), **whole}


def _trained_biases(table: Mapping[str, WeightMapping], config: AdapterConfig) -> dict[str, WeightMapping]:
    """The biases of `config.bias`; peft's file has those of adapted modules as base_layer.bias."""
    if config.bias == "none":
        return {}
    adapted = {module.name for layer in adapted_layers(table, config) for module in layer.modules}
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
    return [name.rpartition(".")[0] for name in mapping.shapes()]


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
            raise no_match(key, entry, "module of the model", endings)
        if not matched <= possible:
            raise ConfigError(
                f"{key}: {entry} matches {min(matched - possible)}; only embeddings, the output layer and norms can be "
                "trained whole, so list linear layers in target_modules"
            )


def tied_copies(table: Mapping[str, WeightMapping], config: AdapterConfig) -> dict[str, str]:
    """Name of each tensor in peft's file that is a copy -> name of the original: the output layer's weights, if they
    are those of an embedding that is trained whole."""
    if HEAD in table or EMBEDDING not in saved_parameters(table, config):
        return {}
    (embedding,) = _owners(table[EMBEDDING])
    return {f"{PEFT_PREFIX}lm_head.weight": f"{PEFT_PREFIX}{embedding}.weight"}


def adapter_family(
    family: Family, layers: Sequence[AdaptedLayer], config: AdapterConfig, converted: bool = True
) -> Family:
    """The family of peft's folders for these layers: its parameters are the factors and the `saved_parameters`.

    Args:
        converted: with `all_factors`, an adapter of the original base; False: with `factors`, of one that begins with
            factors of the base and belongs to a changed one.
    """
    factors: dict[str, WeightMapping] = {}
    for layer in layers:
        factors |= layer.all_factors() if converted else layer.factors()
    return replace(
        family,
        parameters=lambda arch: {
            **factors,
            **row_factors(family.parameters(arch), config, PEFT_PREFIX),
            **saved_parameters(family.parameters(arch), config),
        },
        base_prefix=PEFT_PREFIX,
        ignored=(re.escape(f"{PEFT_PREFIX}lm_head.weight"),) if config.ensure_weight_tying else (),
        new_if_missing=(),
        is_adapter=True,
    )


def task_type(family: Family) -> str:
    """peft's task type of a model's adapters."""
    return SEQUENCE_CLASSIFICATION if has_scalar_head(family) else "CAUSAL_LM"


def peft_config(layers: Sequence[AdaptedLayer], config: AdapterConfig, base: str | None, task: str) -> dict[str, Any]:
    """Content of adapter_config.json, from which peft.PeftModel builds the same adapters: of `all_factors`.

    Args:
        base: folder or hub id of the base model; None: unknown.
        task: peft's task type, from `task_type`.
    """
    if config.decomposes_base:
        config = _of_twice_the_rank(config)
    head = [SCORE.removesuffix(".weight")] if task == SEQUENCE_CLASSIFICATION else []
    return {
        "peft_type": "LORA",
        "peft_version": PEFT_VERSION,
        "task_type": task,
        "base_model_name_or_path": base,
        "inference_mode": True,
        **{key: getattr(config, key) for key in _SAME_IN_PEFT},
        "lora_alpha": int(config.lora_alpha) if config.lora_alpha == int(config.lora_alpha) else config.lora_alpha,
        "target_modules": [module.name for layer in layers for module in layer.modules if not module.is_parameter],
        "target_parameters": list(config.target_parameters) or None,
        "rank_pattern": dict(config.rank_pattern or {}),
        "alpha_pattern": dict(config.alpha_pattern or {}),
        "fan_in_fan_out": any(layer.weight.transposed for layer in layers),
        "modules_to_save": list(dict.fromkeys([*config.modules_to_save, *head])) or None,
        "trainable_token_indices": as_in_peft(config),
    }


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


def _renamed(mapping: WeightMapping, adapted: Container[str] = ()) -> WeightMapping:
    """The mapping to the tensors of peft's file, where adapted modules are wrapped."""

    def renamed(run: Run) -> Run:
        owner, _, kind = run.name.rpartition(".")
        return replace(run, name=f"{PEFT_PREFIX}{owner}{'.base_layer' if owner in adapted else ''}.{kind}")

    return _with_runs(mapping, renamed)


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
            raise no_match("megatron_wrap.adapter.target_parameters", entry, "weight of the model", endings)
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
