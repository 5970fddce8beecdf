"""`megatron-wrap schema [CONFIG]`: print the JSON schema of the configuration."""

import argparse
import json
from pathlib import Path

from megatron_wrap.config.decode import read_view
from megatron_wrap.config.json_schema import (
    FLOW,
    FlowKeys,
    installed_upstream_keys,
    json_schema,
    keys_schema,
)
from megatron_wrap.config.reading.tree import open_tree, shipped_flow_keys, shipped_schema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="YAML of a run, whose flow and nest/ folder the schema includes (default: the shipped ones alone)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the schema for the installed Megatron-Core. Imports torch only for a flow that is not shipped."""
    flows = shipped_flow_keys()
    if args.config is not None:
        flows = {**flows, **_flow_of(args.config, flows)}
    root = open_tree(shipped_schema() if args.config is None else Path(args.config))
    print(json.dumps(json_schema(root, flows, installed_upstream_keys()), indent=1, ensure_ascii=False))
    return 0


def _flow_of(config: str, shipped: FlowKeys) -> FlowKeys:
    """The keys of the flow that the run names; empty for a shipped flow."""
    nest = read_view(config)
    flow_key = nest.origins(f"{FLOW}.flow_key")[-1].node.value
    if flow_key in shipped or not isinstance(flow_key, str):
        return {}
    from megatron_wrap.flow import MegatronWrapFlowEntry

    declared = MegatronWrapFlowEntry.get_flow_class(flow_key).Config
    if declared is None:  # options are the keys of the file of the tree, of any type
        return {flow_key: {name: {} for name in nest.sections[FLOW].origins}}
    return {flow_key: keys_schema(declared)}
