"""YAML with positions, against PyYAML and Python's own numbers."""

import math
import os
from pathlib import Path

import pytest
import yaml

from megatron_wrap.config.reading.yaml_nodes import dump_yaml, inline_yaml, read_value, read_yaml
from megatron_wrap.errors import ConfigError


@pytest.mark.parametrize("text", ["2e-4", "1e5", "5.0e-4", ".5", "1.", "-3.5E+2", "6.02e23"])
def test_numbers_with_an_exponent_are_floats(text: str) -> None:
    value = read_value(text).plain()
    assert type(value) is float
    assert value == float(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("0x1F", 31), ("1_000", 1000), ("010", 10), ("-7", -7), ("~", None), ("", None), ("TRUE", True)],
)
def test_other_plain_scalars(text: str, value: object) -> None:
    assert read_value(text).plain() is value or read_value(text).plain() == value


@pytest.mark.parametrize("text", ["yes", "off", "1:30", "2024-01-01", "nan", "'2e-4'"])
def test_what_stays_a_string(text: str) -> None:
    assert read_value(text).plain() == text.strip("'")


def test_positions_and_merged_keys(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("base: &base\n  a: 1\n  b: 2\nuse:\n  <<: *base\n  b: 3\n")
    use = read_yaml(path).value["use"]
    assert use.plain() == {"a": 1, "b": 3} == yaml.safe_load(path.read_text())["use"]
    assert (use.value["a"].line, use.value["b"].line) == (2, 6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a.yaml: empty; a YAML mapping (key: value lines) is expected"),
        ("# nothing\n", "a.yaml: empty; a YAML mapping (key: value lines) is expected"),
        ("- 1\n- 2\n", "a.yaml:1: a mapping (key: value lines) is expected, not the list [1, 2]"),
        ("a:1\n", "a.yaml:1: a mapping (key: value lines) is expected, not the string 'a:1'"),
        ("a: 1\nb: 2\na: 3\n", "a.yaml:3 a: set twice in a mapping, first at line 1; delete one"),
        ("a:\n\tb: 1\n", "a.yaml:2: a tab in the indentation; YAML is indented with spaces"),
        ("a: 1\nb: [1, 2\n", "a.yaml:3: YAML syntax error, column 1:"),
        ("a: 1\n  b: 2\n", "a.yaml:2: YAML syntax error, column 4: mapping values are not allowed"),
        ("1: a\n", "a.yaml:1: the key '1' is not a string; put it in quotes"),
        ("a: !!python/name:os.system\n", "a.yaml:1: the YAML tag tag:yaml.org,2002:python/name:os.system"),
        ("a: &x [*x]\n", "a.yaml:1: an alias that contains itself"),
        ("---\na: 1\n---\nb: 1\n", "a.yaml:3: YAML syntax error"),
    ],
)
def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_yaml(Path("a.yaml"))
    assert str(raised.value).startswith(message)


_ALIASES = "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 20))
_MERGES = "".join(f"a{i}: &a{i} {{<<: *a{i - 1}, k{i}: *a{i - 1}}}\n" for i in range(1, 40))
_CHAIN = "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 5000))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a0: &a0 [x]\n" + _ALIASES, "more than 200,000 values"),
        ("a0: &a0 {k: 1}\n" + _MERGES, "more than 200,000 values"),
        ("a0: &a0 [x]\n" + _CHAIN, "more than 200,000 values"),
        # seconds of PyYAML, and an alias counts as a value does
        pytest.param("a: [" + "1," * 200_000 + "]", "more than 200,000 values", marks=pytest.mark.matrix),
        ("a: " + "[" * 65 + "]" * 65, "nested more than 64 levels"),
        ("a: " + "[" * 20_000 + "]" * 20_000, "nested more than 64 levels"),
        ("a: " + "[" * 1_000_000, "nested more than 64 levels"),
        ("a: " + "{a: " * 20_000, "nested more than 64 levels"),
        ("a:\n  " + "- " * 20_000, "nested more than 64 levels"),
        ("a: " + "x" * (1 << 22), "4,194,307 bytes, more than the 4,194,304"),
    ],
    ids=["aliases", "merges", "chain", "values", "65 levels", "lists", "open lists", "mappings", "block", "bytes"],
)
def test_files_without_bounds_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_yaml(Path("a.yaml"))
    assert str(raised.value).startswith(f"a.yaml: {message}") or f"lists or mappings {message}" in str(raised.value)


def test_ordinary_depth_and_aliases_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: " + "[" * 62 + "]" * 62 + "\nb: &b [1, 2]\nc: [*b, *b]\nd: [" + "[1]," * 2000 + "]\n")
    assert read_yaml(path).plain() == yaml.safe_load(path.read_text())


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match=r"a\.yaml: is a pipe"):
        read_yaml(tmp_path / "a.yaml")


def test_a_missing_file_names_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("a: 1")
    with pytest.raises(ConfigError, match=r"^rnu.yaml: no such file; did you mean run.yaml\?$"):
        read_yaml(Path("rnu.yaml"))
    with pytest.raises(ConfigError, match=r"is a folder, not a YAML file"):
        read_yaml(tmp_path)
    Path("latin.yaml").write_bytes(b"a: \xe9\n")
    with pytest.raises(ConfigError, match=r"latin.yaml: not UTF-8 text \(byte 3\)"):
        read_yaml(Path("latin.yaml"))


def test_what_is_written_reads_back_equal_in_both_readings(tmp_path: Path) -> None:
    values = {
        "a": "2e-4",
        "b": 1e-5,
        "c": "yes",
        "d": None,
        "e": [1, "0o7"],
        "f": "null",
        "g": {"h": 1e300, "i": "ü: #"},
        "j": "a\nb: c\n",
        "": {},
        "k: l": {"m\nn": [[], {"o": [{"p": "- q"}]}], "yes": {"r" * 200: -0.0}},
        "s": ["t\nu", {"v": math.inf}],
    }
    path = tmp_path / "a.yaml"
    path.write_text(dump_yaml(values), encoding="utf-8")
    assert yaml.safe_load(path.read_text(encoding="utf-8")) == values
    assert read_yaml(path).plain() == values
    path.write_text(inline_yaml(values), encoding="utf-8")
    assert read_yaml(path).plain() == values
    assert len(inline_yaml(values).splitlines()) == 1


@pytest.mark.parametrize("value", [None, True, False, 0, -7, 10**20, 0.0, -0.0, 1e-5, 2.5, math.inf, [], {}])
def test_the_text_of_a_plain_value_is_pyyaml_s(value):
    assert f"[{inline_yaml(value)}]" == yaml.safe_dump([value], default_flow_style=True).strip()
