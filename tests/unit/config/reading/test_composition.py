"""Strict reading: values are those that confignest composes, and errors name the location and what to do."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from _messages import assert_facts
from confignest import ConfigNest

from megatron_wrap.config.decode import load_tree
from megatron_wrap.config.reading import tree
from megatron_wrap.config.reading.tree import shipped_root
from megatron_wrap.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[4] / "configs"
FLOWS = ", ".join(sorted(path.stem for path in (CONFIGS / "nest/megatron_wrap/flow").glob("*.yaml")))
Write = Callable[..., str]


def refusal(path: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load_tree(path, overrides)
    return str(raised.value)


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_shipped_configurations_compose_as_confignest_does(name: str) -> None:
    plain = ConfigNest(str(shipped_root()), str(CONFIGS / name)).nest_instance

    def as_dict(part: object) -> object:
        return {key: as_dict(below) for key, below in vars(part).items()} if hasattr(part, "__dict__") else part

    assert load_tree(CONFIGS / name).values == as_dict(plain)


def test_a_tree_that_changes_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "tree"
    (root / "flow").mkdir(parents=True)
    monkeypatch.setattr(tree, "shipped_root", lambda: root)

    def later(path: Path) -> None:  # than the clock of files can tell
        os.utime(path, ns=(0, os.stat(path).st_mtime_ns + 10**9))

    assert tree.open_tree(tmp_path / "run.yaml").sections() == {}
    (root / "flow/a.yaml").write_text("b: 1\n")
    later(root / "flow")
    read = tree.open_tree(tmp_path / "run.yaml")
    assert list(read.sections()) == ["flow.a"]
    assert tree.open_tree(tmp_path / "run.yaml") is read
    manifest = root / "flow" / tree.MANIFEST
    manifest.write_text("selection_mode: one\n")
    assert list(tree.open_tree(tmp_path / "run.yaml").sections()) == ["flow"]
    manifest.write_text("selection_mode: all\n")
    later(manifest)
    assert list(tree.open_tree(tmp_path / "run.yaml").sections()) == ["flow.a"]


def test_every_value_knows_the_line_that_gave_it(write_run: Write) -> None:
    tree = load_tree(write_run(), ["megatron_lm.train.common.seed=7"])
    leaves = {path: [str(origin) for origin in origins] for path, origins in tree.leaves().items()}
    nest = os.path.relpath(shipped_root()) if not os.path.relpath(shipped_root()).startswith("..") else shipped_root()
    assert leaves["megatron_lm.train.common.seq_length"][-1] == "run.yaml:13 (override)"
    assert leaves["megatron_lm.train.common.seed"][-1] == "command line"
    assert leaves["megatron_lm.model.arch.num_layers"] == [
        f"{nest}/megatron_lm/model/arch/language-model-base.yaml:4 (inherited by tiny-llama)",
        f"{nest}/megatron_lm/model/arch/tiny-llama.yaml:3 (selected)",
    ]
    assert leaves["megatron_lm.train.optimizer.optimizer"][-1].endswith("adam.yaml:5 (default selection)")


@pytest.mark.parametrize(
    ("old", "new", "facts"),
    [
        ("micro_batch_size", "micro_batch_sise", "11 train.common.micro_batch_sise: did you mean micro_batch_size?"),
        ("learning-rate:", "learning_rate:", "15 train.learning_rate: did you mean learning-rate?"),
        ("lr: 2e-4", "seq_length: 3", "16 train.learning-rate.seq_length: megatron_lm.train.common"),
        (": tiny-llama", ": tiny-lama", "4 model.arch.__select__: 'tiny-lama' did you mean tiny-llama?"),
        ("__override__:", "tensor_p: 2\n      __override__:", "7 model.parallel.tensor_p: __select__ __override__"),
        ("__override__:", "__overide__:", "7 model.parallel.__overide__: did you mean __override__? __select__"),
        (": tiny-llama", ": tiny-llama\n      llama2-7b: {num_layers: 2}", "5 model.arch.llama2-7b: tiny-llama"),
        ("  train:\n", "  train:\n    __select__: common\n", "10 train.__select__: "),
        ("lr: 2e-4", "__override__: {lr: 2e-4}", "16 train.learning-rate.__override__: "),
        ("lr: 2e-4", "__inherit__: a.yaml", "16 train.learning-rate.__inherit__: "),
        ("learning-rate:\n      lr: 2e-4\n", "learning-rate: 2e-4\n", "15 train.learning-rate: 0.0002"),
    ],
)
def test_what_a_view_may_not_say(write_run: Write, old: str, new: str, facts: str) -> None:
    line, _, facts = facts.partition(" ")
    assert_facts(refusal(write_run(old, new)), f"run.yaml:{line} megatron_lm.{facts}")


@pytest.mark.parametrize(
    ("old", "new", "location"),
    [
        ("__select__: minimal_mock", "__select__: null", "run.yaml:21 megatron_wrap.flow"),
        ("megatron_wrap:\n  flow:\n    __select__: minimal_mock\n", "", "run.yaml megatron_wrap.flow"),
        ("__select__: minimal_mock\n", "__override__: {flow_key: a}\n", "run.yaml:20 megatron_wrap.flow"),
    ],
)
def test_a_flow_has_to_be_selected(write_run: Write, old: str, new: str, location: str) -> None:
    assert_facts(refusal(write_run(old, new)), f"{location}: {{__select__: NAME}} {FLOWS}")


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ("a=1", "a: megatron_lm megatron_wrap"),
        ("megatron_wrap.flows=1", "megatron_wrap.flows: did you mean flow?"),
        ("megatron_lm.train.comon.seed=1", "megatron_lm.train.comon: did you mean common?"),
        ("megatron_lm.train.common.sed=1", "megatron_lm.train.common.sed: did you mean seed?"),
        ("megatron_lm.train.common=1", "megatron_lm.train.common: megatron_lm.train.common.micro_batch_size"),
        ("megatron_lm.train=1", "megatron_lm.train: names a folder; add one of common, dtype, learning-rate"),
        ("megatron_lm.train.common.seed", "megatron_lm.train.common.seed: a.b.c"),
        ("=1", "=1: a.b.c"),
        ("a..b=1", "a..b=1: a.b.c"),
        ("megatron_wrap.flow.__select__=x", "megatron_wrap.flow.__select__: 'x'"),
        ("megatron_lm.train.common.seed=[1", "megatron_lm.train.common.seed: YAML syntax error"),
    ],
)
def test_what_the_command_line_may_not_say(write_run: Write, override: str, facts: str) -> None:
    assert_facts(refusal(write_run(), override), f"command line {facts}")


def test_the_command_line_comes_last_and_selects(write_run: Write) -> None:
    tree = load_tree(
        write_run(),
        [
            "megatron_lm.train.common.seq_length=64",
            "megatron_lm.train.common.seq_length=32",
            "megatron_lm.model.parallel.tensor_model_parallel_size=2",
            "megatron_lm.model.arch.__override__.num_layers=2",
            "megatron_wrap.flow.__select__=gpt_sft",
            "megatron_wrap.data.__select__=jsonl",
            "megatron_wrap.data.validation.one=a.jsonl",
            "megatron_wrap.data.validation.two=b.jsonl",
            "megatron_wrap.logger.wandb_name=a = b",
        ],
    )
    assert tree.values["megatron_lm"]["train"]["common"]["seq_length"] == 32
    assert tree.values["megatron_lm"]["model"]["parallel"]["tensor_model_parallel_size"] == 2
    assert tree.values["megatron_lm"]["model"]["arch"]["num_layers"] == 2
    assert tree.values["megatron_wrap"]["flow"]["flow_key"] == "gpt_sft"
    assert tree.values["megatron_wrap"]["data"]["validation"] == {"one": "a.jsonl", "two": "b.jsonl"}
    assert tree.values["megatron_wrap"]["logger"]["wandb_name"] == "a = b"


def test_a_selected_file_may_be_overridden_inline(write_run: Write) -> None:
    tree = load_tree(write_run("__select__: tiny-llama", "__select__: tiny-llama\n      tiny-llama: {num_layers: 2}"))
    assert tree.values["megatron_lm"]["model"]["arch"]["num_layers"] == 2
    both = "__select__: tiny-llama\n      tiny-llama: {num_layers: 2}\n      __override__: {num_layers: 3}"
    assert_facts(
        refusal(write_run("__select__: tiny-llama", both)),
        "run.yaml:5 megatron_lm.model.arch.tiny-llama.num_layers: also set by __override__ at run.yaml:6; keep one",
    )


SOURCES = "{{train: a.jsonl, validation: b.jsonl, tokenizer: folder}}"
DATA = f"  data:\n    __select__: dataset\n    {{form}}: {SOURCES}\n  flow:\n"
OPTIONS = "gpt_sft\n    __override__: {truncation: left, packing: true, label_smoothing: 0.1}\n"


@pytest.mark.parametrize("form", ["__override__", "dataset"])
def test_keys_of_the_file_that_the_command_line_does_not_select_are_left_out(write_run: Write, form: str) -> None:
    run = write_run("  flow:\n", DATA.format(form=form), "minimal_mock\n", OPTIONS)
    tree = load_tree(run, ["megatron_wrap.data.__select__=none", "megatron_wrap.flow.__select__=gpt_pretrain"])
    data, flow = tree.values["megatron_wrap"]["data"], tree.values["megatron_wrap"]["flow"]
    assert (data["train"], data["validation"], data["tokenizer"]) == (None, None, "folder")
    assert flow == {"flow_key": "gpt_pretrain", "packing": True, "label_smoothing": 0.1, "z_loss_coefficient": 0.0}
    assert {path: str(origin) for path, origin in tree.left_out().items()} == {
        "megatron_wrap.data.train": "run.yaml:22 (for dataset)",
        "megatron_wrap.data.validation": "run.yaml:22 (for dataset)",
        "megatron_wrap.flow.truncation": "run.yaml:25 (for gpt_sft)",
    }
    kept = load_tree(run, ["megatron_wrap.data.__select__=jsonl"])
    assert kept.values["megatron_wrap"]["data"]["train"] == "a.jsonl"
    assert not kept.left_out()
    misspelled = write_run("  flow:\n", DATA.format(form=form).replace("train", "trian"))
    message = refusal(misspelled, "megatron_wrap.data.__select__=none")
    assert_facts(message, "run.yaml:22 megatron_wrap.data.trian: unknown key; did you mean train?")


def test_another_flow_on_the_command_line_replaces_a_flow_of_one_s_own(write_run: Write) -> None:
    run = write_run("minimal_mock\n", "custom\n    __override__: {flow_key: my.module:MyFlow, gamma: 2.0}\n")
    tree = load_tree(run, ["megatron_wrap.flow.__select__=minimal_mock"])
    assert tree.values["megatron_wrap"]["flow"]["flow_key"] == "minimal_mock"
    assert sorted(tree.left_out()) == ["megatron_wrap.flow.flow_key", "megatron_wrap.flow.gamma"]


def test_another_file_on_the_command_line_keeps_keys_whose_needs_the_run_meets(write_run: Write) -> None:
    run = write_run("tiny-llama\n", "tiny-mixtral\n      __override__: {moe_ffn_hidden_size: 64, num_layers: 2}\n")
    arch = "megatron_lm.model.arch"
    dense = load_tree(run, [f"{arch}.__select__=tiny-llama"])
    assert list(dense.left_out()) == [f"{arch}.moe_ffn_hidden_size"]
    assert dense.values["megatron_lm"]["model"]["arch"]["num_layers"] == 2
    assert not load_tree(run, [f"{arch}.__select__=tiny-llama", f"{arch}.num_experts=4"]).left_out()


def test_an_empty_section_overrides_nothing(write_run: Write) -> None:
    tree = load_tree(write_run("      lr: 2e-4\n", "      # lr: 2e-4\n"))
    assert tree.values["megatron_lm"]["train"]["learning-rate"]["lr"] is None


def test_a_nest_beside_the_yaml_is_laid_over_the_tree(write_run: Write, write_nest: Callable[..., Path]) -> None:
    write_nest("megatron_wrap/flow/my_flow.yaml", "flow_key: my.module:MyFlow\nbeta: 0.1\nnested: {a: 1, b: 2}\n")
    write_nest("megatron_lm/model/arch/mine.yaml", "__inherit__: tiny-llama.yaml\nnum_layers: 2\n")
    write_nest("megatron_lm/model/arch/tiny-llama.yaml", "__inherit__: llama-base.yaml\nhidden_size: 64\n")
    run = write_run("minimal_mock", "my_flow\n    __override__: {nested: {b: 3}}", ": tiny-llama", ": mine")
    tree = load_tree(run)
    assert tree.values["megatron_wrap"]["flow"] == {
        "flow_key": "my.module:MyFlow",
        "beta": 0.1,
        "nested": {"a": 1, "b": 3},
    }
    arch = tree.values["megatron_lm"]["model"]["arch"]
    assert (arch["num_layers"], arch["hidden_size"], arch["normalization"]) == (2, 64, "RMSNorm")
    sources = {path: str(origins[-1]) for path, origins in tree.leaves().items()}
    assert sources["megatron_wrap.flow.beta"] == "nest/megatron_wrap/flow/my_flow.yaml:2 (selected, overlay)"
    assert sources["megatron_lm.model.arch.hidden_size"] == (
        "nest/megatron_lm/model/arch/tiny-llama.yaml:2 (inherited by mine, overlay)"
    )
    assert_facts(refusal(run, "megatron_wrap.flow.nested.c=1"), "command line megatron_wrap.flow.nested.c: unknown key")
    assert_facts(refusal(run, "megatron_wrap.flow.nested=1"), "nested: a mapping is expected, not the integer 1")


ARCH = "nest/megatron_lm/model/arch"
CYCLE = {"a.yaml": "__inherit__: b.yaml", "b.yaml": "__inherit__: c.yaml", "c.yaml": "__inherit__: b.yaml"}
UNKNOWN_DEFAULT = "selection_mode: one\nif_no_selection: default\ndefault_selection: z"


@pytest.mark.parametrize(
    ("files", "facts"),
    [
        (CYCLE, f"{ARCH}/c.yaml:1 megatron_lm.model.arch.__inherit__: b.yaml c.yaml"),
        ({"a.yaml": "__inherit__: a.yaml"}, f"{ARCH}/a.yaml:1 megatron_lm.model.arch.__inherit__: a.yaml"),
        ({"a.yaml": "__inherit__: tiny-lama.yaml"}, f"{ARCH}/a.yaml:1: 'tiny-lama.yaml' did you mean tiny-llama.yaml?"),
        ({"a.yaml": ""}, f"{ARCH}/a.yaml: "),
        ({"a.yaml": "x: 1", "b.yml": "x: 1"}, f"{ARCH}/b.yml: .yaml"),
        ({"a.yaml": "x: 1", "tiny-llama/b.yaml": "x: 1"}, f"{ARCH}/tiny-llama: "),
        ({"a.yaml": "", "../../train/comon.yaml": "x: 1"}, "nest/megatron_lm/train/comon.yaml: did you mean common?"),
        ({"__confignest_manifest__": "selection_mode: won"}, f"{ARCH}/__confignest_manifest__:1 selection_mode: 'won'"),
        ({"a.yaml": "", "__confignest_manifest__": UNKNOWN_DEFAULT}, f"{ARCH}/__confignest_manifest__: 'z'"),
    ],
)
def test_what_an_overlay_may_not_hold(
    write_run: Write, write_nest: Callable[..., Path], files: dict[str, str], facts: str
) -> None:
    for name, text in files.items():
        write_nest(f"megatron_lm/model/arch/{name}", text)
    assert_facts(refusal(write_run(": tiny-llama", ": a")), facts)
