"""Paths that documentation taught before still work, each with one warning that names the new path."""

import sys
from importlib import import_module

import pytest


def test_a_former_module_warns_once():
    sys.modules.pop("megatron_wrap.bridge.family", None)
    with pytest.warns(DeprecationWarning, match=r"megatron_wrap\.bridge\.mapping\.family") as warned:
        former = import_module("megatron_wrap.bridge.family")
    assert len(warned) == 1
    assert former.Family is import_module("megatron_wrap.bridge.mapping.family").Family


def test_the_functions_of_mapping_are_those_of_tensors():
    from megatron_wrap.bridge import mapping
    from megatron_wrap.bridge.mapping import tensors

    with pytest.warns(DeprecationWarning, match=r"mapping\.tensors\.column") as warned:
        assert mapping.column is tensors.column
    assert len(warned) == 1
    with pytest.raises(AttributeError):
        _ = mapping.no_such_name
