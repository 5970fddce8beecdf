"""Chat conversations made from the standard library of the running Python: "what is X?", answered by X's docstring.

Python sources are parsed, never imported, so nothing of them runs and a module whose C part is missing does no harm.
What is read depends on the interpreter alone: only names in `sys.stdlib_module_names`, so neither site-packages nor the
working directory can change it, and every choice is a SHA-256 of a name, so the hash seed and the clock cannot either.
"""

import ast
import hashlib
import importlib
import inspect
import os
import sys
import sysconfig
import tokenize
import types
import warnings
from collections.abc import Iterator
from typing import NamedTuple

MIN_ANSWER_CHARS = 20
"""Shorter docstrings ("Return self.") teach nothing."""
MAX_ANSWER_CHARS = 800
"""About 300 tokens of the example's tokenizer; `cap_answer` cuts a longer docstring."""
VALIDATION_ONE_IN = 20
"""One object in this many is held out for validation."""

# Excluded: modules that distributions ship apart from Python (tests, Tk, IDLE, ...), so that most installations of one
# version read the same files, and three modules whose docstrings are no documentation.
LEFT_OUT_MODULES = frozenset(
    {"antigravity", "distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data"}
    | {"test", "this", "tkinter", "turtle", "turtledemo", "venv"}
)
LEFT_OUT_FOLDERS = frozenset({"__pycache__", "test", "tests", "site-packages", "dist-packages"})
# Sources that are private in name only: the documented module re-exports them.
PUBLIC_NAMES = {
    "_collections_abc": "collections.abc",
    "_pydatetime": "datetime",
    "_pydecimal": "decimal",
    "_pyio": "io",
    "concurrent.futures._base": "concurrent.futures",
    "pathlib._local": "pathlib",
    "zipfile._path": "zipfile",
}
# Written in C, so they have no source to parse; always loaded or free of side effects, and there on every platform.
COMPILED_MODULES = ("builtins", "cmath", "itertools", "math", "time")

FUNCTION_QUESTIONS = (
    "What does the {kind} `{name}` do?",
    "Explain the {kind} `{name}` of Python's standard library.",
    "How does Python document `{name}`?",
    "I found a call of `{name}` in some code. What is it for?",
    "When would I call `{name}`?",
    "Describe `{name}{signature}`.",
)
CLASS_QUESTIONS = (
    "What is the class `{name}`?",
    "Explain the class `{name}` of Python's standard library.",
    "How does Python document the class `{name}`?",
    "I found `{name}` in some code. What kind of object is it?",
    "What would I use `{name}` for?",
)
MAX_SIGNATURE_CHARS = 60


class Documented(NamedTuple):
    """One function, method or class with its cleaned docstring; `signature` is "" where it is unknown or too long."""

    name: str
    kind: str
    signature: str
    docstring: str


def make_conversations() -> tuple[list[dict], list[dict]]:
    """All conversations as (train, validation), each `{"messages": [user, assistant]}`.

    No two share a question or an answer. Both lists are in the order of a hash of the object's name, which also decides
    the split, so an object stays on its side however the questions are worded, and any first part is a fair sample.
    """
    chosen: dict[str, Documented] = {}
    answers: set[str] = set()
    for item in documented_objects():
        answer = cap_answer(item.docstring)
        # An override often repeats its parent's docstring: with it, validation would hold answers seen in training.
        if len(answer) < MIN_ANSWER_CHARS or answer in answers or item.name in chosen:
            continue
        answers.add(answer)
        chosen[item.name] = item._replace(docstring=answer)
    train: list[dict] = []
    validation: list[dict] = []
    for item in sorted(chosen.values(), key=lambda item: (_stable_hash(item.name), item.name)):
        side = validation if _stable_hash("split " + item.name) % VALIDATION_ONE_IN == 0 else train
        question, answer = ask(item), item.docstring
        side.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    return train, validation


def ask(item: Documented) -> str:
    """The question about one object: unique, because it contains the name; a hash of the name chooses the wording."""
    wordings = CLASS_QUESTIONS if item.kind == "class" else FUNCTION_QUESTIONS
    wording = wordings[_stable_hash("wording " + item.name) % len(wordings)]
    return wording.format(name=item.name, kind=item.kind, signature=item.signature)


