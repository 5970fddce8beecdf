"""`check-parity`: shipped and correct flows pass; for each wrong one the report names the mistake."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import _flow_zoo as zoo
import pytest
from _agreement import assert_layouts_agree
from _covering import EACH_AXIS, covering, each_axis_and_some, quick
from layout_runs import CONFIG, token_samples

from megatron_wrap.cli.main import main
from megatron_wrap.errors import FlowError
from megatron_wrap.testing import check_parity
from megatron_wrap.testing.layouts import DEFAULT_LAYOUTS, parse_layout


@pytest.fixture(scope="module")
def samples() -> list[dict[str, list[int]]]:
    """Two of them have loss tokens only at the start, so a context-parallel rank may have none in a micro-batch."""
    result = token_samples(16, 48)
    for sample in result[:2]:
        sample["loss_mask"] = [1] * 3 + [0] * (len(sample["loss_mask"]) - 3)
    return result


ARCH, OPTIMIZER = "megatron_lm.model.arch.", "megatron_lm.train.optimizer."
NOISE = ("megatron_lm.train.common.neftune_noise_alpha=20",)
FREEZE = "megatron_lm.train.common.freeze="
MUON = (f"{OPTIMIZER}__select__=muon", f"{OPTIMIZER}muon_ns_dtype=fp32")
"""A second step starts from weights that Muon has updated; its iteration in bf16 would magnify rounding."""
EXPERTS = (f"{ARCH}num_experts=4", f"{ARCH}moe_ffn_hidden_size=32")
LORA = tuple(f"megatron_wrap.adapter.{key}" for key in ("__select__=lora", "r=4", "loraplus_lr_ratio=2"))
SMOOTHED = tuple(f"megatron_wrap.flow.{key}" for key in ("label_smoothing=0.2", "z_loss_coefficient=0.01"))


def model(name: str, *values: str) -> tuple[str, ...]:
    """Overrides that select an architecture and change it."""
    return (f"{ARCH}__select__={name}", *(f"{ARCH}{value}" for value in values))


MIXTRAL = model("tiny-mixtral")
UNBALANCED = ("moe_router_load_balancing_type=none", "moe_aux_loss_coeff=0.0")
SCALED_QUERIES = ("query_scaling_beta=0.1", "original_max_position_embeddings=16")
LONGROPE = (
    *("rope_type=longrope", "longrope_attention_factor=1.19", f"longrope_short_factor={[1.0] * 8}"),
    f"longrope_long_factor={[1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]}",
)
AGREEING: dict[str, tuple[tuple[str, ...], str, int]] = {
    "noise on parts of a row": (NOISE, "tp2-sp cp2", 2),
    "frozen": ((f"{FREEZE}[model.embed_tokens, model.layers.0.self_attn]",), "tp2-sp dp2-dopt pp2-vpp2", 2),
    "muon, experts": ((*MUON, *EXPERTS), "tp2-sp-ep2", 2),
    "smoothing": (SMOOTHED, "tp2 packed", 1),
    "linear attention": (model("tiny-qwen3.5"), "packed-tp2-sp-cp2", 1),
    # the others have the marker matrix
    "noise": (NOISE, "packed mbs1 padded pp2", 2),
    "a frozen stage": ((f"{FREEZE}[model.embed_tokens, 'model.layers.[0-1].*']",), "pp2", 2),
    "muon, experts of stages": ((*MUON, *EXPERTS), "pp2-ep2", 2),
    "muon, adapter": ((*MUON, *EXPERTS, f"{ARCH}qk_layernorm=true", *LORA), "tp2-sp-pp2 pp2-ep2", 2),
    "linear attention on each axis": (model("tiny-qwen3.5"), " ".join(EACH_AXIS), 1),
    "sequence loss of routers": (model("tiny-deepseek-v3"), "mbs1 cp2-ep2", 1),  # independent of the micro-batch size
    "longrope": (model("tiny-llama", *LONGROPE, *SCALED_QUERIES), "packed tp2-sp pp2-vpp2 packed-tp2-sp-cp2", 1),
    "scaled queries of latent attention": (
        model("tiny-deepseek-v3", "latent_norm_epsilon=1e-6", *UNBALANCED, *SCALED_QUERIES),
        "packed tp2-sp pp2-vpp2 packed-tp2-sp-cp2",
        1,
    ),
    "sinks, windows and biases of experts": (
        model("tiny-gpt-oss", *UNBALANCED),
        "mbs1 packed pp2-vpp2 cp2-ep2 tp2-sp-ep2-etp1",
        1,
    ),
    "norms after the blocks": (model("tiny-olmo3"), "packed pp2-vpp2 packed-tp2-sp-cp2", 1),
    "norms over all heads": (model("tiny-minimax-m2", *UNBALANCED), "packed tp2-sp-ep2-etp1 cp2-ep2", 1),
    "rotary angles by window": (model("tiny-gemma3"), "packed pp2-vpp2 packed-tp2-sp-cp2", 1),
    "caps": (model("tiny-gemma2"), "packed pp2 packed-tp2-sp-cp2", 1),
}
"""Feature of a model or a step -> overrides, layouts and number of steps."""


@pytest.mark.parametrize("feature", quick(AGREEING, list(AGREEING)[:5]))
def test_a_feature_agrees_on_layouts(feature, samples, ranks):
    overrides, layouts, steps = AGREEING[feature]
    assert_layouts_agree(ranks, layouts.split(), overrides, samples, steps=steps)


MOCK = Path(__file__).parents[2] / "configs/tiny-llama-mock.yaml"
ALL = (*DEFAULT_LAYOUTS, "dp4-dopt", "pp4", "cp4", "tp2-cp2", "pp2-vpp2-dp2-dopt")


def pairs() -> list[dict[str, list[int]]]:
    """Prompts with a chosen and a rejected answer, of unequal lengths."""
    generator = random.Random(5)
    lengths = {"prompt_ids": 12, "chosen_ids": 30, "rejected_ids": 30}
    return [
        {key: [generator.randrange(500) for _ in range(generator.randint(4, most))] for key, most in lengths.items()}
        for _ in range(16)
    ]


SHIPPED = {
    "gpt_sft-1": ALL[:4],
    "gpt_sft-2": ALL[4:14],
    "gpt_sft-3": ALL[14:],
    "gpt_dpo": EACH_AXIS,  # test_preference_parity.py has its losses on all
}


@pytest.mark.parametrize("case", quick(SHIPPED, ["gpt_sft-1"]))
def test_the_shipped_flows_agree_on_every_layout(case, samples, ranks):
    flow = case.partition("-")[0]
    flow_samples, overrides = samples, [f"megatron_wrap.flow.__select__={flow}"]
    if flow == "gpt_dpo":
        flow_samples, overrides = pairs(), [*overrides, "megatron_wrap.models.reference=copy"]
    report = assert_layouts_agree(ranks, SHIPPED[case], overrides, flow_samples, steps=2)
    assert report.flow == flow
    assert not report.notes


@pytest.mark.matrix
def test_the_shipped_minimal_flow_agrees_on_each_axis(ranks):
    assert_layouts_agree(ranks, EACH_AXIS, (), None, MOCK, steps=2)


@pytest.mark.matrix
@pytest.mark.parametrize("flow", zoo.RIGHT, ids=lambda flow: flow.__name__)
def test_correct_flows_agree(flow, samples, ranks):
    """Together on every default layout; a two-value flow is left out with another split into micro-batches, a flow that
    does not declare support for packing with packed rows."""
    name, layouts = flow.__name__, each_axis_and_some(DEFAULT_LAYOUTS, zoo.RIGHT.index(flow), 2)
    report = check_parity(CONFIG, flow=f"_flow_zoo:{name}", layouts=layouts, samples=samples, steps=1, ranks=ranks)
    left_out = set()
    if "supports_packing" not in vars(flow):
        left_out |= {layout for layout in layouts if "packed" in layout}
    if flow is zoo.TwoValuesComplete:
        left_out |= {"mbs1", "token-budget-dp2"} & {*layouts}
    assert {row.layout for row in report.rows if row.agrees is None} == left_out, report.table()
    assert report.agrees, report.table()
    assert not report.notes


@pytest.mark.parametrize("flow", covering(zoo.WRONG, lambda flow: {zoo.WRONG[flow][0]}))
def test_the_report_names_the_mistake_of_a_wrong_flow(flow, samples, ranks):
    layout, cause = zoo.WRONG[flow]
    layouts = [layout] if layout in DEFAULT_LAYOUTS else ["mbs1"]
    report = check_parity(
        CONFIG, flow=f"_flow_zoo:{flow.__name__}", layouts=layouts, samples=samples, steps=1, ranks=ranks
    )
    assert not report.agrees
    [row] = [row for row in report.rows if row.layout == layout]
    assert row.agrees is False
    assert cause in re.sub(r"py:\d+", "py:LINE", row.note), report.table()
    assert "Traceback" not in row.note


def test_a_call_over_a_part_of_the_vocabulary_is_noted_even_if_the_values_agree(samples, ranks):
    """An untrained model predicts no label, so the accuracy is 0 on every layout."""
    report = check_parity(
        CONFIG, flow="_flow_zoo:AccuracyOfAPart", layouts=["tp2"], samples=samples, steps=1, ranks=ranks
    )
    assert report.agrees, report.table()
    assert "calls argmax over this process's part of the vocabulary" in report.notes[-1]


def test_an_error_in_the_loss_is_one_line_with_its_location(samples, ranks):
    with pytest.raises(FlowError) as caught:
        check_parity(CONFIG, flow="_flow_zoo:WrongShape", layouts=["mbs1"], samples=samples, steps=1, ranks=ranks)
    assert re.fullmatch(
        r"WrongShape.calculate_loss raised RuntimeError: .*, at _flow_zoo.py:\d+: `.*log_probs @ log_probs.*`",
        str(caught.value),
    )


def test_text_without_a_tokenizer_is_one_line_with_the_key(ranks):
    messages = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    for sample in (messages, {"text": "a"}, {"prompt": "a", "completion": "b"}):
        with pytest.raises(FlowError, match=r"^.*megatron_wrap\.data\.tokenizer.*$"):
            check_parity(CONFIG, layouts=["mbs1"], samples=[sample], steps=1, ranks=ranks)


def test_a_flow_is_left_out_of_packed_layouts_with_the_reason(samples, ranks):
    """Its class, or the one of its classes that defines the loss, does not declare that it supports packing."""
    for flow, reason in (("ToCome", "ToCome defines calculate_loss"), ("TwoValuesComplete", "does not declare")):
        report = check_parity(
            CONFIG, flow=f"_flow_zoo:{flow}", layouts=["packed"], samples=samples, steps=1, ranks=ranks
        )
        [row] = report.rows
        assert row.agrees is None
        assert "supports_packing" in row.note
        assert reason in row.note, row.note


def test_with_router_losses_packed_layouts_are_left_out_and_the_loss_is_named(samples, ranks):
    layouts = ["packed", "token-budget"]
    report = check_parity(CONFIG, MIXTRAL, samples=samples, layouts=layouts, steps=1, ranks=ranks)
    assert [row.agrees for row in report.rows] == [None, None]
    assert ["aux_loss of the routers" in row.note for row in report.rows] == [True, True]
    off = (*MIXTRAL, "megatron_lm.model.arch.moe_aux_loss_coeff=0.0", "megatron_lm.model.arch.moe_z_loss_coeff=1e-3")
    [row] = check_parity(CONFIG, off, samples=samples, layouts=["packed"], steps=1, ranks=ranks).rows
    assert "z_loss of the routers" in row.note


def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys):
    code = main(["check-parity", str(MOCK), "--layouts", "dp2,tp8", "--steps", "1", "--json", str(tmp_path / "r.json")])
    shown = capsys.readouterr().out
    assert code == 0
    assert "1 of 1 layout agrees" in shown
    assert "8 processes, more than 4" in shown
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["agrees"]
    assert [row["layout"] for row in report["rows"]] == ["dp2", "tp8"]


def test_the_command_exits_with_1_for_a_wrong_flow_and_2_for_a_missing_one(tmp_path, capsys):
    lines = tmp_path / "samples.jsonl"
    lines.write_text("".join(json.dumps(sample) + "\n" for sample in token_samples(8, 48)))
    command = ["check-parity", str(CONFIG), f"--samples={lines}", "--steps=1", "--layouts=tp2"]
    assert main([*command, "--flow=_flow_zoo:SoftmaxOfAPart"]) == 1
    assert "part of the vocabulary" in capsys.readouterr().out
    assert main([*command, "--flow=_flow_zoo:Missing"]) == 2
    assert "_flow_zoo" in capsys.readouterr().err


def test_layout_names():
    case = parse_layout("tp2-sp-pp2-vpp2")
    assert case.processes == 4
    assert "megatron_lm.model.parallel.sequence_parallel=true" in case.overrides(seq_length=48)


def test_an_moe_model_runs_on_expert_parallel_layouts_too(samples, ranks):
    layouts = ("mbs1", "padded", "tp2", "ep2", "tp2-sp-ep2-etp1")
    report = check_parity(CONFIG, MIXTRAL, samples=samples, layouts=layouts, steps=1, ranks=ranks)
    assert report.agrees, report.table()
    rows = {row.layout: row for row in report.rows}
    assert "load_balancing_loss" not in rows["ep2"].note
    assert rows["mbs1"].agrees is None
    assert "aux_loss" in rows["mbs1"].note
    assert "micro-batch size" in rows["mbs1"].note
    assert rows["tp2"].agrees is None  # without sequence parallelism
    for layout in ("padded", "ep2", "tp2-sp-ep2-etp1"):
        assert rows[layout].router_loss_difference < 1e-4
    assert rows["ep2"].processes == 2
    (note,) = report.notes
    assert "router losses" in note
    assert "load_balancing_loss" in note
    assert "routers' " in report.table()


@pytest.mark.parametrize(
    ("name", "processes", "dp"),
    [("ep2", 2, 2), ("dp4-ep2", 4, 4), ("tp2-sp-ep2", 4, 2), ("tp2-sp-ep2-etp1", 2, 1), ("pp2-ep2", 4, 2)],
)
def test_expert_parallelism_uses_the_processes_of_the_other_axes(name, processes, dp):
    case = parse_layout(name)
    assert (case.processes, case.dp) == (processes, dp)
