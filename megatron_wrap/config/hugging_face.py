"""`megatron_wrap.model_provider.hf_path`: the architecture from a Hugging Face folder's config.json. No torch.

A family (`megatron_wrap.bridge.families`) defines what its config.json means. It is found by name through the registry
below, so this layer imports none of them.
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

from megatron_wrap.config.nest import ValidatedNest
from megatron_wrap.config.paths import missing_path_hint
from megatron_wrap.config.reading import Node, describe, shown_path
from megatron_wrap.config.record import Origin
from megatron_wrap.config.schema import SECTION_PATHS, RunConfig
from megatron_wrap.errors import ConfigError, UnsupportedModel, did_you_mean
from megatron_wrap.registry import Registry

HF_PATH = f"{SECTION_PATHS['model_provider']}.hf_path"
HOW = "hf_path"
"""Name of this source in the record of origins."""
FROM_HUGGING_FACE = "hugging-face"
"""File of the tree that leaves the whole architecture to config.json; selected by default."""

TRAINING_KEYS = frozenset({"hidden_dropout", "attention_dropout", "init_method_std", "moe_router_dtype"})
"""Keys of config.json that only concern training or precision: a run may set other values."""

CONFIG_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "merges*")
"""What of a hub repository is fetched to read a configuration: everything small."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")

