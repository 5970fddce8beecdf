"""Which objects are of classes of the package, as far as annotations and constructor calls show it."""

import ast
import functools
from collections.abc import Iterator, Mapping

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scopes = tuple[ast.ClassDef | Function, ...]
KEEP_TYPE = ("replace", "copy", "deepcopy", "list", "sorted", "reversed", "iter", "next", "enumerate", "zip")
"""Functions whose result is of the classes of their arguments, or contains such objects."""


@functools.cache
def parsed(text: str) -> ast.Module:
    """The tree of a file's text."""
    return ast.parse(text)


@functools.cache
def nodes_of(tree: ast.Module) -> list[ast.AST]:
    """The nodes of a file, for several readers."""
    return list(ast.walk(tree))


class Ours:
    """Classes of the package, and what of them is in a variable.

    A container counts as its elements: of `rows: list[Row]`, both `rows[0]` and a loop's `row` are of Row.

    Args:
        trees: path below the package to the file's parsed text.
    """

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        self._known: dict[str, set[str]] = {}
        """File -> names of classes and functions of the package that it defines or imports."""
        self._scopes: dict[int, Scopes] = {}
        self._attributes: dict[tuple[str, str], set[str]] = {}
        """(class, attribute or method) -> classes of its value."""
        self._returns: dict[str, set[str]] = {}
        self._bases: dict[str, list[str]] = {}
        for file, tree in trees.items():
            self._known[file] = {
                name
                for node in nodes_of(tree)
                for name in _names(node)
                if not isinstance(node, ast.ImportFrom) or node.level or (node.module or "").startswith("megatron_wrap")
            }
            self._enclose(tree, ())
        classes = [(f, n) for f, tree in trees.items() for n in nodes_of(tree) if isinstance(n, ast.ClassDef)]
        self._classes = {node.name for _, node in classes}
        for _, node in classes:
            self._bases[node.name] = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
        for file, tree in trees.items():
            for node in nodes_of(tree):
                if isinstance(node, Function) and node.returns is not None:
                    self._returns.setdefault(node.name, set()).update(self._annotated(file, node.returns))
        for _ in range(2):  # what an attribute is may follow from another attribute
            for file, node in classes:
                self._read_class(file, node)

    def owns(self, file: str, owner: ast.expr) -> bool:
        """Whether an expression is `self`, `cls`, an autograd function's `ctx`, or an object of our classes."""
        if isinstance(owner, ast.Call) and ast.unparse(owner) == "super()":
            return True
        scopes = self._scopes.get(id(owner), ())
        first = [scope.args.args[0].arg for scope in scopes if isinstance(scope, Function) and scope.args.args]
        if isinstance(owner, ast.Name) and owner.id in ("self", "cls", "ctx") and owner.id in first:
            return True
        return bool(self.classes_of(file, owner))

    def classes_of(self, file: str, node: ast.expr) -> set[str]:
        """Names of the package's classes that the value of an expression may be of; empty: unknown or foreign."""
        if isinstance(node, ast.Name):
            return self._of_name(file, node)
        if isinstance(node, ast.Attribute):
            return {c for owner in self.classes_of(file, node.value) for c in self._attribute(owner, node.attr)}
        if isinstance(node, ast.Subscript | ast.Starred):
            return self.classes_of(file, node.value)
        if isinstance(node, ast.IfExp):
            return self.classes_of(file, node.body) | self.classes_of(file, node.orelse)
        if isinstance(node, ast.List | ast.Tuple):
            return {c for element in node.elts for c in self.classes_of(file, element)}
        return self._of_call(file, node) if isinstance(node, ast.Call) else set()

    def _of_call(self, file: str, node: ast.Call) -> set[str]:
        function = node.func
        if ast.unparse(function).rpartition(".")[2] in KEEP_TYPE:
            return {c for argument in node.args for c in self.classes_of(file, argument)}
        if isinstance(function, ast.Attribute):
            return self.classes_of(file, function) or ({function.attr} & self._classes & self._known[file])
        if not isinstance(function, ast.Name):
            return set()
        if function.id == "cls":
            return self._of_name(file, function)
        if function.id not in self._known[file]:
            return set()
        return {function.id} if function.id in self._classes else self._returns.get(function.id, set())

    def _of_name(self, file: str, node: ast.Name) -> set[str]:
        for scope in reversed(self._scopes.get(id(node), ())):
            if isinstance(scope, ast.ClassDef):
                continue
            arguments = [*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs]
            for argument in arguments:
                if argument.arg == node.id:
                    if argument.annotation is not None:
                        return self._annotated(file, argument.annotation)
                    around = [each for each in self._scopes[id(scope)] if isinstance(each, ast.ClassDef)]
                    return {around[-1].name} if around and node.id in ("self", "cls") else set()
            bound_values = [
                value for name, value in _bindings(scope) if name == node.id and node.id not in _loads(value)
            ]
            if bound_values:
                return {c for value in bound_values for c in self._bound(file, value)}
        return set()

    def _bound(self, file: str, value: ast.expr) -> set[str]:
        annotation = isinstance(value, ast.Constant) or id(value) not in self._scopes
        return self._annotated(file, value) if annotation else self.classes_of(file, value)

    def _attribute(self, owner: str, attribute: str) -> set[str]:
        classes = set(self._attributes.get((owner, attribute), set()))
        for base in self._bases.get(owner, ()):
            classes |= self._attribute(base, attribute)
        return classes

    def _annotated(self, file: str, annotation: ast.expr) -> set[str]:
        names = set()
        for node in ast.walk(annotation):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)  # a quoted annotation
        return names & self._classes & self._known[file]

    def _read_class(self, file: str, node: ast.ClassDef) -> None:
        for inner in ast.walk(node):
            if isinstance(inner, ast.AnnAssign):
                self._note(node.name, inner.target, self._annotated(file, inner.annotation))
            elif isinstance(inner, ast.Assign):
                for target, value in _pairs(inner):
                    if isinstance(target, ast.Attribute):
                        self._note(node.name, target, self.classes_of(file, value))
            elif isinstance(inner, Function) and inner.returns is not None:
                self._note(node.name, ast.Name(inner.name), self._annotated(file, inner.returns))

    def _note(self, owner: str, target: ast.expr, classes: set[str]) -> None:
        name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
        self._attributes.setdefault((owner, name), set()).update(classes)

    def _enclose(self, node: ast.AST, scopes: Scopes) -> None:
        self._scopes[id(node)] = scopes
        for child in ast.iter_child_nodes(node):
            self._enclose(child, (*scopes, node) if isinstance(node, ast.ClassDef | Function) else scopes)


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.ClassDef | Function):
        yield node.name


def _pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(target, value) of an assignment, element by element where both sides are tuples."""
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def _bindings(scope: Function) -> Iterator[tuple[str, ast.expr]]:
    """(variable, value or annotation) of what a function binds."""
    for node in ast.walk(scope):
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = list(_pairs(node))
        elif isinstance(node, ast.AnnAssign):
            pairs = [(node.target, node.annotation)]
        elif isinstance(node, ast.For | ast.comprehension):
            pairs = [(node.target, node.iter)]
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            pairs = [(node.optional_vars, node.context_expr)]
        for target, value in pairs:
            for name in ast.walk(target):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    yield name.id, value


def _loads(node: ast.expr) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
