"""Decoding: strict types, shipped files against published shapes, further keys, retired keys, the resolved tree."""

import copy
import dataclasses
import operator
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from _messages import assert_facts

from megatron_wrap.config import load_resolved, load_run_config, write_resolved
from megatron_wrap.config.reading.tree import shipped_root
from megatron_wrap.config.schema.upstream import retired_keys
from megatron_wrap.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
Write = Callable[..., str]
OLD_MOCK = """
megatron_lm:
  model:
    arch: {__select__: llama2-7b}
    parallel:
      __select__: base
      __override__:
        {tensor_model_parallel_size: 4, pipeline_model_parallel_size: 1, context_parallel_size: 2}
  train:
    common:
      {micro_batch_size: 4, global_batch_size: 32, seq_length: 512, train_iters: 16, load: ckpt/llama-2-7b-mcore-tp4pp1,
       save: ckpt/llama2-7b-minimal-mock-save, save_interval: 8}
    learning-rate: {lr: 5.0e-4, lr_warmup_fraction: 0.05}
megatron_wrap:
  init: {megatron_lm_project_path: megatron_lm_core_080, skip_compile_dependencies: true}
  logger:
    {patch_print: true, remove_logging: true, enable_wandb: true, wandb_project: megatron-wrap-llama2-7b-minimal-mock}
  model_provider:
    __select__: gpt_model
    __override__: {show_weight_details: true}
  flow: {__select__: minimal_mock}
"""


