"""The JSON schema of the configuration, against the reader itself: what one refuses, the other refuses. No torch."""

import ast
import copy
import functools
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
from jsonschema import Draft202012Validator

from megatron_wrap.cli.main import main
from megatron_wrap.config.checks.run import _check_ranges
from megatron_wrap.config.decode import decode, load_tree, read_view
from megatron_wrap.config.json_schema import installed_upstream_keys, type_schema
from megatron_wrap.config.reading import composition
from megatron_wrap.config.reading.tree import OVERRIDE, SELECT, TreeFile, open_tree, shipped_root, shipped_schema
from megatron_wrap.config.reading.yaml_nodes import read_yaml
from megatron_wrap.config.schema.keys import Mismatch, check_value
from megatron_wrap.config.schema.run import SECTION_PATHS
from megatron_wrap.config.schema.upstream import upstream_fields
from megatron_wrap.errors import ConfigError

ROOT = Path(__file__).parents[3]
SHIPPED = json.loads(shipped_schema().read_text(encoding="utf-8"))
VALIDATOR = Draft202012Validator(SHIPPED)
MUTANTS = 500


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    """The reader's refusal of a run's YAML with these values, "" if it accepts them: keys, types and ranges."""
    monkeypatch.setattr(TreeFile, "read", functools.cache(TreeFile.read))
    root = open_tree(tmp_path / "run.yaml")
    monkeypatch.setattr(composition, "open_tree", lambda view: root)

    def refusal(content: Any) -> str:
        path = tmp_path / "run.yaml"
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        try:
            view = read_view(path)
            _check_ranges(decode(view, "run"))
        except ConfigError as error:
            return str(error)
        return ""

    return refusal


def shipped_yamls() -> list[Path]:
    """Every YAML of the repository that is a run's or belongs to the tree; data of tests are .yml."""
    folders = [ROOT / name for name in ("configs", "examples", "scripts", "tests")]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.yaml"))]
    return [path for path in paths if path.name != "refusals.yaml"]  # a table of test_run_checks.py


