"""`megatron_wrap.model_provider.hf_path`: the architecture from a Hugging Face folder's config.json. No torch.

A family (`megatron_wrap.bridge.families`) translates its config.json. The registry below imports it by name, since this
layer may not.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_wrap.config.config_json import Quantization, check_types, read_json, read_quantization
from megatron_wrap.config.reading.composition import ComposedConfig
from megatron_wrap.config.reading.tree import Origin, SetBy
from megatron_wrap.config.reading.yaml_nodes import Node, describe, shown_path
from megatron_wrap.config.schema.run import SECTION_PATHS, RunConfig
from megatron_wrap.errors import ConfigError, UnsupportedModel
from megatron_wrap.nearest_names import did_you_mean, missing_path_hint
from megatron_wrap.registry import Registry

HF_PATH = f"{SECTION_PATHS['model_provider']}.hf_path"
FROM_HUGGING_FACE = "hugging-face"
"""File of the tree that leaves the architecture to config.json; selected by default."""

TRAINING_KEYS = frozenset({"hidden_dropout", "attention_dropout", "init_method_std", "moe_router_dtype"})
"""Keys of training and precision, which a run may set to other values than config.json."""

CONFIG_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "merges*")
"""Patterns of the small files of a hub repository, which reading a configuration downloads."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")

