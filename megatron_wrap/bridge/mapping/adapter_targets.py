"""Which linear layers have adapters of `megatron_wrap.adapter`, by peft's rules, and the tensors of peft's
files that its factors are. Needs no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from megatron_wrap.bridge.mapping.expert_factors import EXPERTS, expert_factors
from megatron_wrap.bridge.mapping.family import Family
from megatron_wrap.bridge.mapping.tensors import Mapping as WeightMapping
from megatron_wrap.bridge.mapping.tensors import Run, replicated
from megatron_wrap.bridge.mapping.token_rows import EMBEDDING, as_in_peft, no_match, row_factors, trained_rows
from megatron_wrap.bridge.mapping.value_model import HEAD, SCORE, has_scalar_head
from megatron_wrap.config.schema.model import AdapterConfig
from megatron_wrap.errors import ConfigError, did_you_mean

Number = TypeVar("Number", int, float)

PEFT_PREFIX = "base_model.model."
"""Of names in adapter_model.safetensors."""
SEQUENCE_CLASSIFICATION = "SEQ_CLS"
"""peft's task type of a model with a scalar head."""
ADAPTER = "_adapter"
"""Ending of the name of an adapter's module, which begins with that of its linear layer."""

_WHOLE = re.compile(r"(?:embedding|output_layer|.*norm)\.(?:\w+\.)?(?:weight|bias)")
"""Global names of parameters that can be trained whole."""
_FIRST_EXPERT = re.compile(r"(decoder\.layers\.\d+\.mlp\.experts\.)0\.(linear_fc[12])\.weight")
_LINEAR = re.compile(r"(decoder\.layers\.\d+\.(?:.*\.)?(?:linear_\w+|in_proj|out_proj))\.weight")


def is_linear(layer: str) -> bool:
    """Whether the global name of a layer is that of a linear layer of the decoder."""
    return _LINEAR.fullmatch(f"{layer}.weight") is not None