def documented_yamls() -> Iterator[tuple[str, str]]:
    """(page, text) of the runs and parts of runs that the pages show."""
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]:
        for text in re.findall(r"^ *```ya?ml\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.M | re.S):
            if re.match(r"(#.*\n|\s)*megatron_(lm|wrap):", text):
                yield page.name, text


def quoted_yamls() -> Iterator[tuple[str, str]]:
    """(file, text) of the YAML in the strings of the tests and of the commands."""
    for folder in (ROOT / "tests", ROOT / "megatron_wrap" / "cli"):
        for file in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and "megatron_wrap:\n" in node.value:
                    yield file.name, node.value


def test_it_is_a_schema_and_accepts_every_shipped_yaml() -> None:
    Draft202012Validator.check_schema(SHIPPED)
    paths = shipped_yamls()
    assert len(paths) > 100
    for path in paths:
        errors = [error.message for error in VALIDATOR.iter_errors(read_yaml(path).plain())]
        assert not errors, path


def test_it_accepts_every_part_of_a_run_that_a_page_shows(tmp_path: Path) -> None:
    path, shown = tmp_path / "run.yaml", 0
    for page, text in documented_yamls():
        path.write_text(text, encoding="utf-8")
        errors = [error.message for error in VALIDATOR.iter_errors(read_yaml(path).plain())]
        assert not errors, (page, text)
        shown += 1
    assert shown > 10


def test_it_accepts_every_quoted_yaml_that_the_reader_accepts(read: Callable[[Any], str], tmp_path: Path) -> None:
    accepted = 0
    for origin, text in quoted_yamls():
        if not read(text):
            accepted += 1
            errors = [error.message for error in VALIDATOR.iter_errors(read_yaml(tmp_path / "run.yaml").plain())]
            assert not errors, (origin, text)
    assert accepted >= 4


def test_it_accepts_a_resolved_configuration() -> None:
    for name in RUNS:
        resolved = load_tree(ROOT / "configs" / name).values
        assert [error.message for error in VALIDATOR.iter_errors(resolved)] == []
    resolved["megatron_lm"]["train"]["common"]["sead"] = 1
    assert not VALIDATOR.is_valid(resolved)


# ---- what the reader refuses


def explicit_run(name: str) -> dict[str, Any]:
    """A shipped run with every value of every section written out, and the form of each kind of mapping."""
    path = ROOT / "configs" / name
    tree, view = load_tree(path), read_yaml(path).plain()
    for section_path, section in tree.sections.items():
        *outer, last = section_path.split(".")
        inner = view
        for part in outer:
            inner = inner.setdefault(part, {})
        values = {key: value for key, value in tree.section_values(section_path).items() if key != "flow_key"}
        inner[last] = values if section.selected is None else {SELECT: section.selected, OVERRIDE: values}
    data = view["megatron_wrap"]["data"][OVERRIDE]
    data["train"] = [{"path": "a.jsonl", "weight": 0.5, "columns": {"text": "body"}, "max_length": 9}, "b.jsonl"]
    data["validation"] = {"short": {"path": "c", "split": "test"}, "long": ["d", {"path": "e", "samples": 3}]}
    view["megatron_wrap"]["models"]["reference"] = {"hf_path": "org/model", "refresh_interval": 3, "offload": False}
    view["megatron_lm"]["misc"]["ddp"]["align_param_gather"] = True
    view["megatron_lm"]["train"]["optimizer"][OVERRIDE]["decoupled_lr"] = 0.1
    view["megatron_lm"]["model"]["arch"][OVERRIDE] |= {"moe_router_fusion": True, "recompute_mtp": None}
    del view["megatron_lm"]["model"]["arch"][OVERRIDE]["recompute_mtp"]
    return view


def key_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every key of every mapping, but for names that are free: those of sets and columns."""
    for key, below in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if not (path and path[-1] in ("validation", "columns")) and isinstance(key, str):
            yield (*path, key)
        yield from key_paths(below, (*path, key))


def typo(key: str, generator: random.Random) -> str:
    index = generator.randrange(len(key))
    letter = generator.choice("abcdefghijklmnopqrstuvwxyz_")
    return generator.choice(
        [
            key[:index] + key[index + 1 :],
            key[:index] + letter + key[index:],
            key[:index] + letter + key[index + 1 :],
            key[:index] + key[index : index + 2][::-1] + key[index + 2 :],
            key.replace("_", "-") if "_" in key else key.replace("-", "_"),
            key.upper(),
        ]
    )


WRONG = ("four", "1", "true", "", 4.5, -3, 10**6, True, [], ["a"], [1, 2, 3], {"a": 1}, {}, None)


def mutant(view: dict[str, Any], generator: random.Random) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The run with one mistyped key or one other value, and the path of it."""
    changed = copy.deepcopy(view)
    path = generator.choice(list(key_paths(changed)))
    mapping = changed
    for part in path[:-1]:
        mapping = mapping[part]
    if generator.random() < 0.5:
        name = typo(path[-1], generator)
        return _with_key(changed, path, name), (*path[:-1], name)
    # an omission is no mistake: the command line may set what is missing
    may_be_empty = path[-1] != SELECT and not isinstance(mapping[path[-1]], dict)
    mapping[path[-1]] = copy.deepcopy(generator.choice(WRONG if may_be_empty else WRONG[:-2]))
    return changed, path


def _with_key(value: Any, path: tuple[Any, ...], name: str) -> Any:
    key, *rest = path
    if isinstance(value, list):
        return [_with_key(item, tuple(rest), name) if index == key else item for index, item in enumerate(value)]
    if rest:
        return {**value, key: _with_key(value[key], tuple(rest), name)}
    return {name if other == key else other: below for other, below in value.items()}


RUNS = ("tiny-llama-dpo.yaml", "tiny-llama-grpo.yaml", "tiny-mixtral-sft.yaml", "tiny-gpt-pretrain.yaml")


@pytest.mark.parametrize("count", [MUTANTS // 10, pytest.param(MUTANTS, marks=pytest.mark.matrix)])
def test_it_refuses_what_the_reader_refuses_and_nothing_else(read: Callable[[Any], str], count: int) -> None:
    generator = random.Random(count)
    runs = [explicit_run(name) for name in RUNS] + [read_yaml(ROOT / "configs" / name).plain() for name in RUNS]
    assert all(not read(run) and VALIDATOR.is_valid(run) for run in runs)
    refused = 0
    while refused < count:
        changed, path = mutant(generator.choice(runs), generator)
        refusal, valid = read(changed), VALIDATOR.is_valid(changed)
        refused += bool(refusal)
        if refusal:
            assert not valid, refusal
        elif not valid:  # the reader leaves a flow's options to the flow
            assert path[:2] == ("megatron_wrap", "flow"), path


def test_the_forms_of_a_reference_model_are_those_of_the_reader(read: Callable[[Any], str]) -> None:
    run = read_yaml(ROOT / "configs/tiny-llama-dpo.yaml").plain()
    keys = {"copy": (True, False), "hf_path": ("a", "", None), "precomputed": ("b", None), "offload": (True, False)}
    forms: list[Any] = ["copy", None, "copied", {}, {"checkpoint": "c"}, {"checkpoint": "c", "copy": True}]
    for names in itertools.chain.from_iterable(itertools.combinations(keys, count) for count in (1, 2, 3)):
        forms += [dict(zip(names, values, strict=True)) for values in itertools.product(*(keys[n] for n in names))]
    accepted = 0
    of_forms = Draft202012Validator({"$ref": "#/$defs/reference-model", "$defs": SHIPPED["$defs"]})
    for form in forms:
        run["megatron_wrap"]["models"]["reference"] = form
        refusal = read(run)
        accepted += not refusal
        assert of_forms.is_valid(form) == (not refusal), (form, refusal)
    assert 10 < accepted < len(forms) - 10


@pytest.mark.parametrize("folder", sorted(SECTION_PATHS.values()))
def test_a_mistyped_key_in_a_file_of_the_tree_is_refused(folder: str) -> None:
    if folder in (SECTION_PATHS["flow"], SECTION_PATHS["model_provider"]):
        return  # files there may have options of any name
    section = shipped_root().joinpath(*folder.split("."))
    file = next(iter(sorted(section.glob("*.yaml"))), section.with_name(f"{section.name}.yaml"))
    content = read_yaml(file).plain()
    assert VALIDATOR.is_valid(content)
    name = next(key for key in content if not key.startswith("__"))
    assert not VALIDATOR.is_valid({**content, f"{name}x": content[name]})
    assert not VALIDATOR.is_valid({**content, name: {"a": [1]}})


# ---- the shipped file, and what the command prints


def test_the_shipped_file_is_that_of_the_dataclasses(load_script: Callable[[str], ModuleType]) -> None:
    assert load_script("config_schema").main(["--check"]) == 0, "run make config-docs"


def test_the_shipped_file_has_every_key_of_the_installed_megatron_core(
    load_script: Callable[[str], ModuleType],
) -> None:
    script = load_script("config_schema")
    shipped = script.shipped_upstream_keys(ROOT)
    marks = set(re.findall(rf"{script.ONLY}([\d.]+)\.", json.dumps(shipped)))
    assert marks == {"0.16", "0.19"}
    for section, keys in installed_upstream_keys().items():
        for name, key in keys.items():
            accepted = shipped[section][name]
            types = [script.without_text(form) for form in accepted.get("anyOf", [accepted])]
            assert script.without_text(accepted) == script.without_text(key) or script.without_text(key) in types, name
        # what is not installed is marked as that of the other version
        others = {name: key["description"] for name, key in shipped[section].items() if name not in keys}
        assert all(script.ONLY in text for text in others.values()), section
        assert len(keys) > 10


def test_versions_are_joined(load_script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    script = load_script("config_schema")
    older, newer = {"type": "integer", "description": "Old."}, {"type": "string", "description": "New."}
    same = {**older, "description": "New."}
    assert script.joined({"1": older, "2": same}) == same
    either = {"anyOf": [{"type": "integer"}, {"type": "string"}], "description": "New."}
    assert script.joined({"1": older, "2": newer}) == either
    assert script.marked("2", newer)["description"] == f"New. {script.ONLY}2."
    for version, extra in (("1", ""), ("2", "    new_key: int = 3\n    '''Counts.'''\n")):
        for file, name in FILES_OF_MEGATRON_CORE.items():
            path = tmp_path / version / "megatron" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"class {name}:\n    a_key: bool = False\n    '''Is on.'''\n{extra}", encoding="utf-8")
    union = script.keys_of_all({"1": tmp_path / "1", "2": tmp_path / "2"})["optimizer"]
    assert union["a_key"]["type"] == "boolean"
    assert union["new_key"]["description"] == (
        "Counts. (Megatron-Core's OptimizerConfig, default 3) Only in Megatron-Core 2."
    )
    assert upstream_fields("OptimizerConfig")["lr"], "the installed version is read again"


FILES_OF_MEGATRON_CORE = {
    "core/model_parallel_config.py": "ModelParallelConfig",
    "core/transformer/transformer_config.py": "TransformerConfig",
    "core/optimizer/optimizer_config.py": "OptimizerConfig",
    "core/distributed/distributed_data_parallel_config.py": "DistributedDataParallelConfig",
    "core/transformer/enums.py": "AttnBackend(enum.Enum)",
}


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Draft202012Validator:
    assert main(["schema", *arguments]) == 0
    return Draft202012Validator(json.loads(capsys.readouterr().out))


def test_the_command_prints_the_schema_of_the_installed_megatron_core(capsys: pytest.CaptureFixture[str]) -> None:
    validator = printed(capsys)
    run = read_yaml(ROOT / "configs/tiny-llama-sft.yaml").plain()
    assert validator.is_valid(run)
    assert "Only in Megatron-Core" not in json.dumps(validator.schema)
    keys = validator.schema["$defs"]["keys-of-megatron_lm.model.arch"]["properties"]
    assert keys["qk_l2_norm"]["description"] == (
        "Whether to apply llama 4-style qk L2 norm. (Megatron-Core's TransformerConfig, default False)"
    )
    assert keys["num_layers"]["minimum"] == 1
    assert validator.schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_the_keys_of_a_flow_of_ones_own_and_the_files_of_an_overlay(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["new-flow", "sharp_flow", "--folder", str(tmp_path)]) == 0
    capsys.readouterr()
    path = tmp_path / "sharp_flow.yaml"
    first, *_ = path.read_text(encoding="utf-8").splitlines()
    assert first == f"# yaml-language-server: $schema={shipped_schema()}"
    assert shipped_schema().is_file()
    overlay = tmp_path / "nest/megatron_lm/model/arch/mine.yaml"
    overlay.parent.mkdir(parents=True)
    overlay.write_text("__inherit__: tiny-llama.yaml\nnum_layers: 2\n", encoding="utf-8")
    run = read_yaml(path).plain()
    arch, flow = run["megatron_lm"]["model"]["arch"], run["megatron_wrap"]["flow"]["__override__"]
    mistyped = copy.deepcopy(run)
    mistyped["megatron_wrap"]["flow"]["__override__"]["focsu"] = 1.0
    assert VALIDATOR.is_valid(run)
    assert VALIDATOR.is_valid(mistyped), "the shipped schema does not know the flow"
    monkeypatch.syspath_prepend(str(tmp_path))
    validator = printed(capsys, str(path))
    assert validator.is_valid(run)
    assert not validator.is_valid(mistyped)
    flow["focus"] = "strong"
    assert not validator.is_valid(run)
    flow["focus"], arch["__select__"] = 1, "mine"
    assert validator.is_valid(run)
    assert validator.is_valid(read_yaml(overlay).plain())
    assert not VALIDATOR.is_valid(run)


def test_a_type_is_the_schema_of_the_values_that_the_reader_accepts() -> None:
    hints = [int, float, bool, str, list, dict, Any, int | None, Literal["a", 1] | None, tuple[int, int], int | str]
    hints += [list[float], tuple[str, ...], int | tuple[int, ...] | None, float | list[str], Literal["a"] | int]
    values = [None, True, 0, 3, 2.5, "a", "b", [], [1, 2], [1, 2, 3], [True], ["a"], [0.5], {}, {"a": 1}]
    for hint in hints:
        validator = Draft202012Validator(type_schema(hint))
        for value in values:
            try:
                check_value(value, hint)
                accepted = True
            except Mismatch:
                accepted = False
            assert validator.is_valid(value) == accepted, (hint, value)