def refusal(path: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load_run_config(path, overrides)
    return str(raised.value)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_configuration_loads(path: Path) -> None:
    assert load_run_config(path).name == path.stem


@pytest.mark.parametrize(
    "file",
    # bases leave sizes open, hugging-face leaves them to a folder
    [
        path
        for path in sorted(shipped_root().rglob("*.yaml"))
        if not re.search("(-base|custom|hugging-face)$", path.stem)
    ],
    ids=lambda path: path.stem,
)
def test_every_file_of_the_tree_decodes(file: Path, write_run: Write) -> None:
    section = ".".join(file.relative_to(shipped_root()).parent.parts)
    in_a_selection = (file.parent / "__confignest_manifest__").is_file()
    load_run_config(write_run(), [f"{section}.__select__={file.stem}"] if in_a_selection else [])


SELECT = "megatron_lm.model.arch.__select__"


@pytest.mark.parametrize(
    ("selected", "key"),
    [
        *[(f"{SELECT}={base}", "megatron_lm.model.arch.num_layers") for base in ("llama-base", "gpt2-base")],
        (f"{SELECT}=language-model-base", "megatron_lm.model.arch.num_layers"),
        ("megatron_wrap.flow.__select__=custom", "megatron_wrap.flow.flow_key"),
    ],
)
def test_a_base_is_not_selected_by_accident(selected: str, key: str, write_run: Write) -> None:
    section = key.rpartition(".")[0]
    message = refusal(write_run(), selected)
    assert_facts(message, f"run.yaml {key}: {section}.__override__ ({selected.partition('=')[2]}")
    missing = refusal(write_run("      lr: 2e-4\n", ""))
    assert_facts(missing, "run.yaml megatron_lm.train.learning-rate.lr: not given")


def test_a_flow_of_one_s_own_has_any_keys(write_run: Write) -> None:
    run = write_run("__select__: minimal_mock", "__select__: custom")
    config = load_run_config(run, ["megatron_wrap.flow.flow_key=a.b:C", "megatron_wrap.flow.beta=0.5"])
    assert config.flow.options == {"beta": 0.5}
    assert config.undeclared == {"megatron_wrap.flow.beta"}
    assert_facts(refusal(run, "megatron_wrap.flow.beta=0.5"), "command line megatron_wrap.flow.beta: flow_key")


@pytest.mark.transformers
@pytest.mark.parametrize(
    ("name", "class_name", "settings", "renamed"),
    [
        ("llama2-7b", "LlamaConfig", {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}, {}),
        ("gpt2-124m", "GPT2Config", {}, {"intermediate_size": 3072}),
    ],
)
def test_shapes_are_those_of_the_defaults_of_transformers(
    name: str, class_name: str, settings: Mapping[str, Any], renamed: Mapping[str, Any], write_run: Write
) -> None:
    import transformers

    published = getattr(transformers, class_name)(**settings)
    arch = load_run_config(write_run(), [f"megatron_lm.model.arch.__select__={name}"]).arch
    theirs = {**published.to_dict(), **renamed}
    assert arch.num_layers == published.num_hidden_layers
    assert arch.hidden_size == published.hidden_size
    assert arch.ffn_hidden_size == theirs["intermediate_size"]
    assert arch.num_attention_heads == published.num_attention_heads
    assert arch.vocab_size == published.vocab_size
    assert arch.max_position_embeddings == published.max_position_embeddings
    assert arch.norm_epsilon == (theirs.get("rms_norm_eps") or theirs["layer_norm_epsilon"])
    assert arch.untie_embeddings_and_output_weights is not published.tie_word_embeddings
    assert arch.init_method_std == published.initializer_range


ARCH, DDP, RATE = "megatron_lm.model.arch", "megatron_lm.misc.ddp", "megatron_lm.train.learning-rate"


@pytest.mark.parametrize(
    ("override", "section", "expected"),
    [
        ("train.common.rampup_batch_size=[4, 2, 100]", "train.rampup_batch_size", (4, 2, 100)),
        ("model.arch.num_experts=4", "arch.num_experts", 4),
        ("model.arch.moe_aux_loss_coeff=1e-2", "arch.moe_aux_loss_coeff", 0.01),
        ("model.arch.moe_layer_freq=[0, 1, 1, 1]", "arch.moe_layer_freq", (0, 1, 1, 1)),
        ("model.arch.moe_input_jitter_eps=1e-2", "arch.upstream", {"moe_input_jitter_eps": 0.01}),
        ("model.arch.attention_backend=unfused", "arch.upstream", {"attention_backend": "unfused"}),
        ("model.arch.window_size=[128, 0]", "arch.window_size", (128, 0)),
        ("model.arch.num_query_groups=null", "arch.num_query_groups", None),
        ("train.learning-rate.lr=1", "learning_rate.lr", 1.0),
        ("train.optimizer.decoupled_weight_decay=false", "optimizer.upstream", {"decoupled_weight_decay": False}),
        ("misc.ddp.average_in_collective=true", "ddp.upstream", {"average_in_collective": True}),
    ],
)
def test_values_of_the_right_type(write_run: Write, override: str, section: str, expected: object) -> None:
    value = operator.attrgetter(section)(load_run_config(write_run(), [f"megatron_lm.{override}"]))
    assert (value, type(value)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("value", "sets"),
    [("null", {}), ("a.jsonl", {"validation": "a.jsonl"}), ("{one: a, two: b}", {"one": "a", "two": "b"})],
)
def test_evaluation_sets(write_run: Write, value: str, sets: Mapping[str, str]) -> None:
    actual = load_run_config(write_run(), [f"megatron_wrap.data.validation={value}"]).data.validation
    assert {name: [source.path for source in sources] for name, sources in actual.items()} == {
        name: [path] for name, path in sets.items()
    }


def test_options_of_a_flow_have_the_type_of_the_file(write_run: Write, write_nest: Callable[..., Path]) -> None:
    write_nest("megatron_wrap/flow/mine.yaml", "flow_key: a.b:C\nbeta: 0.1\nname: null\nsteps: 3\nlayers: {a: true}\n")
    run = write_run("minimal_mock", "mine")
    options = load_run_config(run, ["megatron_wrap.flow.beta=2", "megatron_wrap.flow.name=x"]).flow.options
    assert options == {"beta": 2.0, "name": "x", "steps": 3, "layers": {"a": True}}
    assert type(options["beta"]) is float
    for override, facts in (("steps=a", "an integer, not the string 'a'"), ("layers.a=1", "not the integer 1")):
        message = refusal(run, f"megatron_wrap.flow.{override}")
        assert f"flow.{override.partition('=')[0]}: " in message
        assert facts in message


def test_a_file_of_an_overlay_may_lack_keys_with_a_default(write_run: Write, write_nest: Callable[..., Path]) -> None:
    """A tree that was written before a key existed loads, and an override may set the key."""
    path = write_nest("megatron_wrap/init.yaml", "platform: cpu\n")
    init = load_run_config(write_run()).init
    assert (init.platform, init.distributed_timeout_minutes) == ("cpu", 10.0)
    given = load_run_config(write_run(), ["megatron_wrap.init.distributed_timeout_minutes=3"]).init
    assert given == dataclasses.replace(init, distributed_timeout_minutes=3.0)
    flow = write_nest("megatron_wrap/flow/custom.yaml", "option: 1\n")
    assert_facts(refusal(write_run("minimal_mock", "custom")), f"{flow.name} megatron_wrap.flow.flow_key: missing")
    flow.unlink()
    path.write_text("platform: cpu\ndistributed_timeout_minutes: 1\nplatfrom: cpu\n")
    assert_facts(
        refusal(write_run()), "nest/megatron_wrap/init.yaml:3 megatron_wrap.init.platfrom: did you mean platform?"
    )


def test_the_documented_example_reads_but_for_its_retired_keys(write_run: Write) -> None:
    retired = "{megatron_lm_project_path: megatron_lm_core_080, skip_compile_dependencies: true}"
    for left in (retired, "{skip_compile_dependencies: true}"):
        message = refusal(write_run(retired, left, text=OLD_MOCK))
        assert_facts(message, f"run.yaml:15 megatron_wrap.init.{left[1:].partition(':')[0]}: delete this key")
    old = load_run_config(write_run(retired, "{}", text=OLD_MOCK))
    shipped = load_run_config(CONFIGS / "llama2-7b-minimal-mock.yaml")
    for section in ("arch", "parallel", "learning_rate", "logger", "model_provider", "flow", "dtype"):
        assert getattr(old, section) == getattr(shipped, section)
    assert dataclasses.replace(old.train, load=None) == shipped.train


def test_no_retired_key_is_a_living_one(write_run: Write) -> None:
    leaves = {path.rpartition(".")[2] for path in load_run_config(write_run()).origins}
    assert not leaves & set(retired_keys())


def test_the_resolved_tree_reads_back_equal(write_run: Write, tmp_path: Path) -> None:
    config = load_run_config(
        write_run(),
        ["megatron_wrap.data.validation={a: 1e-4.jsonl}", "megatron_wrap.logger.wandb_name='2e-4'"],
    )
    write_resolved(config, tmp_path / "resolved.yaml")
    text = (tmp_path / "resolved.yaml").read_text()
    assert load_resolved(tmp_path / "resolved.yaml") == config.resolved == yaml.safe_load(text)
    assert "      seq_length: 128  # run.yaml:13 (override)\n" in text
    assert "    wandb_name: '2e-4'  # command line\n" in text


def test_a_configuration_crosses_process_borders(write_run: Write) -> None:
    config = load_run_config(write_run())
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
    assert dataclasses.asdict(config)["train"]["seq_length"] == 128
