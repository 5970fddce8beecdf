"""Write configs/schema.json, the JSON schema of the configuration over all supported versions of Megatron-Core.

python scripts/config_schema.py                     what our dataclasses and the tree define; Megatron-Core's keys stay
python scripts/config_schema.py --check             writes nothing; exits 1 where the file differs
python scripts/config_schema.py --megatron-core 0.16=FOLDER 0.19=FOLDER
                                                    Megatron-Core's keys too, read from folders that contain `megatron`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from _generated import write_or_check

from megatron_wrap.config.decode import section_hints
from megatron_wrap.config.json_schema import (
    SECTION_PATHS,
    FlowKeys,
    Schema,
    UpstreamKeys,
    installed_upstream_keys,
    json_schema,
    keys_name,
    keys_schema,
)
from megatron_wrap.config.reading.tree import INHERIT, open_tree
from megatron_wrap.config.schema.run import UPSTREAM
from megatron_wrap.config.schema.upstream import upstream_enums, upstream_fields
from megatron_wrap.flow import MegatronWrapFlowEntry
from megatron_wrap.flow.entry import SHIPPED

ROOT = Path(__file__).parents[1]
FILE = "configs/schema.json"
COMMAND = "make config-docs"
CORES = "--megatron-core"
ONLY = "Only in Megatron-Core "


def schema_text(upstream: UpstreamKeys) -> str:
    """The text of the shipped schema, with the given keys of Megatron-Core."""
    schema = json_schema(open_tree(ROOT / FILE), flow_keys(), upstream)
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def flow_keys() -> FlowKeys:
    """The keys of the shipped flows."""
    keys = {}
    for flow_key in SHIPPED:
        declared = MegatronWrapFlowEntry.get_flow_class(flow_key).Config
        if declared is None:
            raise ValueError(f"{flow_key} has no Config; declare its options there")
        keys[flow_key] = keys_schema(declared)
    return keys


def shipped_upstream_keys(root: Path) -> UpstreamKeys:
    """Megatron-Core's keys in the shipped schema."""
    shipped = json.loads((root / FILE).read_text(encoding="utf-8"))["$defs"]
    upstream = {}
    for section in UPSTREAM:
        properties = shipped[keys_name(SECTION_PATHS[section])]["properties"]
        declared = {INHERIT, *section_hints(section)}
        upstream[section] = {name: key for name, key in properties.items() if name not in declared}
    return upstream


def keys_of_all(cores: Mapping[str, Path]) -> UpstreamKeys:
    """The union of the keys of several versions; `cores` is version -> folder that contains the package `megatron`."""
    versions = {version: _keys_in(folder) for version, folder in cores.items()}
    union: dict[str, dict[str, Schema]] = {}
    for section in UPSTREAM:
        names = dict.fromkeys(name for keys in versions.values() for name in keys[section])
        union[section] = {
            name: joined({version: keys[section][name] for version, keys in versions.items() if name in keys[section]})
            if all(name in keys[section] for keys in versions.values())
            else marked(*next((v, keys[section][name]) for v, keys in versions.items() if name in keys[section]))
            for name in names
        }
    return union


def joined(keys: Mapping[str, Schema]) -> Schema:
    """One schema of the same key in several versions, the newest last, whose description it has."""
    *_, newest = keys.values()
    forms = {json.dumps(without_text(key)): without_text(key) for key in keys.values()}
    if len(forms) == 1:
        return newest
    return {"anyOf": list(forms.values()), "description": newest["description"]}


def marked(version: str, key: Schema) -> Schema:
    """The schema of a key that only one version has."""
    return {**key, "description": f"{key['description']} {ONLY}{version}."}


def without_text(key: Schema) -> Schema:
    """The schema without its description."""
    return {name: value for name, value in key.items() if name != "description"}


def _keys_in(folder: Path) -> UpstreamKeys:
    sys.path.insert(0, str(folder))
    upstream_fields.cache_clear()
    upstream_enums.cache_clear()
    try:
        return installed_upstream_keys()
    finally:
        sys.path.remove(str(folder))
        upstream_fields.cache_clear()
        upstream_enums.cache_clear()


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Write or check the file below `root`; returns the exit status."""
    options = list(sys.argv[1:] if arguments is None else arguments)
    if options[:1] == [CORES]:
        cores = {version: Path(folder) for version, _, folder in (text.partition("=") for text in options[1:])}
        upstream, options = keys_of_all(cores), []
    else:
        upstream = shipped_upstream_keys(root)
    message = f"{{}} differs from the dataclasses; run {COMMAND}"
    return write_or_check({FILE: schema_text(upstream)}, root, __doc__ or "", message, options)


if __name__ == "__main__":
    sys.exit(main())
