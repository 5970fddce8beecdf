"""Decodes a flow's section of the YAML into the dataclass that the flow declares."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

from megatron_wrap.config.reading.yaml_nodes import describe
from megatron_wrap.config.schema.derived import trained_prediction_layers
from megatron_wrap.config.schema.familiar_names import unknown_key_hint
from megatron_wrap.config.schema.keys import Mismatch, check_value, key_ranges
from megatron_wrap.config.schema.run import SECTION_PATHS, RunConfig
from megatron_wrap.errors import ConfigError, FlowError
from megatron_wrap.flow.contract.base import FlowOptions, MegatronWrapFlowConfig, MegatronWrapTrainingFlowBase
from megatron_wrap.flow.contract.class_checks import check_multi_token_prediction, check_packing

_SECTION = SECTION_PATHS["flow"]
ENGINE_KEYS = {field.name for field in dataclasses.fields(MegatronWrapFlowConfig)}
"""Keys of every flow; the others are those of its `Config`."""


def decode_flow_config(
    flow_class: type[MegatronWrapTrainingFlowBase], config: RunConfig
) -> MegatronWrapFlowConfig | FlowOptions:
    """The value of `self.flow_config`: an instance of the flow's `Config`, or `FlowOptions` if it declares none.

    Raises:
        ConfigError: an unknown key, a wrong type, a value out of range, a missing key, values that `Config` rejects
            (ValueError in its `__post_init__`), or `packing` of a flow that does not support it; the message names
            file, line and dotted path.
        FlowError: `Config` is not a dataclass derived from `MegatronWrapFlowConfig`.
    """
    if config.flow.packing:
        check_packing(flow_class, _where(config, "packing"))
    if trained_prediction_layers(config.arch):
        check_multi_token_prediction(flow_class, config.located(f"{SECTION_PATHS['arch']}.mtp_num_layers"))
    options, declared = config.flow.options, flow_class.Config
    if declared is None:
        for key in options:
            if f"{_SECTION}.{key}" in config.undeclared:
                raise ConfigError(
                    f"{_where(config, key)}: unknown key; {flow_class.__name__} declares no keys: add a dataclass "
                    f"Config with the field {key} (docs/flow-contract.md), or add the key to a file of the tree"
                )
        return FlowOptions(config.flow.flow_key, options, config.flow.packing)
    hints = _hints(flow_class, declared)
    values: dict[str, Any] = {}
    for key, value in options.items():
        if key not in hints:
            hint = unknown_key_hint(f"{_SECTION}.{key}", hints) or _keys(flow_class.__name__, hints)
            raise ConfigError(f"{_where(config, key)}: unknown key{hint}")
        try:
            values[key] = check_value(value, hints[key])
        except Mismatch as mismatch:
            raise ConfigError(f"{_where(config, key)}: {mismatch}, not {describe(value)}") from None
    for field in dataclasses.fields(declared):
        allowed, value = key_ranges(declared).get(field.name), values.get(field.name)
        if allowed is not None and value is not None and not allowed.holds(value):
            raise ConfigError(f"{_where(config, field.name)}: must be {allowed}, not {value}")
        needs = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING and field.init
        if needs and field.name in hints and field.name not in values:
            raise ConfigError(
                f"{_where(config, 'flow_key')}: {_SECTION}.{field.name} is missing and {flow_class.__name__}.Config "
                f"has no default for it; write {field.name} under {_SECTION}.__override__"
            )
    try:
        return declared(flow_key=config.flow.flow_key, packing=config.flow.packing, **values)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{_where(config, 'flow_key')}: {flow_class.__name__}.Config refuses its values: {error}"
        ) from error


def _hints(flow_class: type[MegatronWrapTrainingFlowBase], declared: Any) -> dict[str, Any]:
    name = f"{flow_class.__name__}.Config"
    if not (isinstance(declared, type) and issubclass(declared, MegatronWrapFlowConfig)):
        raise FlowError(
            f"{name} is {declared!r}; write @dataclass(frozen=True, kw_only=True) above class "
            "Config(MegatronWrapFlowConfig), or inherit the Config of the base flow"
        )
    if not vars(declared).get("__dataclass_fields__"):
        raise FlowError(f"{name} is not a dataclass; write @dataclass(frozen=True, kw_only=True) above it")
    try:
        hints = get_type_hints(declared)
    except NameError as error:
        raise FlowError(
            f"{name}: the type of a field cannot be resolved ({error}); import it outside TYPE_CHECKING"
        ) from error
    return {field.name: hints[field.name] for field in dataclasses.fields(declared) if field.name not in ENGINE_KEYS}


def _where(config: RunConfig, key: str) -> str:
    return config.located(f"{_SECTION}.{key}")


def _keys(name: str, hints: dict[str, Any]) -> str:
    return f"; the fields of {name}.Config are {', '.join(hints) or 'none'}; declare it there"
