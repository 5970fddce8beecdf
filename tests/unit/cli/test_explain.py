"""`megatron-wrap explain`, and the one way in which every command reports a mistake."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_wrap.cli.explain import explain_value
from megatron_wrap.cli.main import main
from megatron_wrap.config import load_run_config
from megatron_wrap.config.checks.run import check_configuration
from megatron_wrap.config.decode import load_tree
from megatron_wrap.errors import LayoutError

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
Explain = Callable[..., str]


@pytest.fixture
def explain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Explain:
    """The command's output for the shipped tiny run, from the root of the checkout."""
    monkeypatch.chdir(CONFIGS.parent)

    def call(*arguments: str, code: int = 0) -> str:
        assert main(["explain", "configs/tiny-llama-sft.yaml", *arguments]) == code
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    return call


def line_of(path: str, start: str) -> str:
    """`path:line` of the one line below the root of the checkout that begins so."""
    lines = (CONFIGS.parent / path).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.strip().startswith(start)]
    return f"{path}:{number}"


def test_a_key_has_its_value_type_meaning_and_every_origin(explain: Explain) -> None:
    lr = "megatron_lm.train.learning-rate.lr"
    run, default = "configs/tiny-llama-sft.yaml", "configs/nest/megatron_lm/train/learning-rate.yaml"
    facts = explain(lr, f"{lr}=3e-4").splitlines()
    origins = [f"over {line_of(run, 'lr: ')} (override): 0.002", f"over {line_of(default, 'lr: ')} (default): null"]
    expected = [f"{lr} = 0.0003", "a number, at least 0", "Peak learning rate", "command line: 0.0003", *origins]
    assert [fact in line for fact, line in zip(expected, facts, strict=True)] == [True] * 6


def test_a_key_of_megatron_core_has_megatron_core_s_meaning(explain: Explain) -> None:
    name, kind, meaning = explain(key := "megatron_lm.model.arch.qk_l2_norm").splitlines()
    assert "not set" in name
    assert "bool (Megatron-Core's TransformerConfig, default False)" in kind
    assert "qk L2 norm" in meaning
    assert explain(key, f"{key}=true").startswith(f"{key} = true\n")


def test_a_key_of_a_flow_has_its_comment(explain: Explain) -> None:
    lines = explain("megatron_wrap.flow.collate_type").splitlines()
    assert "a string" in lines[1]
    assert "pad to the longest sequence" in lines[2]


def test_a_comment_above_a_key_counts_too(write_overlay: Callable[[str], str]) -> None:
    run = write_overlay("# The whole file.\nflow_key: a:B\n# How strong\n# it pulls.\nbeta: 0.1\nname: 'a # b'\n")
    tree = load_tree(run)
    assert explain_value(tree, "megatron_wrap.flow.beta").doc == "How strong it pulls."
    assert explain_value(tree, "megatron_wrap.flow.flow_key").doc.startswith("Registered flow")
    assert explain_value(tree, "megatron_wrap.flow.name").doc == ""