def cap_answer(docstring: str) -> str:
    """At most MAX_ANSWER_CHARS characters: whole paragraphs from the start, or whole lines of a longer first paragraph.

    Long tables and option lists follow the paragraph that describes the object, so they are removed first.
    """
    text = "\n".join(line.rstrip() for line in docstring.strip().splitlines())
    if len(text) <= MAX_ANSWER_CHARS:
        return text
    for separator in ("\n\n", "\n", " "):
        end = text.rfind(separator, 0, MAX_ANSWER_CHARS + 1)
        if end > 0:
            return text[:end].rstrip()
    return text[:MAX_ANSWER_CHARS]


def documented_objects() -> Iterator[Documented]:
    """Every public function, method and class with a docstring, compiled modules first, then sources by module name."""
    for module_name in COMPILED_MODULES:
        yield from _from_compiled_module(module_name)
    for module_name, path in sorted(_source_files()):
        try:
            with tokenize.open(path) as file, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in the docstrings of others
                tree = ast.parse(file.read())
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue  # a template or an unreadable file of a distribution: the others are enough
        yield from _from_body(tree.body, module_name, inside_class=False)


def _source_files() -> list[tuple[str, str]]:
    """(public module name, path) of each source file of the standard library that is read."""
    root = sysconfig.get_path("stdlib")  # the base interpreter's, also inside a virtual environment
    modules = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT_FOLDERS]
        for file_name in files:
            if not file_name.endswith(".py"):
                continue
            path = os.path.join(folder, file_name)
            parts = os.path.relpath(path, root)[: -len(".py")].split(os.sep)
            if parts[-1] == "__init__":
                parts.pop()
            if not parts or parts[0] not in sys.stdlib_module_names or parts[0] in LEFT_OUT_MODULES:
                continue
            name = ".".join(parts)
            name = PUBLIC_NAMES.get(name, name)
            if not any(part.startswith("_") for part in name.split(".")):
                modules.append((name, path))
    return modules


def _from_body(body: list[ast.stmt], prefix: str, inside_class: bool) -> Iterator[Documented]:
    """Public definitions of a module or class body, also under `if` and `try`, but not inside functions."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _from_body([*node.body, *node.orelse], prefix, inside_class)
        elif isinstance(node, ast.Try):
            handled = [statement for handler in node.handlers for statement in handler.body]
            yield from _from_body([*node.body, *handled, *node.orelse, *node.finalbody], prefix, inside_class)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            name = f"{prefix}.{node.name}"
            docstring = ast.get_docstring(node)
            if isinstance(node, ast.ClassDef):
                if docstring:
                    yield Documented(name, "class", "", docstring)
                yield from _from_body(node.body, name, inside_class=True)
            elif docstring:
                kind = "method" if inside_class else "function"
                yield Documented(name, kind, _short_signature(node.args, inside_class), docstring)


def _short_signature(arguments: ast.arguments, inside_class: bool) -> str:
    """The argument list as a caller sees it: without annotations, without `self`; "" when it is long."""
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    positional = arguments.posonlyargs or arguments.args
    if inside_class and positional and positional[0].arg in ("self", "cls"):
        positional.pop(0)
    text = f"({ast.unparse(arguments)})"
    return text if len(text) <= MAX_SIGNATURE_CHARS else ""


def _from_compiled_module(module_name: str) -> Iterator[Documented]:
    """Functions, classes and methods that this C module itself defines; nothing where the build left it out."""
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return
    prefix = "" if module_name == "builtins" else module_name + "."
    for name, value in sorted(vars(module).items()):
        # `site` and notebooks put helpers into builtins: only objects that C defines there count.
        defined_there = getattr(value, "__module__", None) == module_name
        if name.startswith("_") or not defined_there or not isinstance(value, (type, types.BuiltinFunctionType)):
            continue
        is_class = isinstance(value, type)
        if value.__doc__:
            kind = "class" if is_class else "function"
            yield Documented(prefix + name, kind, "", inspect.cleandoc(value.__doc__))
        for member_name, member in sorted(vars(value).items()) if is_class else ():
            docstring = getattr(member, "__doc__", None)
            if not member_name.startswith("_") and callable(member) and isinstance(docstring, str):
                yield Documented(f"{prefix}{name}.{member_name}", "method", "", inspect.cleandoc(docstring))


def _stable_hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
