"""The rules of docs/architecture.md, checked on source texts with `ast`; nothing is imported or run.

`scripts/architecture.py` prints the same findings as a table.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from _ours import Ours, nodes_of, parsed

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "megatron_wrap"
LOADERS = ("import_module", "__import__", "resolve_name", "run_module")
"""Functions that load a module by a string."""

FAMILIES = ("config/hugging_face.py", "megatron_wrap.bridge.families")
UPWARD_BY_NAME = {FAMILIES: "the family of a Hugging Face folder translates its config.json; that needs no torch"}
"""(file, module) of strings by which a lower layer names a higher one -> why."""


@dataclass(frozen=True)
class Reference:
    """A reference to a module: an import statement, or a string that a module is loaded by."""

    file: str
    line: int
    name: str
    """Dotted, of a name from a module `module.name`; of a string with computed parts, what precedes them; empty where
    all of it is computed."""
    typing_only: bool = False
    by_string: bool = False

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.name}"


@dataclass(frozen=True)
class Findings:
    """References that break a rule of the layers."""

    upward: list[str]
    sideways: list[str]
    without_layer: list[str]

    @property
    def all(self) -> list[str]:
        """All of them."""
        return self.upward + self.sideways + self.without_layer


class Code:
    """The parsed files of a package.

    Args:
        sources: path below the package, such as "engine/step.py", to the file's text.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.trees = {file: parsed(text) for file, text in sources.items()}
        self.lines = {file: len(text.splitlines()) for file, text in sources.items()}
        self.modules = {module_of(file): file for file in sources}
        self.references = {file: list(_references(file, tree)) for file, tree in self.trees.items()}
        for file, references in self.references.items():
            if any(not reference.name for reference in references):
                references.extend(self._named_modules(file))

    def file_of(self, name: str) -> str | None:
        """The file of a dotted name: of the module, or of the module that the name is in; None for other packages."""
        parts = name.split(".")
        candidates = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((self.modules[module] for module in candidates if module in self.modules), None)

    def _named_modules(self, file: str) -> Iterator[Reference]:
        """Every string of a file that is a module's name: of a file that loads one of them by a variable."""
        for node in nodes_of(self.trees[file]):
            if isinstance(node, ast.Constant) and node.value in self.modules:
                yield Reference(file, node.lineno, str(node.value), by_string=True)


def read_package(folder: Path = ROOT / PACKAGE) -> Code:
    """The code of a package's folder."""
    return Code({path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in sorted(folder.rglob("*.py"))})


def read_layers(page: Path = ROOT / "docs" / "architecture.md") -> dict[str, int]:
    """Folder ("engine/") or file of the package ("errors.py") -> its layer, from the page's table."""
    rows = re.findall(r"^\| (\d+) \| `([\w./]+)` \|", page.read_text("utf-8"), re.M)
    layers = {unit: int(number) for number, unit in rows}
    assert len(layers) == len(rows), f"{page}: a folder has two rows"
    return layers


def read_subpackages(page: Path = ROOT / "docs" / "architecture.md") -> dict[str, list[str]]:
    """Folder ("engine/") -> its sub-packages ("batches/"), in the order of the page's table; [] if it has none."""
    rows = re.findall(r"^\| \d+ \| `(\w+/)` \|[^|]*\|([^|]*)\|", page.read_text("utf-8"), re.M)
    return {folder: re.findall(r"`(\w+/)`", listed) for folder, listed in rows}


def module_of(file: str) -> str:
    """The dotted name of a file of the package."""
    return f"{PACKAGE}.{file.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")


def unit_of(file: str) -> str:
    """What has a layer: the folder of a file, or the file itself where it is in no folder."""
    folder, slash, _ = file.partition("/")
    return folder + slash


def subpackage_of(file: str) -> str:
    """The sub-package of a file ("batches/"), or "" for a file at the top of its folder."""
    _, _, rest = file.partition("/")
    name, slash, _ = rest.partition("/")
    return name + slash if slash else ""


# ---- references