_SHIPPED = (
    *("deepseek_v2", "deepseek_v3", "gpt2", "llama", "mistral", "mixtral", "phi3"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
)

_GEMMA = "the embedding's output is scaled by sqrt(hidden_size), and the MLP is a gated GELU"
LACKING: Mapping[str, str] = {
    "gemma": _GEMMA,
    "gemma2": f"{_GEMMA}; logits and attention scores are capped by tanh, and layers have norms after their blocks",
    "gemma3": f"{_GEMMA}; layers have norms after their blocks, and local and global layers rotate by different bases",
    "gemma3_text": f"{_GEMMA}; layers have norms after their blocks, and local and global layers rotate by "
    "different bases",
    "olmo2": "norms only follow attention and MLP, and those of queries and keys span all heads",
}
"""model_type -> what it needs that our layers lack."""

FAMILIES: Registry[Any] = Registry(
    "Hugging Face model_type",
    "megatron_wrap.bridges",
    {name: f"megatron_wrap.bridge.families.{name}:FAMILY" for name in _SHIPPED},
)
"""model_type -> family. Installed packages add theirs through the entry point group megatron_wrap.bridges."""


def register_bridge(family: Any) -> Any:
    """Make a family (`megatron_wrap.bridge.family.Family`) available under its model_type; returns it.

    Raises:
        ConfigError: the model_type is taken.
    """
    return FAMILIES.register(family.model_type)(family)


@dataclass(frozen=True)
class HuggingFaceConfig:
    """A folder's config.json, read."""

    folder: Path
    values: Mapping[str, Any]
    family: Any
    """The `Family` of its model_type."""
    arch_values: Mapping[str, Any]
    """Keys of `megatron_lm.model.arch`."""

    @property
    def shown(self) -> str:
        """The file's name for messages."""
        return shown_path(self.folder / "config.json")

    @property
    def has_tokenizer(self) -> bool:
        """Whether a tokenizer lies beside it."""
        return any((self.folder / name).is_file() for name in _TOKENIZER_FILES)


class NotDownloaded(ConfigError):
    """A hub id whose files are not in the local cache; `megatron_wrap.bridge.hub` downloads them."""

    def __init__(self, repo_id: str) -> None:
        super().__init__(
            f"no folder {repo_id!r} is here, and the local Hugging Face cache does not have it; download it with "
            f"`hf download {repo_id}`, or give a local folder"
        )
        self.repo_id = repo_id


def resolve_folder(path_or_id: str) -> Path:
    """The local folder of a path, or of a hub id `name` or `org/name` in the local cache. Opens no connection.

    Raises:
        ConfigError: no such folder.
        NotDownloaded: a hub id that is not in the cache.
    """
    folder = Path(path_or_id).expanduser()
    if os.path.isdir(folder):  # pathlib raises for a name that is too long
        return folder
    here = {entry.name for entry in Path().iterdir()}
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path_or_id) or folder.parts[0] in here:
        raise ConfigError(f"no Hugging Face folder {path_or_id!r}{missing_path_hint(path_or_id)}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(path_or_id, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise NotDownloaded(path_or_id) from error
    if not (cached / "config.json").is_file():  # the cache has other files of it
        raise NotDownloaded(path_or_id)
    return cached


def read_hugging_face_config(path_or_id: str) -> HuggingFaceConfig:
    """Read and translate config.json.

    Raises:
        ConfigError: no folder or file, no JSON, no or an unknown model_type.
        UnsupportedModel: it asks for what Megatron-Core lacks.
    """
    folder = resolve_folder(path_or_id)
    path = folder / "config.json"
    shown = shown_path(path)
    if not path.is_file():
        raise ConfigError(f"{shown}: no such file; a Hugging Face folder has a config.json")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{shown}: not JSON ({error}); fetch the file again") from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ConfigError(f"{shown}: has no model_type; it is not the config.json of a transformers model")
    family = family_of(values["model_type"], shown)
    if values.get("quantization_config"):
        raise UnsupportedModel(f"{shown}: has a quantization_config; give the weights in bf16, fp16 or fp32")
    try:
        arch = family.arch_values(values)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{shown}: this {family.model_type} cannot be built: {error}") from error
    return HuggingFaceConfig(folder, values, family, arch)


def family_of(model_type: str, where: str = "") -> Any:
    """The family of a model_type.

    Raises:
        ConfigError: there is none; the known ones are named.
    """
    known = FAMILIES.keys()
    if model_type in LACKING and model_type not in known:
        raise UnsupportedModel(
            f"{where + ': ' if where else ''}model_type {model_type} cannot be built exactly: {LACKING[model_type]}"
        )
    if model_type not in known:  # the text of a file must not import code
        raise ConfigError(
            f"{where + ': ' if where else ''}unknown model_type {model_type!r}{did_you_mean(model_type, known) or '.'} "
            f"Known: {', '.join(known)}; megatron_wrap.bridge.register_bridge adds one"
        )
    return FAMILIES.resolve(model_type)


def add_hugging_face(nest: ValidatedNest) -> None:
    """Add config.json of `hf_path` to the sources of a run, for the architecture and the tokenizer; without `hf_path`
    only check that an architecture is selected.

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
                f"tiny-llama or llama3-8b), or give a Hugging Face folder as {HF_PATH}"
            )
        return
    if not isinstance(path_or_id, str):
        return  # a wrong type is refused when the value is decoded
    try:
        found = read_hugging_face_config(path_or_id)
    except NotDownloaded:
        raise
    except ConfigError as error:
        raise type(error)(f"{origins[-1].node.where} {HF_PATH}: {error}") from error
    for key, value in found.arch_values.items():
        _add_to_arch(nest, found, key, value)
    tokenizer = nest.origins(f"{SECTION_PATHS['data']}.tokenizer")
    if tokenizer and tokenizer[-1].node.value is None and found.has_tokenizer:
        nest.add(SECTION_PATHS["data"], "tokenizer", Node(str(found.folder), found.shown), HOW)


def spelled_out(config: RunConfig) -> list[str]:
    """Overrides that set the whole architecture of a run instead of its `hf_path`."""
    arch = {field.name: getattr(config.arch, field.name) for field in dataclasses.fields(config.arch)}
    values = {**{key: value for key, value in arch.items() if key != "upstream"}, **config.arch.upstream}
    section = SECTION_PATHS["arch"]
    given = [f"{section}.{key}={json.dumps(value)}" for key, value in values.items()]
    return [f"{HF_PATH}=null", f"{section}.__select__=language-model-base", *given]


def _add_to_arch(nest: ValidatedNest, found: HuggingFaceConfig, key: str, value: Any) -> None:
    section = nest.sections[SECTION_PATHS["arch"]]
    given = _given_by_run(section.origins.get(key, []), chosen=section.selected != FROM_HUGGING_FACE)
    if given is None:
        if key in section.origins or value is not None:
            nest.add(section.path, key, Node(value, found.shown), HOW)
        return
    positions_are_rotary = found.arch_values.get("position_embedding_type") != "learned_absolute"
    if key in TRAINING_KEYS or (key == "max_position_embeddings" and positions_are_rotary):
        return
    if not _equal(given.node.plain(), value):
        raise ConfigError(
            f"{given.node.where} {section.path}.{key}: {describe(given.node.plain())} contradicts {describe(value)} of "
            f"{found.shown}; delete the key (and any selection of {section.path}), or take another {HF_PATH}"
        )


def _given_by_run(origins: list[Origin], chosen: bool) -> Origin | None:
    """The last place where the run itself sets the value: a file that it selects, an override, the command line."""
    if not origins or origins[-1].node.value is None:
        return None
    by_run = chosen or origins[-1].how in ("override", "command line")
    return origins[-1] if by_run else None


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(_equal, ours, theirs))
    if isinstance(ours, bool) or isinstance(theirs, bool):
        return ours is theirs
    return bool(ours == theirs)