@pytest.fixture
def write_overlay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A run whose flow is a file of its own overlay, with the text passed."""
    monkeypatch.chdir(tmp_path)

    def write(flow: str) -> str:
        text = (CONFIGS / "tiny-llama-mock.yaml").read_text().replace("minimal_mock", "my_flow")
        (tmp_path / "run.yaml").write_text(text)
        (tmp_path / "nest/megatron_wrap/flow").mkdir(parents=True)
        (tmp_path / "nest/megatron_wrap/flow/my_flow.yaml").write_text(flow)
        return "run.yaml"

    return write


def test_a_section_and_the_whole_tree_are_tables(explain: Explain) -> None:
    section = explain("megatron_wrap.data").splitlines()
    assert section[0].split() == [
        *("megatron_wrap.data.data_key", "=", "jsonl", "#"),
        *("configs/nest/megatron_wrap/data/jsonl.yaml:3", "(selected)"),
    ]
    assert len({line.index("  # ") if "  # " in line else 0 for line in section}) <= 2
    whole = explain().splitlines()
    assert set(section) != set(whole)
    num_values = len(load_run_config(CONFIGS / "tiny-llama-sft.yaml").origins)
    assert {line.partition(" = ")[0].rpartition(".")[2] for line in whole[num_values:]} == {
        *("apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion")  # set by no file
    }
    assert all(re.match(r"megatron_(lm|wrap)\.\S+ = .*  # \S+", line) for line in whole)


def test_values_that_the_machine_and_the_layout_choose(explain: Explain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    optimizer, queues = "use_distributed_optimizer", "CUDA_DEVICE_MAX_CONNECTIONS"
    on_gpus = "megatron_wrap.init.platform=cuda"
    assert re.search(r"here: true, because .*\b2 processes", explain(optimizer, on_gpus))  # and TP 2
    assert "here: false, because " in explain(optimizer, "megatron_wrap.init.platform=cpu")
    assert "here" not in explain(optimizer, on_gpus, f"megatron_lm.train.optimizer.{optimizer}=false")
    assert explain(queues, on_gpus).startswith(f"{queues} = 1\n")
    parallel = "megatron_lm.model.parallel"
    without = (f"{parallel}.tensor_model_parallel_size=1", f"{parallel}.sequence_parallel=null")
    assert explain(queues, on_gpus, *without).startswith(f"{queues} = 32\n")
    monkeypatch.setenv(queues, "8")
    assert explain(queues, on_gpus).startswith(f"{queues} = 8\n")
    unset = explain("megatron_lm.model.arch.apply_rope_fusion", on_gpus)
    assert re.search(r"apply_rope_fusion is not set\n(.*\n)*  here: (true|false), because ", unset)
    assert "overlap_grad_reduce = null (here true)" in explain("megatron_lm.misc.ddp", on_gpus)
    monkeypatch.setenv("GPUS_PER_NODE", "many")
    assert "here: false, because no other process " in explain(optimizer, on_gpus)


def test_the_last_part_is_enough_where_it_is_unique(explain: Explain) -> None:
    assert explain("rotary_base").startswith("megatron_lm.model.arch.rotary_base = 10000.0\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["megatron_lm.train.comon.seed"], ["did you mean megatron_lm.train.common.seed?"]),
        (["truncatoin"], ["did you mean megatron_wrap.flow.truncation?"]),
        (["zzz"], ["zzz: unknown key"]),
        (["seed", "megatron_lm.train.common.sead=1"], ["command line", ".common.sead", "did you mean seed?"]),
        (["seed", "megatron_lm.train.common.seed=a"], ["command line", ".common.seed", "an integer", "'a'"]),
        (["seed", "lr"], ["one KEY", "seed, lr"]),
    ],
)
def test_a_mistake_is_one_line(explain: Explain, arguments: list[str], words: list[str]) -> None:
    (line,) = explain(*arguments, code=2).splitlines()
    assert line.startswith("error: ")
    assert all(word in line for word in words), line


def test_every_shipped_run_is_accepted_and_each_of_its_values_has_a_meaning() -> None:
    for path in sorted(CONFIGS.glob("*.yaml")):
        check_configuration(load_run_config(path))
        tree = load_tree(path)
        for key in tree.leaves():
            explanation = explain_value(tree, key)
            assert explanation.doc, key
            assert explanation.kind not in ("any value", ""), key


FLOW, TRAIN = "megatron_wrap.flow", "megatron_lm.train.common"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"{TRAIN}.train_epochs=1"], ["train_iters 200", "train_epochs 1"]),
        ([f"{TRAIN}.global_batch_size=18"], [f"{TRAIN}.global_batch_size", "micro_batch_size 4", "16 and 20"]),
        ([f"{FLOW}.loss_on=user"], [f"{FLOW}.loss_on", "assistant, last_assistant, all", "'user'"]),
        ([f"{FLOW}.label_smoothing=1"], [f"{FLOW}.label_smoothing", "below 1"]),
        ([f"{FLOW}.__select__=gpt_dpo", f"{FLOW}.loss_type=[1]"], [f"{FLOW}.loss_type", "a string or a list"]),
        ([f"{FLOW}.__select__=gpt_grpo", f"{FLOW}.max_completion_length=2.5"], ["an integer or null", "2.5"]),
        ([f"{FLOW}.__select__=custom", f"{FLOW}.flow_key=gpt_sft", f"{FLOW}.loss_off=all"], ["did you mean loss_on?"]),
    ],
)
def test_what_the_configuration_alone_contradicts_is_explained_and_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], overrides: list[str], words: list[str]
) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    assert main(["explain", "configs/tiny-llama-sft.yaml", "seed", *overrides]) == 2
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{TRAIN}.seed = 1234\n")
    (line,) = captured.err.splitlines()
    assert all(word in line for word in words), line


def test_a_layout_that_no_number_of_processes_runs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    parallel = "megatron_lm.model.parallel"
    stages = [f"{parallel}.{name}pipeline_model_parallel_size=2" for name in ("", "virtual_")]
    sizes = [f"{TRAIN}.micro_batch_size=1", f"{TRAIN}.global_batch_size=3"]
    interleaved = load_run_config("configs/tiny-llama-mock.yaml", [*stages, *sizes])
    with pytest.raises(LayoutError, match="a multiple of 2 micro-batches"):
        check_configuration(interleaved)


def test_a_key_names_the_line_that_another_selection_leaves_out(explain: Explain) -> None:
    text = explain("megatron_wrap.data.train", "megatron_wrap.data.__select__=none")
    assert text.startswith("megatron_wrap.data.train = null\n")
    line = line_of("configs/tiny-llama-sft.yaml", "train: ")
    assert f"  left out {line} (for jsonl): examples/data/generated/train.jsonl\n" in text
    table = explain("megatron_wrap.data", "megatron_wrap.data.__select__=none")
    assert re.search(rf"left out: megatron_wrap\.data\.train = \S+ +# {re.escape(line)} \(for jsonl\)", table)


def test_the_modules_of_an_adapter_are_listed_after_its_section(explain: Explain) -> None:
    """The numbers of peft's print_trainable_parameters, as far as the vocabulary is known without a tokenizer."""
    lora = ("megatron_wrap.adapter.__select__=lora", "megatron_wrap.adapter.target_modules=[q_proj, down_proj]")
    lines = explain("megatron_wrap.adapter", *lora, "megatron_wrap.adapter.rank_pattern={layers.0.self_attn.q_proj: 2}")
    first, *kinds = lines.splitlines()[-4:]
    trainable = 2 * (256 + 256) + 8 * 3 * (256 + 256) + 8 * 4 * (704 + 256)
    assert re.search(rf"LoRA on 8 modules \(down_proj, q_proj\).* {trainable:,}", first)
    numbers = [re.findall(r"^\w+|[\d,]+\d|\d", kind) for kind in kinds]
    assert numbers == [
        *(["q_proj", "1", "2", "1,024"], ["down_proj", "4", "8", "30,720"], ["q_proj", "3", "8", "12,288"])
    ]
    known = explain("megatron_wrap.adapter", *lora, "megatron_lm.model.arch.vocab_size=4096")
    assert "trainable params: 47,104 || all params: 5,095,680 || trainable%: 0.9244" in known
    assert "LoRA on" not in explain("megatron_wrap.adapter")
    wrong = explain("seed", lora[0], "megatron_wrap.adapter.exclude_modules=[q_prj]", code=2)
    assert wrong.startswith("error: megatron_wrap.adapter.exclude_modules: q_prj ")