def _references(file: str, tree: ast.Module) -> Iterator[Reference]:
    typing_only = {
        id(inner)
        for node in nodes_of(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in nodes_of(tree):
        line = getattr(node, "lineno", 0)
        for name in _imported(file, node):
            yield Reference(file, line, name, id(node) in typing_only)
        for name in _loaded(file, node):
            yield Reference(file, line, name, by_string=True)


def _imported(file: str, node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute(file, node.level, node.module or "")
        yield from (f"{base}.{alias.name}".removesuffix(".*") for alias in node.names)


def _absolute(file: str, level: int, name: str) -> str:
    """The absolute form of a name with `level` leading dots."""
    if level == 0:
        return name
    package = module_of(file).split(".")[: None if file.endswith("__init__.py") else -1]
    return ".".join([*package[: len(package) - (level - 1)], *([name] if name else [])])


def _loaded(file: str, node: ast.AST) -> Iterator[str]:
    """Modules that a string names: an argument of a loader, `module:Attribute`, and what follows "-m"."""
    if isinstance(node, ast.Call) and _last_name(node.func) in LOADERS:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        text = _text(file, arguments[0]) if arguments else None
        level = len(text or "") - len((text or "").lstrip("."))
        yield _absolute(file, level, (text or "").lstrip(".")).partition(":")[0].rstrip(".")
    elif isinstance(node, ast.Constant | ast.JoinedStr):
        text = _text(file, node) or ""
        if re.match(rf"{PACKAGE}\.[\w.]*(:\w*)?$", text) and ":" in ast.unparse(node):
            yield text.partition(":")[0].rstrip(".")
    elif isinstance(node, ast.List | ast.Tuple):
        for flag, module in zip(node.elts, node.elts[1:], strict=False):
            if _text(file, flag) == "-m" and (_text(file, module) or "").startswith(PACKAGE):
                yield str(_text(file, module))


def _last_name(node: ast.expr) -> str:
    """The name of a function or an attribute without what is before its dot; "" of other expressions."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _text(file: str, node: ast.expr) -> str | None:
    """The text of a string up to its first computed part (`__name__` is known); None where nothing of it is known."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        package = file.endswith("__init__.py")
        known = {"__name__": module_of(file), "__package__": _absolute(file, 1, "") if not package else module_of(file)}
        return known.get(node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(file, node.left)
    if not isinstance(node, ast.JoinedStr):
        return None
    text = ""
    for part in node.values:
        known = _text(file, part.value if isinstance(part, ast.FormattedValue) else part)
        if known is None:
            break
        text += known
    return text or None


# ---- layers and cycles


def layer_findings(code: Code, layers: Mapping[str, int], excepted: Mapping[tuple[str, str], str]) -> Findings:
    """References to a higher layer, to another folder of the same layer, and of or to what has no layer.

    Args:
        excepted: (file, module) of strings that are allowed nevertheless -> the reason.
    """
    findings = Findings([], [], [])
    for reference in (each for of_file in code.references.values() for each in of_file):
        target = code.file_of(reference.name)
        if target is None or target == "__init__.py":
            continue
        if reference.by_string and (reference.file, reference.name) in excepted:
            continue
        source, other = unit_of(reference.file), unit_of(target)
        if source not in layers or other not in layers:
            findings.without_layer.append(str(reference))
        elif layers[other] > layers[source]:
            findings.upward.append(f"{reference} (layer {layers[source]} to {layers[other]})")
        elif layers[other] == layers[source] and other != source:
            findings.sideways.append(f"{reference} (layer {layers[source]})")
    return findings


def order_findings(code: Code, subpackages: Mapping[str, list[str]]) -> list[str]:
    """References from a sub-package to a later one of its folder, or to a file at the top of the folder, which comes
    last; and files in a sub-package that the page does not list."""
    findings = []
    for file, references in code.references.items():
        unit, listed = unit_of(file), subpackages.get(unit_of(file), [])
        source = subpackage_of(file)
        if source and source not in listed:
            findings.append(f"{file}: {unit}{source} is not listed")
            continue
        for reference in references:
            target = code.file_of(reference.name)
            if target is None or unit_of(target) != unit or not source or subpackage_of(target) == source:
                continue
            other = subpackage_of(target)
            if not other or other not in listed or listed.index(other) > listed.index(source):
                findings.append(f"{reference} ({unit}{source} to {unit}{other or target.rpartition('/')[2]})")
    return findings


def crowded_folders(code: Code, limit: int, catalogues: Iterable[str]) -> list[str]:
    """Folders with more than `limit` files, but for `catalogues`, which have one file for each entry."""
    counts = Counter(file.rpartition("/")[0] + "/" for file in code.trees)
    return [f"{folder}: {n} files" for folder, n in sorted(counts.items()) if n > limit and folder not in catalogues]


def cycles(code: Code) -> list[list[str]]:
    """Groups of files that import each other, by whatever kind of import."""
    edges = {
        file: {code.file_of(reference.name) for reference in references} - {None, file}
        for file, references in code.references.items()
    }

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for target in edges[waiting.pop()] - seen:
                seen.add(target)  # type: ignore[arg-type]
                waiting.append(target)  # type: ignore[arg-type]
        return seen

    reached = {file: reachable(file) for file in edges}
    groups = {frozenset(other for other in reached[file] if file in reached[other]) for file in edges}
    return sorted(sorted(group) for group in groups if group)


# ---- changes of foreign objects


@dataclass(frozen=True)
class Change:
    """One assignment to an attribute of an object that is not known to be of a class of the package."""

    file: str
    line: int
    target: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.target}"


def foreign_changes(code: Code) -> list[Change]:
    """Assignments to attributes of objects outside `platform/` that are not shown to be ours.

    Ours is `self`, `cls` and the `ctx` of an autograd function, and what annotations and constructor calls show to be
    of a class of the package: the type of a parameter, of a local variable, of an attribute, of an element.
    """
    ours = Ours(code.trees)
    changes = []
    for file, tree in code.trees.items():
        if unit_of(file) == "platform/":
            continue
        for owner, attribute, node in _attribute_changes(tree):
            if not ours.owns(file, owner):
                changes.append(Change(file, node.lineno, f"{ast.unparse(owner)}.{attribute}", attribute))
    return changes


def _attribute_changes(tree: ast.Module) -> Iterator[tuple[ast.expr, str, ast.expr]]:
    """(object, name of the attribute, the location) of every change of an attribute in a file."""
    called = {id(node.func) for node in nodes_of(tree) if isinstance(node, ast.Call)}
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.value, node.attr, node
        elif isinstance(node, ast.Name) and node.id in ("setattr", "delattr") and id(node) not in called:
            yield node, "*", node  # handed on, to be called on whatever
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            owner = _of_dictionary(node.value)
            if owner is not None:
                yield owner, ast.unparse(node.slice), node
        elif isinstance(node, ast.Call):
            name = _last_name(node.func)
            if name in ("setattr", "delattr") and len(node.args) > 1:
                yield node.args[0], ast.unparse(node.args[1]).strip("'\""), node
            elif name in ("__setattr__", "__delattr__") and isinstance(node.func, ast.Attribute):
                of_class = ast.unparse(node.func.value) in ("object", "type")
                yield (node.args[0] if of_class else node.func.value), "*", node
            elif name in ("update", "setdefault", "pop", "clear") and isinstance(node.func, ast.Attribute):
                owner = _of_dictionary(node.func.value)
                if owner is not None:
                    yield owner, "*", node


def _of_dictionary(node: ast.expr) -> ast.expr | None:
    """The object whose attributes a dictionary is: `vars(x)`, `x.__dict__`; of sys.modules, itself."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "vars" and node.args:
        return node.args[0]
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return node.value
    return node if ast.unparse(node) == "sys.modules" else None


# ---- functions


def names_with_defaults(code: Code) -> dict[str, set[str]]:
    """Each name that `getattr` with a default or `hasattr` reads outside of `platform/` -> the files; "" for names that
    are no literals. Names of Python's data model, such as `__name__`, are left out."""
    names: dict[str, set[str]] = {}
    for file, tree in code.trees.items():
        for node in nodes_of(tree) if unit_of(file) != "platform/" else ():
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            if (node.func.id, len(node.args)) in (("getattr", 3), ("hasattr", 2)):
                name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
                if not str(name).startswith("__"):
                    names.setdefault(str(name), set()).add(file)
    return names


def long_functions(folders: list[Path], limit: int) -> list[str]:
    """Functions of more than `limit` lines, docstring included."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        for node in nodes_of(parsed(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > limit
    ]


FRAGMENT = re.compile(
    r"(That|Those|Whose|Which|In which|In that|By (how|which|that)|With (which|that)|From (which|that)"
    r"|Of (which|that|the)|To (which|that)|For which|At which|Where|When|How)\b"
)
"""Begins a relative clause: a docstring that only the code beside it explains."""


def fragments(folder: Path) -> list[str]:
    """Docstrings of modules, classes, functions and attributes that do not stand by themselves."""
    return [
        f"{path.relative_to(folder)}:{node.lineno} {node.value.value.partition(chr(10))[0]}"
        for path in sorted(folder.rglob("*.py"))
        for node in nodes_of(parsed(path.read_text("utf-8")))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and FRAGMENT.match(node.value.value)
    ]
