"""Kinds of kernels and operations by the names that libraries give them."""

import re
from pathlib import Path

import pytest
import yaml

from megatron_wrap.profiling import kernel_kinds as kinds

NAMES = yaml.safe_load(Path(__file__).with_name("kernel_names.yml").read_text())


def of_kinds(section: str) -> list[tuple[str, str]]:
    """(name, kind) of each name of a section."""
    return [(name, kind) for kind, names in NAMES[section].items() for name in names]


@pytest.mark.parametrize(("name", "kind"), of_kinds("kernels"))
def test_kernels(name: str, kind: str) -> None:
    assert kinds.kernel_kind(name) == kind


@pytest.mark.parametrize(("name", "collective"), NAMES["communication"].items())
def test_communication(name: str, collective: str) -> None:
    kind = kinds.kernel_kind(name) if name.startswith("nccl") else kinds.operation_kind(name)
    assert (kind, kinds.collective(name)) == (kinds.COMMUNICATION, collective)


def test_the_kernels_of_this_package_are_known() -> None:
    folder = Path(kinds.__file__).parents[1]
    names = [
        name
        for path in folder.rglob("*.py")
        for name in re.findall(r"@triton\.jit\ndef (\w+_kernel)\(", path.read_text())
    ]
    assert len(names) > 20
    assert len(set(names)) == len(names)  # a profile names a kernel, not its file
    assert not [name for name in names if kinds.kernel_kind(name) is None]


def test_an_unknown_kernel_has_no_kind() -> None:
    assert kinds.kernel_kind("my_kernel") is None


@pytest.mark.parametrize(("name", "kind"), of_kinds("operations"))
def test_operations_of_a_cpu(name: str, kind: str) -> None:
    assert kinds.operation_kind(name) == kind


@pytest.mark.parametrize(("name", "short"), NAMES["short names"].items())
def test_short_names(name: str, short: str) -> None:
    assert kinds.short_name(name) == short
