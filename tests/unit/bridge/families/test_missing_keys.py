"""A key that config.json omits has the default of transformers' configuration class, or is refused by its name.

Each key of each family's config.json is removed in turn, those of the rotary parameters in both forms. The reference is
what transformers' class makes of the rest. Kimi K2 has no class there: its reference is `DeepseekV3Config`, that of
its exports, whose defaults are those of the configuration_deepseek.py published with DeepSeek V3. Moonlight's type is
deepseek_v3.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatron_wrap.bridge.export.export_format import obstacle
from megatron_wrap.config.config_json import check_types
from megatron_wrap.config.hugging_face import FAMILIES
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.errors import MegatronWrapError

sys.path.insert(0, str(Path(__file__).parents[3] / "distributed"))
import _bridge_runs as runs

pytestmark = pytest.mark.transformers

Values = dict[str, Any]
KINDS = ("full_attention", "sliding_attention")
ROTARY = ("rope", "partial_rotary_factor", "rotary_dim", "original_max_position_embeddings")
"""Beginnings of the keys that both forms have, or of which one form consists."""


def complete_config(name: str) -> tuple[Any, Values]:
    """transformers' class of a case, and its whole config.json."""
    import transformers

    class_name, settings = runs.FAMILIES[name]
    config_class = getattr(transformers, class_name).config_class
    config = config_class(**({} if class_name == "GPT2LMHeadModel" else runs.SIZES) | settings)
    return config_class, written(config)


def written(config: Any) -> Values:
    return json.loads(config.to_json_string(use_diff=False))


def in_earlier_form(values: Values) -> Values:
    """With `rope_theta` and `rope_scaling` instead of `rope_parameters`."""
    values = copy.deepcopy(values)
    rope = values.pop("rope_parameters")
    if set(KINDS) <= set(rope):
        if "gemma3" in values["model_type"]:
            values["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    outside = ("rope_theta", "partial_rotary_factor")
    values |= {key: rope.pop(key) for key in outside if key in rope}
    return {**values, "rope_scaling": None if rope["rope_type"] == "default" else rope}


def key_paths(values: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (*prefix, key)
        if isinstance(value, dict) and (key.startswith("rope") or key in KINDS):
            yield from key_paths(value, (*prefix, key))


def without(values: Values, path: tuple[str, ...]) -> Values:
    values = inner = copy.deepcopy(values)
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return values


def decoded(family: Any, values: Values) -> Values | str:
    """The architecture, or why it is refused."""
    try:
        check_types(values)
        return family.arch_values(values)
    except MegatronWrapError as error:
        return str(error)


def differences(ours: Values, theirs: Values | str) -> Any:
    """Key -> both values, or why the reference is refused."""
    if isinstance(theirs, str):
        return theirs
    keys = ours.keys() | theirs.keys()
    return {key: (ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)}


def rotary(config: Any) -> list[Any]:
    """transformers' frequencies and attention factors, of short and of long sequences, of each kind of layer."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    results: list[Any] = []
    kinds: tuple[str | None, ...] = KINDS if KINDS[0] in config.rope_parameters else (None,)
    for kind in kinds:
        rope = config.rope_parameters if kind is None else config.rope_parameters[kind]
        if rope["rope_type"] == "default":
            results.append((rope["rope_theta"], rope.get("partial_rotary_factor", 1.0)))
            continue
        for length in (1, config.max_position_embeddings):
            frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=length, layer_type=kind)
            results.append((frequencies.tolist(), factor))
    return results


def same_rotary(family: Any, reference: Any, arch_values: Values) -> bool:
    """Whether transformers' frequencies are those of the architecture's config.json; True if the family cannot express
    the architecture (`obstacle`)."""
    fields = {field.name for field in dataclasses.fields(ArchConfig)}
    upstream = {key: value for key, value in arch_values.items() if key not in fields}
    arch = ArchConfig(**{key: arch_values[key] for key in fields & arch_values.keys()}, upstream=upstream)
    if obstacle(family, arch) is not None:
        return True
    return rotary(reference) == rotary(type(reference)(**family.config_values(arch)))


def read_by_transformers(config_class: Any, values: Values) -> Any:
    """transformers' configuration; None if its class refuses the values."""
    from huggingface_hub.errors import StrictDataclassError

    with suppress(StrictDataclassError):
        return config_class(**copy.deepcopy(values))
    return None


@pytest.mark.parametrize("name", runs.FAMILIES)
def test_a_missing_key_has_the_default_of_transformers_or_is_refused(name: str) -> None:
    config_class, values = complete_config(name)
    family = FAMILIES.resolve(runs.OTHER_TYPES.get(name, config_class.model_type))
    cases = [(values, path) for path in key_paths(values)]
    if "rope_parameters" in values:
        earlier = in_earlier_form(values)
        cases += [(earlier, path) for path in key_paths(earlier) if path[0].startswith(ROTARY)]
    wrong: dict[str, Any] = {}
    num_compared = 0
    for complete, path in cases:
        key, reduced = ".".join(path), without(complete, path)
        ours = decoded(family, reduced)
        if isinstance(ours, str):
            if path[-1] not in ours:
                wrong[key] = ours
        elif (reference := read_by_transformers(config_class, reduced)) is not None:
            num_compared += 1
            theirs = decoded(family, written(reference))
            if ours != theirs:
                wrong[key] = differences(ours, theirs)
            elif key.startswith("rope") and not same_rotary(family, reference, ours):
                wrong[key] = "other frequencies"
    assert not wrong
    assert num_compared > len(cases) / 2
