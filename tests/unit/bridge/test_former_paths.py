"""Paths that documentation taught before still work, each with one warning that names the new path."""

import sys
from importlib import import_module

import pytest


@pytest.mark.parametrize(
    ("path", "name", "new_path"),
    [
        ("family", "Family", "mapping.family"),
        ("vllm_transfer", "VllmTransfer", "engines.vllm"),
        ("sglang_transfer", "SglangServer", "engines.sglang"),
    ],
)
def test_a_former_module_warns_once(path, name, new_path):
    sys.modules.pop(f"megatron_wrap.bridge.{path}", None)
    with pytest.warns(DeprecationWarning, match=f"megatron_wrap.bridge.{new_path}") as warned:
        former = import_module(f"megatron_wrap.bridge.{path}")
    assert len(warned) == 1
    assert getattr(former, name) is getattr(import_module(f"megatron_wrap.bridge.{new_path}"), name)


def test_the_functions_of_mapping_are_those_of_tensors():
    from megatron_wrap.bridge import mapping
    from megatron_wrap.bridge.mapping import tensors

    with pytest.warns(DeprecationWarning, match=r"mapping\.tensors\.column") as warned:
        assert mapping.column is tensors.column
    assert len(warned) == 1
    with pytest.raises(AttributeError):
        _ = mapping.no_such_name
