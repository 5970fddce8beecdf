"""The layers of DESIGN section 5, read from the imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megatron_wrap"

LAYERS = {
    "errors": 0,
    "registry": 0.5,  # raises errors
    "core.config": 1,
    "platform": 2,
    "parallel": 2,
    "ops": 3,
    "core.model": 3.5,  # a model is made of ops
    "bridge": 3.7,  # fills models
    "data": 3,
    "utils": 3,
    "metrics": 3,
    "core.flow": 4,
    "engine": 5,
    "checkpoint": 6,
    "core.hugging_face": 6.5,  # parts of the facade
    "core.layout_view": 6.5,
    "core.wrap": 7,
    "cli": 8,
    "testing": 7.5,  # check-parity of the command line calls it
}
MEGATRON = ("platform", "parallel", "ops", "core.model", "bridge", "data", "engine", "checkpoint")
DISTRIBUTED = ("parallel", "metrics", "checkpoint", "engine", "platform", "testing", "cli")
"""testing starts ranks of its own and cli starts torchrun's agent, so both stand here beside DESIGN's five."""


def unit_of(module: str) -> str:
    """The layered unit that a dotted module below megatron_wrap belongs to."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "core" else parts[0]


def files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(imported dotted name, line, whether only for type checking) of every import statement of a file."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) in typing_only
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno, id(node) in typing_only


@pytest.mark.parametrize("path", files(), ids=module_of)
def test_a_file_imports_lower_layers_and_its_own_folder_only(path: Path):
    module = module_of(path)
    unit = unit_of(module)
    if unit not in LAYERS:
        assert module in ("__init__", "core"), f"{module} has no place in DESIGN's layers"
        return
    for name, line, typing_only in imports(path):
        if typing_only or not name.startswith("megatron_wrap."):
            continue
        imported = unit_of(name.removeprefix("megatron_wrap."))
        if imported not in LAYERS:  # megatron_wrap.core itself, which resolves MegatronWrap
            imported = "core.wrap"
        lower = LAYERS[imported] < LAYERS[unit]
        assert lower or imported == unit, f"{path.name}:{line} {unit} imports {imported}"


@pytest.mark.parametrize("path", files(), ids=module_of)
def test_megatron_and_distributed_are_imported_where_they_belong(path: Path):
    unit = unit_of(module_of(path))
    for name, line, typing_only in imports(path):
        if typing_only:
            continue
        if name == "megatron" or name.startswith("megatron."):
            assert unit in MEGATRON, f"{path.name}:{line} {unit} imports {name}"
        if name.startswith("torch.distributed"):
            assert unit in DISTRIBUTED, f"{path.name}:{line} {unit} imports {name}"
        if unit == "core.flow":
            assert not name.startswith(("megatron.", "torch.distributed"))


def test_foreign_objects_are_changed_in_the_platform_layer_only():
    """`setattr` on what is not ours stands in platform/, where it can be undone."""
    for path in files():
        if unit_of(module_of(path)) == "platform":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "setattr", f"{path}:{node.lineno}"