_SHIPPED = (
    *("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_oss", "kimi_k2", "llama"),
    *("ministral", "ministral3", "mistral", "mistral4", "mixtral", "phi3"),
    *("gemma", "gemma2", "gemma3_text", "minimax_m2", "olmo2", "olmo3"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    *("seed_oss", "smollm3"),
)

_HYPER = "several residual streams are mixed by learned hyper-connections"
_INDEXER = "an indexer chooses the keys that a query attends (sparse attention)"
_LARGE4 = (
    f"{_INDEXER}; layers share latent keys and values, learned factors scale rotary frequencies and scores, and "
    "logits are capped by tanh"
)
UNSUPPORTED: Mapping[str, str] = {
    "deepseek_v32": _INDEXER,
    "deepseek_v4": f"{_HYPER}; attention is compressed, and {_INDEXER}; scores of experts are the root of softplus",
    "glm_moe_dsa": _INDEXER,
    "glm5_next": f"{_HYPER}; some layers have linear attention; {_INDEXER}",
    "glm5_next_text": f"{_HYPER}; some layers have linear attention; {_INDEXER}",
    "kimi_linear": "most layers have Kimi delta attention, with a decay for each channel of a key",
    "kimi_k25": "the text model is part of a model with a vision encoder and INT4 weights",
    "mistral_large4": _LARGE4,
    "mistral_large4_text": _LARGE4,
    "qwen4_exp": f"{_HYPER}; layers add embeddings of n-grams, or have linear attention; {_INDEXER}",
    "qwen4_exp_text": f"{_HYPER}; layers add embeddings of n-grams, or have linear attention; {_INDEXER}",
}
"""model_type -> features of the family that our layers lack."""

WITH_VISION = frozenset({"gemma3", "mistral3", "qwen3_5", "qwen3_5_moe"})
"""model_types whose `text_config` is the configuration of a family, the only part that is read."""

FAMILIES: Registry[Any] = Registry(
    "Hugging Face model_type",
    "megatron_wrap.bridges",
    {name: f"megatron_wrap.bridge.families.{name}:FAMILY" for name in _SHIPPED},
)
"""model_type -> family. Installed packages add families through the entry point group megatron_wrap.bridges."""


def register_bridge(family: Any) -> Any:
    """Make a family (`megatron_wrap.bridge.mapping.family.Family`) available under its model_type; returns it.

    Raises:
        ConfigError: the model_type is taken.
    """
    return FAMILIES.register(family.model_type)(family)


@dataclass(frozen=True)
class HuggingFaceConfig:
    """Content of a folder's config.json; for a model with a vision encoder, its text_config."""

    folder: Path
    values: Mapping[str, Any]
    family: Any
    """The `Family` of the model_type."""
    arch_values: Mapping[str, Any]
    """Key of `megatron_lm.model.arch` -> value that config.json defines."""
    quantization: Quantization | None = None
    """Quantization of the stored weights; None: they are not quantized."""
    with_vision: Mapping[str, Any] | None = None
    """Whole content of config.json of a model with a vision encoder; None for other models."""

    @property
    def shown(self) -> str:
        """Path of config.json for messages."""
        return shown_path(self.folder / "config.json")

    @property
    def has_tokenizer(self) -> bool:
        """Whether the folder has a tokenizer."""
        return any((self.folder / name).is_file() for name in _TOKENIZER_FILES)


class NotDownloaded(ConfigError):
    """A hub id whose files are not in the local cache; `megatron_wrap.bridge.loading.hub` downloads them."""

    def __init__(self, repo_id: str) -> None:
        super().__init__(
            f"there is no folder {repo_id!r}, and the local Hugging Face cache does not contain it; download it with "
            f"`hf download {repo_id}`, or name a local folder"
        )
        self.repo_id = repo_id


def resolve_folder(path_or_id: str) -> Path:
    """The local folder of a path, or of a hub id `name` or `org/name` in the local cache; opens no connection.

    Raises:
        ConfigError: no such folder.
        NotDownloaded: a hub id that is not in the cache.
    """
    folder = Path(path_or_id).expanduser()
    if os.path.isdir(folder):  # Path.is_dir raises if a name is too long
        return folder
    local_names = {entry.name for entry in Path().iterdir()}
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path_or_id) or folder.parts[0] in local_names:
        raise ConfigError(f"no Hugging Face folder {path_or_id!r}{missing_path_hint(path_or_id)}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(path_or_id, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise NotDownloaded(path_or_id) from error
    if not (cached / "config.json").is_file():  # the cache contains only other files of the repository
        raise NotDownloaded(path_or_id)
    return cached


def read_hugging_face_config(path_or_id: str) -> HuggingFaceConfig:
    """Read and translate config.json.

    Raises:
        ConfigError: no folder or file, no JSON, no or an unknown model_type.
        UnsupportedModel: it needs a feature that our layers lack.
    """
    folder = resolve_folder(path_or_id)
    path = folder / "config.json"
    shown = shown_path(path)
    if not os.path.exists(path):
        raise ConfigError(f"{shown}: no such file; a Hugging Face folder has a config.json")
    values = read_json(path, "download the file again")
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ConfigError(f"{shown}: has no model_type; name the folder of a transformers model")
    with_vision = values if values["model_type"] in WITH_VISION else None
    if with_vision is not None:
        values = _text_part(with_vision, shown)
    family = family_of(values["model_type"], shown)
    try:
        if family.model_type in _SHIPPED:
            check_types(values)
        quantization = read_quantization(values)
        arch = family.arch_values(values)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{shown}: this {family.model_type} cannot be built: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{shown}: {error}; download the file again") from error
    return HuggingFaceConfig(folder, values, family, arch, quantization, with_vision)


def _text_part(values: Mapping[str, Any], shown: str) -> dict[str, Any]:
    """The part of config.json that describes the language model in a folder with a vision encoder."""
    text = values.get("text_config")
    if not isinstance(text, dict) or not isinstance(text.get("model_type"), str):
        raise ConfigError(f"{shown}: text_config has no model_type; name the folder of a transformers model")
    outer = ("quantization_config", "dtype", "torch_dtype", "tie_word_embeddings")
    return {**text, **{key: values[key] for key in outer if key in values}}


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Content of generation_config.json; empty if a folder has none.

    Raises:
        ConfigError: it is damaged, or its end tokens are no ids.
    """
    path = folder / "generation_config.json"
    if not os.path.exists(path):
        return {}
    values = read_json(path, "download the file again, or delete it")
    if not isinstance(values, dict):
        raise ConfigError(f"{shown_path(path)}: must be a mapping, not {describe(values)}; download it again")
    ends = values.get("eos_token_id")
    each = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if any(isinstance(end, bool) or not isinstance(end, int) for end in each):
        raise ConfigError(f"{shown_path(path)}: eos_token_id must be one or several ids, not {describe(ends)}")
    return values


def family_of(model_type: str, where: str = "") -> Any:
    """The family of a model_type.

    Raises:
        ConfigError: there is none; the message names the known ones.
    """
    if model_type in FAMILIES:
        return FAMILIES.resolve(model_type)
    if model_type in UNSUPPORTED:
        raise UnsupportedModel(
            f"{where + ': ' if where else ''}model_type {model_type} cannot be built exactly: {UNSUPPORTED[model_type]}"
        )
    known = FAMILIES.keys()  # config.json must not name code to import
    raise ConfigError(
        f"{where + ': ' if where else ''}unknown model_type {model_type!r}{did_you_mean(model_type, known) or '.'} "
        f"Known: {', '.join(known)}; megatron_wrap.bridge.register_bridge adds one"
    )


def add_hugging_face(nest: ComposedConfig) -> None:
    """Set the architecture and the tokenizer from config.json of `hf_path`; without `hf_path` only check that an
    architecture is selected.

    Raises:
        ConfigError: see `read_hugging_face_config`; or a value of the YAML contradicts config.json.
    """
    arch = nest.sections[SECTION_PATHS["arch"]]
    origins = nest.origins(HF_PATH)
    path_or_id = origins[-1].node.value if origins else None
    if path_or_id is None:
        if arch.selected == FROM_HUGGING_FACE:
            raise ConfigError(
                f"{nest.view_file} {arch.path}: nothing is selected; write arch: {{__select__: NAME}} (such as "
                f"tiny-llama or llama3-8b), or set {HF_PATH} to a Hugging Face folder"
            )
        return
    if not isinstance(path_or_id, str):
        return  # a wrong type is refused when the value is decoded
    try:
        hf_config = read_hugging_face_config(path_or_id)
    except NotDownloaded:
        raise
    except ConfigError as error:
        raise type(error)(f"{origins[-1].node.where} {HF_PATH}: {error}") from error
    for key, value in hf_config.arch_values.items():
        _add_to_arch(nest, hf_config, key, value)
    tokenizer = nest.origins(f"{SECTION_PATHS['data']}.tokenizer")
    if tokenizer and tokenizer[-1].node.value is None and hf_config.has_tokenizer:
        nest.add(SECTION_PATHS["data"], "tokenizer", _origin(hf_config, str(hf_config.folder)))


def spelled_out(config: RunConfig) -> list[str]:
    """Overrides that set the whole architecture of a run instead of its `hf_path`."""
    arch = {field.name: getattr(config.arch, field.name) for field in dataclasses.fields(config.arch)}
    values = {**{key: value for key, value in arch.items() if key != "upstream"}, **config.arch.upstream}
    section = SECTION_PATHS["arch"]
    keys = [f"{section}.{key}={json.dumps(value)}" for key, value in values.items()]
    return [f"{HF_PATH}=null", f"{section}.__select__=language-model-base", *keys]


def _add_to_arch(nest: ComposedConfig, hf_config: HuggingFaceConfig, key: str, value: Any) -> None:
    section = nest.sections[SECTION_PATHS["arch"]]
    origin = _origin_in_run(section.origins.get(key, []), is_selected=section.selected != FROM_HUGGING_FACE)
    if origin is None:
        if key in section.origins or value is not None:
            nest.add(section.path, key, _origin(hf_config, value))
        return
    positions_are_rotary = hf_config.arch_values.get("position_embedding_type") != "learned_absolute"
    if key in TRAINING_KEYS or (key == "max_position_embeddings" and positions_are_rotary):
        return
    run_value = origin.node.plain()
    if not _equal(run_value, value):
        raise ConfigError(
            f"{origin.node.where} {section.path}.{key}: {describe(run_value)} contradicts {describe(value)} of "
            f"{hf_config.shown}; delete the key (and any selection of {section.path}), or choose another {HF_PATH}"
        )


def _origin(hf_config: HuggingFaceConfig, value: Any) -> Origin:
    return Origin(Node(value, hf_config.shown), SetBy.HF_PATH, "hf_path")


def _origin_in_run(origins: list[Origin], is_selected: bool) -> Origin | None:
    """The origin of a value that the run sets: in the file that it selects, by an override, on the command line."""
    if not origins or origins[-1].node.value is None:
        return None
    return origins[-1] if is_selected or origins[-1].by_run else None


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_equal, first, second))
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    return bool(first == second)
