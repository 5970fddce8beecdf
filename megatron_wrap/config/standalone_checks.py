"""All checks that the configuration alone decides: no files, no torch, any number of processes.

Types and ranges of a shipped flow's keys are those of the shipped JSON schema, because the flow's code imports torch.
"""

from collections.abc import Mapping
from typing import Any, Literal, Union

from megatron_wrap.config.checks.located_errors import check_each, refuse
from megatron_wrap.config.checks.process_count import check_layout
from megatron_wrap.config.checks.run import check_values
from megatron_wrap.config.json_schema import shipped_flow_keys
from megatron_wrap.config.reading.yaml_nodes import describe
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.familiar_names import unknown_key_hint
from megatron_wrap.config.schema.keys import Range
from megatron_wrap.config.schema.run import SECTION_PATHS, RunConfig
from megatron_wrap.config.schema.types import Mismatch, check_value

_TYPES: Mapping[str, Any] = {"integer": int, "number": float, "boolean": bool, "string": str, "null": type(None)}


def check_configuration(config: RunConfig) -> None:
    """Check a decoded configuration.

    Raises:
        ConfigError, LayoutError: values that contradict each other, or that no number of processes can run.
    """
    check_values(config)
    check_each(
        config,
        # necessary for every larger number of processes too, which is a multiple of this one
        (check_flow_options, lambda config: check_layout(config, derived.processes_needed(config))),
    )


def check_flow_options(config: RunConfig) -> None:
    """Check the keys of a shipped flow; those of another flow, and contradictions between keys, need its code.

    Raises:
        ConfigError: an unknown key, a wrong type, or a value out of range.
    """
    known = shipped_flow_keys().get(config.flow.flow_key)
    if known is None:
        return
    for name, value in config.flow.options.items():
        key = [f"flow.{name}"]
        if name not in known:
            hint = unknown_key_hint(f"{SECTION_PATHS['flow']}.{name}", known) or f"; the keys are {', '.join(known)}"
            refuse(config, key, f"unknown key{hint}")
        try:
            check_value(value, _type(known[name]))
        except Mismatch as mismatch:
            refuse(config, key, f"{mismatch}, not {describe(value)}")
        bound = known[name].get
        allowed = Range(bound("minimum"), bound("exclusiveMinimum"), bound("maximum"), bound("exclusiveMaximum"))
        if value is not None and not allowed.holds(value):
            refuse(config, key, f"must be {allowed}, not {value}")


def _type(schema: Mapping[str, Any]) -> Any:
    """The type whose values the schema (of `type_schema`) describes."""
    if "enum" in schema:
        return Literal[tuple(schema["enum"])]
    if "anyOf" in schema:
        members = sorted(schema["anyOf"], key=lambda member: member.get("type") == "array")  # shown last
        return Union[tuple(map(_type, members))]  # noqa: UP007 - the members are only known now
    kinds = schema["type"]
    if isinstance(kinds, list):
        return Union[tuple(_type({**schema, "type": kind}) for kind in kinds)]  # noqa: UP007
    return tuple[_type(schema["items"]), ...] if kinds == "array" else _TYPES[kinds]  # type: ignore[misc]
