"""Sources of samples in a run's YAML: forms, names, strict errors with their lines, contradictions, missing files."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_wrap.config import load_run_config
from megatron_wrap.config.checks.run import check_values
from megatron_wrap.config.decode import load_resolved, write_resolved
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.data import SourceConfig, source_kind
from megatron_wrap.core.validation.paths import check_paths, check_run
from megatron_wrap.errors import ConfigError, DataError

Write = Callable[..., str]

MIXTURE = """\
  data:
    __select__: dataset
    __override__:
      train:
        - path: chats.jsonl
          weight: 3
          columns: {messages: chat}
        - path: org/name
          split: train[:90%]
          weight: 1
          streaming: true
        - {path: my_rows:rows, weight: 0.5, name: rows}
      validation:
        easy: easy.jsonl
        hard: {path: hard.parquet, samples: 100}
        both: [easy.jsonl, {path: hard.parquet, split: "train[:5]"}]
"""


def load(write_run: Write, *overrides: str, data: str = "") -> Any:
    run = write_run()
    with open(run, "a") as file:
        file.write(data)
    return load_run_config(run, [f"megatron_wrap.data.{override}" for override in overrides])


def test_a_mixture_and_evaluation_sets_are_decoded(write_run: Write, tmp_path: Path) -> None:
    config = load(write_run, data=MIXTURE)
    chats, hub, python = derived.training_sources(config)
    assert chats == SourceConfig(path="chats.jsonl", name="chats", weight=3.0, columns={"messages": "chat"})
    assert hub == SourceConfig(path="org/name", name="name", split="train[:90%]", weight=1.0, streaming=True)
    assert (python.name, python.weight, python.kind, hub.kind, chats.kind) == ("rows", 0.5, "python", "hub", "file")
    sets = derived.validation_sources(config)
    assert {name: [source.path for source in sources] for name, sources in sets.items()} == {
        "easy": ["easy.jsonl"],
        "hard": ["hard.parquet"],
        "both": ["easy.jsonl", "hard.parquet"],
    }
    assert sets["hard"][0].samples == 100
    check_values(config)
    assert pickle.loads(pickle.dumps(config)) == config
    write_resolved(config, tmp_path / "resolved.yaml")
    assert load_resolved(tmp_path / "resolved.yaml") == config.resolved
    assert config.resolved["megatron_wrap"]["data"]["train"][0]["columns"] == {"messages": "chat"}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train=a.jsonl", [SourceConfig(path="a.jsonl", name="a")]),
        ("train={path: a.jsonl.gz, name: mine}", [SourceConfig(path="a.jsonl.gz", name="mine")]),
        ("train.path=data/a.parquet", [SourceConfig(path="data/a.parquet", name="a")]),
        ("train=[a.jsonl, b/a]", [SourceConfig(path="a.jsonl", name="a"), SourceConfig(path="b/a", name="a-2")]),
        ("train={path: a.jsonl, weight: null, format: text}", [SourceConfig(path="a.jsonl", name="a", format="text")]),
        ("train=null", []),
    ],
)  # fmt: skip
def test_forms_of_a_training_set(write_run: Write, override: str, expected: list[SourceConfig]) -> None:
    assert list(load(write_run, "__select__=jsonl", override).data.train) == expected


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("weight: 3", "weigth: 3", ["run.yaml:27", "data.train[0].weigth", "did you mean weight?"]),
        ("weight: 3", "weight: 0", ["run.yaml:27", "data.train[0].weight", "above 0", "0.0"]),
        ("weight: 3", "weight: yes", ["run.yaml:27", "data.train[0].weight", "a number", "'yes'"]),
        ("split: train[:90%]", "split: [a]", ["run.yaml:30", "data.train[1].split", "a string"]),
        ("{messages: chat}", "{messages: 3}", ["run.yaml:28", "data.train[0].columns"]),
        ("path: org/name", "subset: org/name", ["data.train[1]", "path"]),
        ("weight: 3", "format: mesages", ["run.yaml:27", "data.train[0].format", "messages", "sharegpt"]),
        ("easy: easy.jsonl", "easy: 3", ["run.yaml:35", "data.validation.easy", "3"]),
        ("samples: 100", "sampels: 100", ["run.yaml:36", "data.validation.hard.sampels", "did you mean samples?"]),
        ('split: "train[:5]"', "weigt: 1", ["data.validation.both[1].weigt", "did you mean weight?"]),
    ],
)
def test_a_mistake_is_named_with_its_line_and_path(write_run: Write, old: str, new: str, words: list[str]) -> None:
    assert old in MIXTURE
    with pytest.raises(ConfigError) as raised:
        load(write_run, data=MIXTURE.replace(old, new))
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_a_source_is_neither_empty_nor_a_number(write_run: Write) -> None:
    for value in ("[]", "3", "[3]", "{}"):
        with pytest.raises(ConfigError, match=r"command line megatron_wrap\.data\.train"):
            load(write_run, "__select__=dataset", f"train={value}")


def test_sources_have_no_effect_with_mock_data(write_run: Write) -> None:
    config = load(write_run, "__select__=mock", "train=a.jsonl")
    assert derived.training_sources(config) == ()
    with pytest.raises(ConfigError, match=r"data\.train: .* mock"):
        check_values(config)


def test_what_a_path_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "odd:name").touch()
    kinds = {
        "a.jsonl": "file",
        "org/a.jsonl": "file",
        "org/name": "hub",
        "org/name.v2": "hub",
        "folder": "folder",
        "folder/name": "file",  # a misspelled file rather than the dataset of an organization called folder
        "data/*.parquet": "glob",
        "my.module:rows": "python",
        "odd:name": "file",
        "name": "file",
        "/a/b": "file",
    }
    assert {path: source_kind(path) for path in kinds} == kinds


def test_missing_files_are_refused_before_the_run(write_run: Write, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "empty").mkdir()
    for value, words in (
        ("[train.jsonl, tarin.jsonl]", ["'tarin.jsonl'", "did you mean train.jsonl?"]),
        ("empty", ["'empty'"]),
        ("'*.parquet'", ["'*.parquet'"]),
    ):
        config = load(write_run, "__select__=dataset", f"train={value}")
        with pytest.raises(DataError) as raised:
            check_run(config)
        assert all(word in str(raised.value) for word in ["megatron_wrap.data.train", *words]), str(raised.value)
    check_paths(load(write_run, "__select__=dataset", "train=[train.jsonl, org/name, 'm:f', '*.jsonl']"))