@dataclass(frozen=True)
class TargetModule:
    """A module of Hugging Face's model that gets an adapter."""

    name: str
    """Such as model.layers.0.self_attn.q_proj."""
    rank: int
    scale: float
    """alpha / rank, or alpha / sqrt(rank)."""
    is_parameter: bool = False
    """Named by target_parameters, as the module's weight."""

    @property
    def key(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class AdaptedLayer:
    """A linear layer of ours with adapters, or the stack of this layer of all experts."""

    name: str
    """Global name, such as decoder.layers.0.self_attention.linear_qkv."""
    weight: WeightMapping
    """Of experts, that of the first one."""
    modules: tuple[TargetModule, ...]
    """Of experts, the fused tensor, such as model.layers.0.mlp.experts.gate_up_proj."""
    experts: int = 0
    """Number of experts of the stack; 0: one linear layer."""
    nested: bool = False
    """peft wraps a further tensor of the same experts around this one."""
    dora: bool = False
    """The norms of the adapted rows are trained as well."""
    decomposed: bool = False
    """The initial factors, whose product is taken from the base, are kept in addition to the trained ones."""
    before_019: bool = False
    """The files have the form of experts' factors that peft had before 0.19."""

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

    def factors(self, converted: bool = True) -> dict[str, WeightMapping]:
        """Global name of each factor -> its tensor in peft's file.

        Args:
            converted: the file is an adapter of the original base: with `decomposed`, factors of twice the rank, the
                trained ones and the initial ones, as peft's LoraModel.subtract_mutated_init makes them; False: the
                trained factors alone, which belong to the changed base.
        """
        table = self._trained_factors()
        if not (self.decomposed and converted):
            return table
        ranks = {module.key: module.rank for module in self.modules}
        for name, mapping in list(table.items()):
            stem, _, kind = name.rpartition(".")
            _, letter, rest = kind.split("_", 2)
            if letter == "magnitude":
                continue
            key = next(key for key in sorted(ranks, key=len, reverse=True) if rest == key or rest.startswith(f"{key}_"))
            initial = f"{stem}.initial_{letter}_{rest}"
            table[initial] = _after(mapping, 0 if letter == "A" else 1, ranks[key])
        return table

    def _trained_factors(self) -> dict[str, WeightMapping]:
        table: dict[str, WeightMapping] = {}
        for module in self.modules:
            if self.experts:
                table |= self._factors_of_experts(module)
                continue
            stem, file_norms = f"{self.name}{ADAPTER}", f"{self.file_stem(module)}.lora_magnitude_vector"
            file_a, file_b = (f"{self.file_stem(module)}.lora_{letter}.weight" for letter in "AB")
            other, runs = self.weight.other, self.runs_of(module)
            assert other is not None, "a linear layer's weight has two dimensions"
            if self.weight.along == 1:
                length = sum(run.stop - run.start for _, part in runs for run in part)
                table[f"{stem}.lora_A_{module.key}"] = WeightMapping(
                    ((Run(file_a, 0, length),),), module.rank, along=1, split=self.weight.split
                )
                table[f"{stem}.lora_B_{module.key}"] = replicated(file_b, other, module.rank)
                if self.dora:
                    table[f"{stem}.lora_magnitude_{module.key}"] = replicated(file_norms, other)
                continue
            table[f"{stem}.lora_A_{module.key}"] = replicated(file_a, module.rank, other)
            for number, (_, part) in enumerate(runs):
                key = module.key if len(runs) == 1 else f"{module.key}_{number}"
                renamed = tuple(replace(run, name=file_b) for run in part)
                table[f"{stem}.lora_B_{key}"] = WeightMapping((renamed,), module.rank, split=self.weight.split)
                if self.dora:
                    renamed = tuple(replace(run, name=file_norms) for run in part)
                    table[f"{stem}.lora_magnitude_{key}"] = WeightMapping((renamed,), None, split=self.weight.split)
        return table

    def _factors_of_experts(self, module: TargetModule) -> dict[str, WeightMapping]:
        owner, _, layer = self.name.rpartition(".")
        table: dict[str, WeightMapping] = {}
        for expert in range(self.experts):
            first, second = expert_factors(
                self.weight, self.file_stem(module), module.rank, expert, self.experts, self.before_019
            )
            stem = f"{owner}.{expert}.{layer}{ADAPTER}"
            table |= {f"{stem}.lora_A_{module.key}": first, f"{stem}.lora_B_{module.key}": second}
        return table


def _refuse_large_rank(module: TargetModule, shape: Sequence[int], config: AdapterConfig) -> None:
    if module.rank > min(shape):
        raise ConfigError(
            f"megatron_wrap.adapter.init_lora_weights: {config.init_lora_weights} has at most {min(shape)} vectors of "
            f"{module.name}, whose weight is {shape[0]} x {shape[1]}, and its rank is {module.rank}; write a smaller "
            "r, or one in rank_pattern"
        )


def _after(mapping: WeightMapping, dim: int, start: int) -> WeightMapping:
    """The mapping to the part of the same tensors that begins at index `start` of dimension `dim`."""
    if mapping.along != dim:
        return replace(mapping, other_start=start)
    return _with_runs(mapping, lambda run: replace(run, start=run.start + start, stop=run.stop + start))


def _with_runs(mapping: WeightMapping, changed: Callable[[Run], Run]) -> WeightMapping:
    return replace(mapping, parts=tuple(tuple(map(changed, part)) for part in mapping.parts))


def adapted_layers(table: Mapping[str, WeightMapping], config: AdapterConfig) -> list[AdaptedLayer]:
    """The linear layers with adapters, in model order.

    Args:
        table: the family's, global name of each parameter -> its Hugging Face tensors.

    Raises:
        ConfigError: an entry of target_modules or exclude_modules, or a pattern of ranks or alphas, matches no module,
            or one of modules_to_save a module that cannot be trained whole; a rank is larger than a decomposed weight.
    """
    linear = {match[1]: mapping for name, mapping in table.items() if (match := _LINEAR.fullmatch(name))}
    by_parameter = {
        name: [module for module in _module_names(mapping) if _is_named(f"{module}.weight", config.target_parameters)]
        for name, mapping in linear.items()
        if _has_parameter(name, mapping)
    }
    every = linear
    if any(".mlp.experts." in name for name in linear):
        # peft 0.21 takes the names of an MLP's modules in such a model as those of all of its experts, which
        # transformers 5 stores in one tensor (peft/utils/transformers_weight_conversion.py, _convert_peft_config_moe)
        linear = {name: mapping for name, mapping in linear.items() if ".self_attention." in name}
    modules = [name for mapping in linear.values() for name in _module_names(mapping)]
    experts = adapted_experts(table, config)
    named = [f"{module}.weight" for of_layer in by_parameter.values() for module in of_layer]
    _refuse_unmatched(config, modules, [*(layer.modules[0].name for layer in experts), *named])
    _refuse_unsupported(table, config)
    layers = []
    for name, mapping in every.items():
        names = _module_names(mapping) if name in linear else []
        targets = tuple(_target(module, config) for module in names if _is_target(module, config))
        targets += tuple(_parameter_target(module, config, targets) for module in by_parameter.get(name, ()))
        for module in targets if config.decomposes_base else ():
            _refuse_large_rank(module, mapping.shapes()[f"{module.name}.weight"], config)
        if targets:
            layers.append(AdaptedLayer(name, mapping, targets, dora=config.use_dora, decomposed=config.decomposes_base))
    layers += experts
    if not layers:
        raise ConfigError("megatron_wrap.adapter: no linear layer remains; change target_modules or exclude_modules")
    return layers


def adapted_experts(table: Mapping[str, WeightMapping], config: AdapterConfig) -> list[AdaptedLayer]:
    """The stacks of experts that target_parameters name, by peft's rule: a name ends with an entry, after a dot."""
    if not config.target_parameters:
        return []
    stacks: dict[str, tuple[str, WeightMapping]] = {}
    for name, mapping in table.items():
        if match := _FIRST_EXPERT.fullmatch(name):
            # transformers 5 has one name for the MLPs of all families
            owner = next(iter(mapping.shapes())).partition(".experts.")[0].rpartition(".")[0]
            fused = EXPERTS[0] if match[2] == "linear_fc1" else EXPERTS[1]
            stacks[f"{owner}.mlp.experts.{fused}"] = match[1] + match[2], mapping

    weights = [
        f"{module}.weight"
        for name, mapping in table.items()
        if (match := _LINEAR.fullmatch(name)) and _has_parameter(match[1], mapping)
        for module in _module_names(mapping)
    ]
    for entry in config.target_parameters:
        if not any(_is_named(name, (entry,)) for name in [*stacks, *weights]):
            endings = sorted({f"mlp.experts.{name.rpartition('.')[2]}" for name in stacks})
            endings += sorted({".".join(name.split(".")[-3:]) for name in weights})
            raise no_match("megatron_wrap.adapter.target_parameters", entry, "weight of the model", endings)
    chosen = [name for name in stacks if _is_named(name, config.target_parameters)]
    layers = []
    for name in chosen:
        (ours, mapping), stem = stacks[name], name.rpartition(".")[0]
        experts = ours.rpartition(".")[0] + "."
        count = sum(other.startswith(experts) and other.endswith(".linear_fc1.weight") for other in table)
        nested = name.endswith(EXPERTS[0]) and f"{stem}.{EXPERTS[1]}" in chosen
        older = config.expert_files == "before_peft_0.19"
        layers.append(AdaptedLayer(ours, mapping, (_target(name, config),), count, nested, before_019=older))
    return layers


def _has_parameter(layer: str, mapping: WeightMapping) -> bool:
    """Whether peft's target_parameters can name the weights of a linear layer: not those of a fused expert, and not
    transposed ones, whose factors peft would exchange."""
    return ".mlp.experts." not in layer and not mapping.transposed


def _is_named(name: str, entries: Iterable[str]) -> bool:
    """peft's rule of target_parameters: a name ends with an entry, after a dot."""
    return any(name == entry or name.endswith(f".{entry}") for entry in entries)


def _parameter_target(module: str, config: AdapterConfig, others: Sequence[TargetModule]) -> TargetModule:
    if any(other.name == module for other in others):
        raise ConfigError(
            f"megatron_wrap.adapter: target_modules and target_parameters both name {module}; remove it from one of "
            "the two"
        )
    return replace(_target(f"{module}.weight", config), name=module, is_parameter=True)


def saved_parameters(table: Mapping[str, WeightMapping], config: AdapterConfig) -> dict[str, WeightMapping]:
    """Global name of each parameter that is trained whole in addition to the adapters (modules_to_save, biases, and the
    head of a value model) -> its tensors in peft's file.

    Args:
        table: the family's, global name of each parameter -> its Hugging Face tensors.

    Raises:
        ConfigError: an entry matches no module, or one that cannot be trained whole; lora_only means a part of a bias.
    """
    _refuse_unsupported(table, config)
    whole = {
        name: _renamed(mapping)
        for name, mapping in table.items()
        if any(map(_is_saved(config), _owners(mapping))) or (name == HEAD and SCORE in mapping.shapes())
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


def _is_saved(config: AdapterConfig) -> Callable[[str], bool]:
    """peft's rule (utils/other.py, _set_trainable): a name of a module ends with an entry, also within a word."""
    return lambda module: module.endswith(config.modules_to_save)


def _owners(mapping: WeightMapping) -> list[str]:
    """The Hugging Face modules of a parameter's tensors."""
    return [name.rpartition(".")[0] for name in mapping.shapes()]


def _refuse_unsupported(table: Mapping[str, WeightMapping], config: AdapterConfig) -> None:
    possible = {owner for name, mapping in table.items() if _WHOLE.fullmatch(name) for owner in _owners(mapping)}
    names = {owner for mapping in table.values() for owner in _owners(mapping)}
    parts = [name.split(".") for name in names]
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
    """Name of each tensor in peft's file that is a copy -> that of the tensor: the output layer's weights, which are
    those of an embedding that is trained whole."""
    if HEAD in table or EMBEDDING not in saved_parameters(table, config):
        return {}
    (embedding,) = _owners(table[EMBEDDING])
    return {f"{PEFT_PREFIX}lm_head.weight": f"{PEFT_PREFIX}{embedding}.weight"}


def adapter_family(
    family: Family, layers: Sequence[AdaptedLayer], config: AdapterConfig, converted: bool = True
) -> Family:
    """The family of peft's folders for these layers: its parameters are the factors and the `saved_parameters`.

    Args:
        converted: as of `AdaptedLayer.factors`.
    """
    factors = {name: mapping for layer in layers for name, mapping in layer.factors(converted).items()}
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


def peft_config(
    layers: Sequence[AdaptedLayer], config: AdapterConfig, base: str | None, task: str, converted: bool = True
) -> dict[str, Any]:
    """Content of adapter_config.json, from which peft.PeftModel builds the same adapters.

    Args:
        base: folder or hub id of the base model; None: unknown.
        task: peft's task type, from `task_type`.
        converted: as of `AdaptedLayer.factors`.
    """
    if config.decomposes_base and converted:
        config = _of_twice_the_rank(config)
    modules = [
        module.name for layer in layers if not layer.experts for module in layer.modules if not module.is_parameter
    ]
    head = [SCORE.removesuffix(".weight")] if task == SEQUENCE_CLASSIFICATION else []
    saved = list(dict.fromkeys([*config.modules_to_save, *head]))
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": config.r,
        "lora_alpha": int(config.lora_alpha) if config.lora_alpha == int(config.lora_alpha) else config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "target_modules": modules,
        "target_parameters": list(config.target_parameters) or None,
        "rank_pattern": dict(config.rank_pattern or {}),
        "alpha_pattern": dict(config.alpha_pattern or {}),
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "init_lora_weights": config.init_lora_weights,
        "fan_in_fan_out": any(layer.weight.transposed for layer in layers),
        "bias": config.bias,
        "modules_to_save": saved or None,
        "trainable_token_indices": as_in_peft(config),
        "ensure_weight_tying": config.ensure_weight_tying,
    }


def _of_twice_the_rank(config: AdapterConfig) -> AdapterConfig:
    """The adapter whose factors are the trained ones and the initial ones, with the same scales."""
    more = math.sqrt(2) if config.use_rslora else 2
    return replace(
        config,
        r=2 * config.r,
        lora_alpha=more * config.lora_alpha,
        rank_pattern={pattern: 2 * rank for pattern, rank in (config.rank_pattern or {}).items()} or None,
        alpha_pattern={pattern: more * alpha for pattern, alpha in (config.alpha_pattern or {}).items()} or None,
        init_lora_weights=True,
    )


def _renamed(mapping: WeightMapping, adapted: Container[str] = ()) -> WeightMapping:
    """The mapping to the tensors of peft's file, where adapted modules are wrapped."""

    def renamed(run: Run) -> Run:
        owner, _, kind = run.name.rpartition(".")
        return replace(run, name=f"{PEFT_PREFIX}{owner}{'.base_layer' if owner in adapted else ''}.{kind}")

    return _with_runs(mapping, renamed)


def _module_names(mapping: WeightMapping) -> list[str]:
    names = (run.name.removesuffix(".weight") for part in mapping.parts for run in part)
    return list(dict.fromkeys(names))


def _is_target(module: str, config: AdapterConfig) -> bool:
    if _matches(module, config.exclude_modules):
        return False
    if config.target_modules == "all-linear":
        return True
    if not _matches(module, config.target_modules):
        return False
    if not config.layers_to_transform:
        return True
    patterns = _texts(config.layers_pattern) or (r"[^.]*",)
    match = next(filter(None, (_layer_number(module, pattern) for pattern in patterns)), None)
    return match is not None and int(match["number"]) in config.layers_to_transform


def _layer_number(module: str, pattern: str) -> re.Match[str] | None:
    """peft's rule of layers_pattern (tuners/tuners_utils.py, check_target_module_exists); the group `number` is an
    index."""
    return re.match(rf"(?:^|.*?\.)(?:{pattern})\.(?P<number>\d+)\.", module)


def _texts(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


def _matches(module: str, patterns: str | Iterable[str]) -> bool:
    """peft's rule: a string is a regular expression for the whole name, a list has names or their endings."""
    if isinstance(patterns, str):
        return re.fullmatch(patterns, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in patterns)


def _target(module: str, config: AdapterConfig) -> TargetModule:
    rank = _pattern_value(module, config.rank_pattern or {}, config.r)
    alpha = _pattern_value(module, config.alpha_pattern or {}, config.lora_alpha)
    return TargetModule(module, rank, alpha / (math.sqrt(rank) if config.use_rslora else rank))


def _pattern_value(module: str, patterns: Mapping[str, Number], default: Number) -> Number:
    return next((value for pattern, value in patterns.items() if _matches_ending(module, pattern)), default)


def _matches_ending(module: str, pattern: str) -> bool:
    """peft's rule of rank_pattern and alpha_pattern (utils/other.py, get_pattern_key)."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def _refuse_unmatched(config: AdapterConfig, modules: list[str], parameters: list[str]) -> None:
    endings = sorted({name.rpartition(".")[2] for name in modules})
    for key in ("target_modules", "exclude_modules"):
        patterns = getattr(config, key)
        if patterns == "all-linear":
            continue
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            entry = pattern if isinstance(patterns, str) else (pattern,)
            if not any(_matches(name, entry) for name in modules):
                raise _unmatched(f"megatron_wrap.adapter.{key}", pattern, endings)
    for pattern in _texts(config.layers_pattern):
        if not any(_layer_number(name, pattern) for name in modules):
            lists = sorted({part for name in modules for part in re.findall(r"([^.]+)\.\d+\.", name)})
            raise ConfigError(
                f"megatron_wrap.adapter.layers_pattern: {pattern} is no list of layers of the model"
                f"{did_you_mean(pattern, lists)}; possible is {', '.join(lists)}"
            )
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, key) or {}:
            if not any(_matches_ending(name, pattern) for name in [*modules, *parameters]):
                raise _unmatched(f"megatron_wrap.adapter.{key}", pattern, endings)


def _unmatched(path: str, pattern: str, endings: list[str]) -> ConfigError:
    return ConfigError(
        f"{path}: {pattern} matches no linear layer of the model{did_you_mean(pattern, endings)}; its linear layers "
        f"are {', '.join(endings)} (no adapters: output layer, embeddings and, in a mixture of experts, MLPs; "
        "target_parameters adapts experts)"
    )
