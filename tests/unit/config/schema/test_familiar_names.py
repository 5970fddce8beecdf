"""Names of transformers, trl and axolotl: none is missing, each is a key of ours, and messages name it."""

import dataclasses
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from megatron_wrap.cli.main import main
from megatron_wrap.config import load_run_config
from megatron_wrap.config.reading.tree import shipped_schema
from megatron_wrap.config.schema.familiar_names import Counterpart, familiar_advice, libraries
from megatron_wrap.errors import ConfigError, MegatronWrapError
from megatron_wrap.flow import MegatronWrapFlowEntry
from megatron_wrap.flow.contract.config import decode_flow_config

ROOT = Path(__file__).parents[4]
RUN = str(ROOT / "configs" / "tiny-llama-mock.yaml")


@pytest.fixture(scope="module")
def known_keys() -> set[str]:
    """Dotted path of every key of a run, from the shipped schema; those of flows and of sources included."""
    defs = json.loads(shipped_schema().read_text(encoding="utf-8"))["$defs"]
    prefix, flows = "keys-of-", "keys-of-flow-"
    keys = set()
    for name, keys_of in defs.items():
        if name.startswith(prefix):
            path = "megatron_wrap.flow" if name.startswith(flows) else name.removeprefix(prefix)
            keys |= {f"{path}.{key}" for key in keys_of["properties"]}
        if "__select__" in keys_of.get("properties", {}):
            keys.add(f"{name}.__select__")
    keys |= {f"megatron_wrap.data.train.{key}" for key in defs["source"]["properties"]}
    (reference,) = (form for form in defs["reference-model"]["anyOf"] if "properties" in form)
    return keys | {f"megatron_wrap.models.reference.{key}" for key in reference["properties"]}


ROWS = [(library, name) for library, names in libraries().items() for name in names]


def test_each_key_exists_and_each_name_without_one_has_a_reason(known_keys: set[str]) -> None:
    for library, name in ROWS:
        counterpart = libraries()[library][name]
        assert counterpart.key in known_keys if counterpart.key else counterpart.note, (library, name)


def test_a_name_stands_in_one_table() -> None:
    assert len({name for _, name in ROWS}) == len(ROWS)
    assert all(name == name.casefold() and "-" not in name for _, name in ROWS)


@pytest.mark.transformers
def test_every_field_of_trl_and_transformers_has_a_row() -> None:
    trl, transformers = importlib.import_module("trl"), importlib.import_module("transformers")
    assert {field.name for field in dataclasses.fields(transformers.TrainingArguments)} <= set(
        libraries()["transformers"]
    )
    for config in (trl.SFTConfig, trl.DPOConfig, trl.GRPOConfig, trl.ModelConfig, trl.ScriptArguments):
        names = {field.name for field in dataclasses.fields(config)}
        assert names <= {*libraries()["transformers"], *libraries()["trl"]}, config.__name__
        assert len(names) > 5


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("learning_rate", "megatron_lm.train.learning-rate.lr"),
        ("gradient_checkpointing", "megatron_lm.train.recompute.__select__"),
        ("per_device_train_batch_size", "megatron_lm.train.common.micro_batch_size"),
        ("num_train_epochs", "megatron_lm.train.common.train_epochs"),
        ("max_seq_length", "megatron_lm.train.common.seq_length"),
        ("--Max-Steps", "megatron_lm.train.common.train_iters"),
        ("sequence_len", "megatron_lm.train.common.seq_length"),
        ("beta", "megatron_wrap.flow.beta"),
        ("lora_r", "megatron_wrap.adapter.r"),
    ],
)
@pytest.mark.parametrize(
    "path",
    [
        *("{}", "args.{}", "train.{}", "megatron_lm.{}", "megatron_lm.train.{}", "megatron_lm.train.common.{}"),
        *("megatron_lm.model.arch.{}", "megatron_wrap.data.{}", "megatron_wrap.data.train.{}"),
    ],
)
def test_an_override_at_any_depth_names_our_key(name: str, key: str, path: str) -> None:
    override = f"{path.format(name)}=1"
    with pytest.raises(ConfigError) as refusal:
        load_run_config(RUN, [override, "megatron_wrap.data.train.path=a"] if "data.train" in path else [override])
    assert key in str(refusal.value)


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("megatron_lm:\n", "learning_rate: 1.0e-5\nmegatron_lm:\n", "run.yaml:1 learning_rate: "),
        ("megatron_lm:\n", "args: {a: {learning_rate: 1.0e-5}}\nmegatron_lm:\n", "run.yaml:1 args: "),
        ("      lr: ", "      learning_rate: ", "megatron_lm.train.learning-rate.learning_rate: "),
        ("    common:\n", "    common:\n      learning_rate: 1\n", "megatron_lm.train.common.learning_rate: "),
        ("    __select__: minimal_mock", "    __select__: minimal_mock\n    learning_rate: 1", "flow.learning_rate: "),
    ],
)
def test_a_yaml_names_our_key_at_the_line_of_the_mistake(old: str, new: str, key: str, tmp_path: Path) -> None:
    text = Path(RUN).read_text(encoding="utf-8")
    assert old in text
    start = text.index("megatron_lm:\n")
    (tmp_path / "run.yaml").write_text(text[start:].replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ConfigError) as refusal:
        load_run_config(tmp_path / "run.yaml")
    assert key in str(refusal.value)
    assert "is megatron_lm.train.learning-rate.lr here" in str(refusal.value)


def test_a_key_of_a_flow_of_ones_own_names_our_key() -> None:
    flow = ["megatron_wrap.flow.__select__=custom", "megatron_wrap.flow.flow_key=minimal_mock"]
    config = load_run_config(RUN, [*flow, "megatron_wrap.flow.learning_rate=1"])
    with pytest.raises(ConfigError, match=r"is megatron_lm\.train\.learning-rate\.lr here"):
        decode_flow_config(MegatronWrapFlowEntry.get_flow_class("minimal_mock"), config)


def test_a_misspelled_section_is_no_argument() -> None:
    with pytest.raises(MegatronWrapError, match=r"did you mean learning-rate\?"):
        load_run_config(RUN, ["megatron_lm.train.learning_rate={lr: 1.0e-5}"])


def test_units_that_differ_are_named() -> None:
    advice = familiar_advice("per_device_train_batch_size")
    assert advice is not None
    assert "global_batch_size = micro_batch_size * accumulation steps * data-parallel size" in advice
    assert "minutes" in (familiar_advice("ddp_timeout") or "")
    assert "1 - ref_model_mixup_alpha" in (familiar_advice("ref_model_mixup_alpha") or "")
    assert familiar_advice("megatron_wrap.flow.beta") is None, "a key that another flow has is no familiar name"
    assert familiar_advice("micro_batch_size") is None


def test_explain_names_our_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", RUN, "train.learning_rate"]) == 2
    assert "transformers' learning_rate is megatron_lm.train.learning-rate.lr here" in capsys.readouterr().err
    assert main(["explain", RUN, "num_generations"]) == 2
    assert "trl's num_generations has no counterpart here" in capsys.readouterr().err


def test_the_page_has_every_name(load_script: Callable[[str], ModuleType]) -> None:
    script = load_script("familiar_names")
    page = script.page_text()
    assert all(f"| `{name}` | " in page for _, name in ROWS)
    assert len(libraries()["axolotl"]) > 50
    assert script.row("a", Counterpart(None, "why")) == ("`a`", "none", "why")
