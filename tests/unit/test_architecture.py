"""The rules of docs/architecture.md on the package, and on small sources that break each of them."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from _architecture import (
    PACKAGE,
    ROOT,
    UPWARD_BY_NAME,
    Code,
    crowded_folders,
    cycles,
    foreign_changes,
    fragments,
    layer_findings,
    long_functions,
    names_with_defaults,
    order_findings,
    read_layers,
    read_package,
    read_subpackages,
    unit_of,
)

LAYERS = read_layers()
SUBPACKAGES = read_subpackages()
CATALOGUES = {"cli/", "bridge/families/"}
"""Folders with one file for each entry, however many there are."""
CODE = read_package()

MEGATRON = {
    *("platform/", "parallel/", "ops/", "nn/", "model/", "bridge/", "data/"),
    *("engine/", "setup/", "evaluation/", "generation/", "checkpoint/"),
}
DISTRIBUTED = {
    "parallel/",
    "metrics/",
    "profiling/",
    "checkpoint/",
    "engine/",
    "evaluation/",
    "platform/",
    "testing/",
    "cli/",
    "launch/",
}

LOADED_BY_VARIABLE = {
    "registry.py": "its targets are checked where they stand, as `module:Attribute`",
    "testing/ranks.py": "the names are strings of the same file, which are checked",
}
"""Files outside platform/ that load a module whose name is a variable -> why the layers hold nevertheless."""

NAMED_BY_VARIABLE = {
    "ops/__init__.py",  # its public functions
    "evaluation/verify.py",  # transformers' class of a family, which its older releases lack
}

SCHEDULE = "field of ModelParallelConfig through which a training program gives Megatron-Core's schedule its functions"
MARK = "Megatron-Core's mark on a parameter, by which it reduces gradients"
SPEC = "a layer spec is made for one model, and its submodules are exchanged by assignment"
STORAGE = "torch exchanges the storage of a parameter through it, as Module.to does"
FOREIGN = {
    "cli/": {"of arguments of a parser that cli/completion.py has made": ["nargs"]},
    "engine/": {
        SCHEDULE: ["finalize_model_grads_func", "no_sync_func", "grad_sync_func", "grad_scale_func"],
        STORAGE: ["data"],
    },
    "setup/": {
        SCHEDULE: ["finalize_model_grads_func", "no_sync_func", "grad_sync_func", "grad_scale_func"],
        MARK: ["allreduce"],
    },
    "evaluation/": {
        "of transformers' configuration, which evaluation/verify.py has made": ["quantization_config"],
    },
    "generation/": {"the caller of StaticInferenceContext advances it": ["sequence_len_offset"]},
    "checkpoint/": {"memory into which Megatron-Core reads a shard": ["data"]},
    "data/": {"the fields of an object that the tokenized cache creates": ["*"]},
    "model/": {
        MARK: ["sequence_parallel"],
        SPEC: [
            *("module", "router", "experts", "core_attention"),
            *("input_layernorm", "self_attn_bda", "pre_mlp_layernorm", "mlp_bda"),
        ],
    },
    "nn/": {
        MARK: [
            *("sequence_parallel", "allreduce", "zero_out_wgrad"),
            *("shared", "shared_embedding", "is_embedding_or_output_parameter"),
        ],
        STORAGE: ["data"],
        "a frozen parameter's values, which it has no memory for": ["quantized"],
        "of norms that our attention has built; Megatron-Core has one epsilon for all norms": ["eps"],
    },
    "testing/": {"torch's switch, in a process that only runs tests": ["fill_uninitialized_memory"]},
}
"""Folder -> why its files assign attributes of objects that are not ours -> the attributes; platform/ may."""


def test_every_folder_has_a_layer():
    units = {unit_of(file) for file in CODE.trees} - {"__init__.py"}
    assert units == set(LAYERS)


def test_a_file_imports_lower_layers_and_its_own_folder_only():
    assert layer_findings(CODE, LAYERS, UPWARD_BY_NAME).all == []


def test_a_subpackage_imports_itself_and_earlier_ones_of_its_folder():
    assert order_findings(CODE, SUBPACKAGES) == []


def test_an_algorithm_imports_no_other_algorithm():
    assert algorithm_findings(CODE) == []


def algorithm_findings(code: Code) -> list[str]:
    """References from one file at the top of flow/ to another; `__init__` and `entry` name all of them."""
    return [
        str(reference)
        for file, references in code.references.items()
        if re.fullmatch(r"flow/\w+\.py", file) and file not in ("flow/__init__.py", "flow/entry.py")
        for reference in references
        if code.file_of(reference.name) not in (None, file)
        and re.fullmatch(r"flow/\w+\.py", code.file_of(reference.name) or "")
    ]


def test_a_listed_subpackage_exists():
    folders = {file.rpartition("/")[0] + "/" for file in CODE.trees}
    assert {unit + name for unit, names in SUBPACKAGES.items() for name in names} <= folders


def test_a_folder_has_at_most_14_files():
    assert crowded_folders(CODE, 14, CATALOGUES) == []


def test_the_one_exception_is_in_use():
    named = {(reference.file, reference.name) for each in CODE.references.values() for reference in each}
    assert set(UPWARD_BY_NAME) <= named
    assert len(UPWARD_BY_NAME) == 1


def test_no_files_import_each_other():
    assert cycles(CODE) == []


def test_a_module_is_loaded_by_a_variable_where_it_is_stated():
    computed = {r.file for each in CODE.references.values() for r in each if not r.name}
    assert {file for file in computed if unit_of(file) != "platform/"} == set(LOADED_BY_VARIABLE)


def test_a_string_that_names_a_module_names_one_that_exists():
    for reference in (each for of_file in CODE.references.values() for each in of_file):
        parts = reference.name.split(".")
        if parts[0] == PACKAGE and len(parts) > 1:
            file = CODE.file_of(reference.name)
            assert file is not None, str(reference)
            assert file != "__init__.py" or parts[1] == "__version__", str(reference)


def test_megatron_and_distributed_are_imported_where_they_belong():
    for reference in (each for of_file in CODE.references.values() for each in of_file):
        unit, name = unit_of(reference.file), reference.name + "."
        if unit == "flow/":
            assert not name.startswith(("megatron.", "torch.distributed.")), str(reference)
        if not reference.typing_only:
            assert unit in MEGATRON or not name.startswith("megatron."), str(reference)
            assert unit in DISTRIBUTED or not name.startswith("torch.distributed."), str(reference)


def test_one_file_imports_the_deprecated_gpt_model():
    module, references = "megatron.core.models.gpt", [r for each in CODE.references.values() for r in each]
    classes = {f"{module}.GPTModel", f"{module}.gpt_model", f"{module}.gpt_model.GPTModel", f"{module}.*"}
    assert {reference.file for reference in references if reference.name in classes} == {"model/gpt_model.py"}


def test_foreign_objects_are_changed_in_the_platform_layer_only():
    changes = foreign_changes(CODE)
    known = {(unit, name) for unit, reasons in FOREIGN.items() for names in reasons.values() for name in names}
    assert [str(change) for change in changes if (unit_of(change.file), change.attribute) not in known] == []
    unused = known - {(unit_of(change.file), change.attribute) for change in changes}
    assert not unused, "exceptions that nothing needs"


def test_a_name_is_read_with_a_default_where_its_contract_is_stated():
    """An attribute of a foreign object of the same name may mean something else, and a renamed one is never missed."""
    stated = yaml.safe_load(Path(__file__).with_name("names_with_defaults.yml").read_text("utf-8"))
    names = names_with_defaults(CODE)
    assert names.pop("") == NAMED_BY_VARIABLE
    assert {name: files for name, files in names.items() if name not in stated} == {}
    assert stated.keys() - names.keys() == set(), "names that nothing reads so"


def test_a_name_that_is_read_with_a_default_is_found():
    code = small(low_a="def f(x, name):\n    getattr(x, 'cap', None)\n    hasattr(x, name)\n    getattr(x, 'whole')")
    assert names_with_defaults(code) == {"cap": {"low/a.py"}, "": {"low/a.py"}}


def test_no_function_is_longer_than_60_lines():
    assert long_functions([ROOT / PACKAGE, ROOT / "scripts", ROOT / "examples"], limit=60) == []


def test_a_docstring_stands_by_itself(tmp_path):
    assert fragments(ROOT / PACKAGE) == []
    (tmp_path / "a.py").write_text('"""A module."""\nx = 1\n"""That it counts."""\n')
    assert fragments(tmp_path) == ["a.py:3 That it counts."]


def test_a_name_of_a_module_is_assigned_once():
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        body = ast.parse(path.read_text("utf-8")).body
        targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
        counts = Counter(node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
        assert {name for name, count in counts.items() if count > 1} == set(), path


def test_paths_of_the_page_exist():
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    paths = re.findall(r"`((?:[\w-]+/)+[\w.-]*)`", page) + re.findall(r"\b((?:\w+/)+\w+\.py)\b", page)
    assert len(paths) > 60
    missing = {path for path in paths if not (ROOT / path).exists() and not (ROOT / PACKAGE / path).exists()}
    missing -= {name for names in SUBPACKAGES.values() for name in names}  # another test looks for them
    assert missing == set()


# ---- each rule is broken once, so that the checks above are known to see it


SMALL = {"low/": 1, "left/": 2, "right/": 2, "high/": 3}
FILES = {"low/a.py": "", "left/a.py": "", "right/a.py": "", "high/a.py": "", "high/__init__.py": "", "low/b.py": ""}


def small(**changed: str) -> Code:
    """The small package, with other texts for some files: `low_a="..."` is low/a.py."""
    return Code({**FILES, **{f"{name.replace('_', '/', 1)}.py": text for name, text in changed.items()}})


@pytest.mark.parametrize(
    "text",
    [
        "import megatron_wrap.high.a",
        "import megatron_wrap.high.a as other",
        "from megatron_wrap import high",
        "from megatron_wrap.high import a",
        "from megatron_wrap.high.a import name",
        "def f():\n    from megatron_wrap.high.a import name",
        "class C:\n    def f(self):\n        import megatron_wrap.high.a",
        "if TYPE_CHECKING:\n    from megatron_wrap.high.a import Name",
        "from ..high.a import name",
        "from ..high import a",
        "from .. import high",
        "import_module('megatron_wrap.high.a')",
        "importlib.import_module(name='megatron_wrap.high.a')",
        "import_module('..high.a', __package__)",
        "import_module(f'megatron_wrap.high.{name}')",
        "import_module('megatron_wrap.high.' + name)",
        "__import__('megatron_wrap.high.a')",
        "NAMES = ('megatron_wrap.high.a',)\nfor name in NAMES:\n    import_module(name)",
        "R = Registry('kind', 'group', {'key': 'megatron_wrap.high.a:Name'})",
        "R = Registry('kind', 'group', {name: f'megatron_wrap.high.{name}:Name' for name in NAMES})",
        "command = [sys.executable, '-m', 'megatron_wrap.high.a']",
    ],
)
def test_an_upward_reference_is_found(text: str):
    findings = layer_findings(small(low_a=text), SMALL, {})
    assert [line.partition(":")[0] for line in findings.upward] == ["low/a.py"]
    assert layer_findings(small(high_a=text), SMALL, {}).all == []


def test_a_sideways_reference_is_found():
    findings = layer_findings(small(left_a="def f():\n    from ..right import a"), SMALL, {})
    assert findings.sideways == ["left/a.py:2 megatron_wrap.right.a (layer 2)"]
    assert findings.upward == []


ORDERED = {"low/": ["first/", "second/"]}
IN_ORDER = {"low/first/a.py": "", "low/second/a.py": "", "low/a.py": ""}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("low/first/a.py", "from megatron_wrap.low.second.a import name"),
        ("low/first/a.py", "def f():\n    from ..second import a"),
        ("low/second/a.py", "if TYPE_CHECKING:\n    from megatron_wrap.low.a import Name"),
        ("low/second/a.py", "R = Registry('kind', 'group', {'key': 'megatron_wrap.low.a:Name'})"),
        ("low/third/a.py", ""),
    ],
)
def test_a_reference_to_a_later_subpackage_is_found(file: str, text: str):
    findings = order_findings(Code({**IN_ORDER, file: text}), ORDERED)
    assert [finding.partition(":")[0] for finding in findings] == [file]


def test_earlier_subpackages_and_the_own_one_are_no_findings():
    first, second = "from . import b", "from megatron_wrap.low.first import a\nfrom .a import x"
    top = "from megatron_wrap.low.second.a import name\nfrom megatron_wrap.low.b import other"
    files = {**IN_ORDER, "low/first/a.py": first, "low/second/b.py": second, "low/a.py": top, "low/b.py": ""}
    assert order_findings(Code(files), ORDERED) == []


def test_an_import_of_another_algorithm_is_found():
    files = {"flow/a.py": "", "flow/__init__.py": "from .a import A", "flow/shared/b.py": "", "flow/entry.py": ""}
    shared = "from megatron_wrap.flow.shared.b import B"
    assert algorithm_findings(Code({**files, "flow/c.py": shared})) == []
    findings = algorithm_findings(Code({**files, "flow/c.py": "from megatron_wrap.flow.a import A"}))
    assert [finding.partition(":")[0] for finding in findings] == ["flow/c.py"]


def test_a_crowded_folder_is_found():
    code = Code({f"low/first/{number}.py": "" for number in range(3)})
    assert crowded_folders(code, 2, ()) == ["low/first/: 3 files"]
    assert crowded_folders(code, 2, {"low/first/"}) == crowded_folders(code, 3, ()) == []


def test_an_exception_is_for_a_string_alone():
    text, excepted = "import_module('megatron_wrap.high.a')", {("low/a.py", "megatron_wrap.high.a"): "reason"}
    assert layer_findings(small(low_a=text), SMALL, excepted).all == []
    assert layer_findings(small(low_b=text), SMALL, excepted).upward != []
    assert layer_findings(small(low_a="import megatron_wrap.high.a"), SMALL, excepted).upward != []


def test_lower_layers_and_the_own_folder_are_no_findings():
    code = small(high_a="from megatron_wrap.low import a\nfrom . import x\nimport torch", low_a="from .b import c")
    assert layer_findings(code, SMALL, {}).all == []


def test_a_folder_without_a_layer_is_found():
    code = Code({**FILES, "new/a.py": "from megatron_wrap.low import a"})
    assert layer_findings(code, SMALL, {}).without_layer == ["new/a.py:1 megatron_wrap.low.a"]


@pytest.mark.parametrize(
    "text",
    [
        "from megatron_wrap.low.b import name",
        "def f():\n    from .b import name",
        "if TYPE_CHECKING:\n    from megatron_wrap.low.b import Name",
        "TARGETS = {'b': 'megatron_wrap.low.b:Name'}",
    ],
)
def test_a_cycle_is_found(text: str):
    assert cycles(small(low_a=text, low_b="from megatron_wrap.low import a")) == [["low/a.py", "low/b.py"]]
    assert cycles(small(low_a=text)) == []


CHANGES = [
    "def f(model):\n    model.attribute = 1",
    "def f(model: torch.nn.Module):\n    model.attribute += 1",
    "def f():\n    torch.backends.attribute = 1",
    "def f():\n    model = torch.nn.Linear(1, 1)\n    model.attribute = 1",
    "def f(models: list[torch.nn.Module]):\n    for model in models:\n        model.weight.attribute = 1",
    "def f(model):\n    model.first, model.second = 1, 2",
    "def f(model):\n    del model.attribute",
    "def f(model):\n    for model.attribute in range(2):\n        pass",
    "def f(model):\n    setattr(model, 'attribute', 1)",
    "def f(model):\n    object.__setattr__(model, 'attribute', 1)",
    "def f(model):\n    vars(model)['attribute'] = 1",
    "def f(model):\n    model.__dict__.update(attribute=1)",
    "def f(models):\n    map(setattr, models)",
    "def f():\n    import_module('torch').attribute = 1",
    "def f():\n    sys.modules['torch'] = None",
    "class C:\n    def __init__(self, model):\n        self.model = model\n        self.model.attribute = 1",
    "class C:\n    model: torch.nn.Module\ndef f(c: C):\n    c.model.attribute = 1",
    "class C:\n    pass\ndef f(module: other.Module):\n    module.attribute = C()",
]


@pytest.mark.parametrize("text", CHANGES)
def test_a_change_of_a_foreign_object_is_found(text: str):
    assert {change.file for change in foreign_changes(Code({"low/a.py": text}))} == {"low/a.py"}
    assert foreign_changes(Code({"platform/a.py": text})) == []


@pytest.mark.parametrize(
    "text",
    [
        "class C:\n    def f(self):\n        self.attribute = 1\n        self.__dict__.update(other=2)",
        "class F(Function):\n    @staticmethod\n    def forward(ctx, x):\n        ctx.attribute = 1",
        "class C:\n    attribute = 0\ndef f(c: C | None):\n    c.attribute = 1",
        "class C:\n    attribute = 0\ndef f():\n    c = C()\n    c.attribute, other = 1, 2",
        "class C:\n    attribute = 0\ndef f(all: list[C]):\n    for c in all:\n        c.attribute = 1",
        "class C:\n    pass\nclass D:\n    c: C\ndef f(d: 'D'):\n    d.c.attribute = 1",
        "class C:\n    pass\ndef make() -> C: ...\ndef f():\n    c = make()\n    c.attribute = 1",
        "from megatron_wrap.low.b import B\ndef f(b: B):\n    b.attribute = 1",
        "class C:\n    def f(self):\n        other = copy.copy(self)\n        other.attribute = 1",
        "def f(replacements, model):\n    replacements.set(model, 'attribute', 1)\n    os.environ['A'] = '1'",
    ],
)
def test_changes_of_our_own_objects_are_no_findings(text: str):
    code = Code({"low/a.py": text, "low/b.py": "class B: pass"})
    assert [str(change) for change in foreign_changes(code)] == []


def test_a_long_function_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("_architecture.ROOT", tmp_path)
    (tmp_path / "a.py").write_text("def short():\n    pass\n\ndef long():\n" + "    pass\n" * 3)
    assert long_functions([tmp_path], limit=3) == ["a.py:4 long: 4 lines"]
