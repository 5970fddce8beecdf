"""`check-parity`: shipped and correct flows pass; for each wrong one the report names the mistake."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import _flow_zoo as zoo
import pytest
from _covering import covering, each_axis_and_some, quick
from layout_runs import token_samples

from megatron_wrap.cli.main import main
from megatron_wrap.errors import FlowError
from megatron_wrap.testing import check_parity
from megatron_wrap.testing.layouts import DEFAULT_LAYOUTS, parse_layout

CONFIG = Path(__file__).parent / "layouts.yaml"


@pytest.fixture(scope="module")
def samples() -> list[dict[str, list[int]]]:
    result = token_samples(16, 48)
    # two samples with loss tokens only at the start, so a context-parallel rank may have none in a micro-batch
    result[0]["loss_mask"] = [0] * len(result[0]["loss_mask"])
    result[0]["loss_mask"][0:3] = [1, 1, 1]
    result[1]["loss_mask"] = [0] * len(result[1]["loss_mask"])
    result[1]["loss_mask"][0:3] = [1, 1, 1]
    return result


NOISE = "megatron_lm.train.common.neftune_noise_alpha=20"


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(["tp2-sp", "cp2"], id="parts of a row"),
        pytest.param(["packed", "tp2-sp-pp2", "mbs1", "padded", "cp2-dp2"], id="others", marks=pytest.mark.matrix),
    ],
)
def test_embedding_noise_is_the_same_on_every_layout(layouts, samples, ranks):
    report = check_parity(CONFIG, [NOISE], samples=samples, layouts=layouts, steps=2, ranks=ranks)
    assert [row.agrees for row in report.rows] == [True] * len(layouts), report.table()


FREEZE = "megatron_lm.train.common.freeze="


@pytest.mark.parametrize(
    ("patterns", "layouts"),
    [
        ("[model.embed_tokens, model.layers.0.self_attn]", ["tp2-sp", "dp2-dopt", "pp2-vpp2"]),
        # the whole first stage, as in a resume from PP2 in test_resume.py
        pytest.param("[model.embed_tokens, 'model.layers.[0-1].*']", ["pp2"], marks=pytest.mark.matrix),
    ],
)
def test_frozen_parameters_agree_on_every_layout(patterns, layouts, samples, ranks):
    report = check_parity(CONFIG, [FREEZE + patterns], samples=samples, layouts=layouts, steps=2, ranks=ranks)
    assert [row.agrees for row in report.rows] == [True] * len(layouts), report.table()


MUON = ("megatron_lm.train.optimizer.__select__=muon", "megatron_lm.train.optimizer.muon_ns_dtype=fp32")
EXPERTS = ("megatron_lm.model.arch.num_experts=4", "megatron_lm.model.arch.moe_ffn_hidden_size=32")
LORA = (
    "megatron_wrap.adapter.__select__=lora",
    "megatron_wrap.adapter.r=4",
    "megatron_wrap.adapter.loraplus_lr_ratio=2",
)


@pytest.mark.parametrize(
    ("options", "layouts"),
    [
        pytest.param((), ["tp2-sp-pp2", "cp2-dp2"], id="dense", marks=pytest.mark.matrix),
        pytest.param(EXPERTS, ["tp2-sp-ep2"], id="experts"),
        pytest.param(EXPERTS, ["pp2-ep2"], id="experts of stages", marks=pytest.mark.matrix),
        pytest.param(
            (*EXPERTS, "megatron_lm.model.arch.qk_layernorm=true", *LORA),
            ["tp2-sp-pp2", "pp2-ep2"],
            id="adapter",
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_muon_agrees_on_every_layout(options, layouts, samples, ranks):
    """A second step starts from weights that Muon has updated; its iteration in bf16 would magnify rounding."""
    report = check_parity(CONFIG, [*MUON, *options], samples=samples, layouts=layouts, steps=2, ranks=ranks)
    assert [row.agrees for row in report.rows] == [True] * len(layouts), report.table()


@pytest.mark.parametrize(
    "layouts", [["tp2", "packed"], pytest.param(["tp2-cp2"], marks=pytest.mark.matrix)], ids="+".join
)
def test_label_smoothing_and_z_loss_agree(layouts, samples, ranks):
    overrides = [f"megatron_wrap.flow.{key}" for key in ("label_smoothing=0.2", "z_loss_coefficient=0.01")]
    report = check_parity(CONFIG, overrides, samples=samples, layouts=layouts, steps=1, ranks=ranks)
    assert [row.agrees for row in report.rows] == [True] * len(layouts), report.table()


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


def parts(layouts, size):
    """Groups of as many layouts, by their joined names."""
    return {"+".join(layouts[at : at + size]): layouts[at : at + size] for at in range(0, len(layouts), size)}


SHIPPED = {**parts(ALL[:4], 4), **parts(ALL[4:], 10)}


@pytest.mark.parametrize(
    ("flow", "layouts"),
    # test_dpo.py compares gpt_dpo with trl on each axis, test_preference_parity.py cuts its batches
    covering(
        ((flow, some) for some in SHIPPED for flow in ("gpt_sft", "gpt_dpo")), lambda case: {case[0]} & {"gpt_sft"}
    ),
)
def test_the_shipped_flows_agree_on_every_layout(flow, layouts, samples, ranks):
    flow_samples, overrides = samples, [f"megatron_wrap.flow.__select__={flow}"]
    if flow == "gpt_dpo":
        flow_samples, overrides = pairs(), [*overrides, "megatron_wrap.models.reference=copy"]
    report = check_parity(CONFIG, overrides, samples=flow_samples, layouts=SHIPPED[layouts], ranks=ranks)
    assert report.flow == flow
    assert not report.notes
    assert [row.layout for row in report.rows if row.agrees is not True] == [], report.table()


@pytest.mark.matrix
def test_the_shipped_minimal_flow_agrees_on_each_axis(ranks):
    report = check_parity(MOCK, layouts=each_axis_and_some(ALL, 0, 4), ranks=ranks)
    assert [row.layout for row in report.rows if row.agrees is not True] == [], report.table()


@pytest.mark.parametrize(
    ("flow", "layouts"),
    [
        pytest.param(flow.__name__, each_axis_and_some(DEFAULT_LAYOUTS, number, 3), id=flow.__name__)
        for number, flow in enumerate(zoo.RIGHT)
    ],
)
@pytest.mark.matrix
def test_correct_flows_agree(flow, layouts, samples, ranks):
    """Together on every default layout; a two-value flow is left out with another split into micro-batches, a flow that
    does not declare support for packing with packed rows."""
    report = check_parity(CONFIG, flow=f"_flow_zoo:{flow}", layouts=layouts, samples=samples, steps=1, ranks=ranks)
    left_out = set()
    if "supports_packing" not in vars(getattr(zoo, flow)):
        left_out |= {layout for layout in layouts if "packed" in layout}
    if flow == "TwoValuesComplete":
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


MIXTRAL = ("megatron_lm.model.arch.__select__=tiny-mixtral",)
DEEPSEEK = ("megatron_lm.model.arch.__select__=tiny-deepseek-v3",)
GPT_OSS = (
    "megatron_lm.model.arch.__select__=tiny-gpt-oss",
    "megatron_lm.model.arch.moe_router_load_balancing_type=none",
    "megatron_lm.model.arch.moe_aux_loss_coeff=0.0",
)
OLMO3 = ("megatron_lm.model.arch.__select__=tiny-olmo3",)
GEMMA3 = ("megatron_lm.model.arch.__select__=tiny-gemma3",)
GEMMA2 = ("megatron_lm.model.arch.__select__=tiny-gemma2",)
MINIMAX_M2 = (
    "megatron_lm.model.arch.__select__=tiny-minimax-m2",
    "megatron_lm.model.arch.moe_router_load_balancing_type=none",
    "megatron_lm.model.arch.moe_aux_loss_coeff=0.0",
)


def test_an_moe_model_runs_on_expert_parallel_layouts_too(samples, ranks):
    layouts = ("mbs1", "padded", "tp2", "ep2", "tp2-sp-ep2-etp1")
    report = check_parity(CONFIG, MIXTRAL, samples=samples, layouts=layouts, ranks=ranks)
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


@pytest.mark.matrix
def test_tiny_experts_are_of_the_same_kind(samples, ranks):
    report = check_parity(CONFIG, DEEPSEEK, samples=samples, layouts=("mbs1", "cp2-ep2"), steps=1, ranks=ranks)
    assert report.agrees, report.table()
    assert [row.agrees for row in report.rows] == [True, True]  # seq_aux_loss does not depend on the micro-batch size


ARCH = "megatron_lm.model.arch."
SCALED_QUERIES = (f"{ARCH}query_scaling_beta=0.1", f"{ARCH}original_max_position_embeddings=16")
LONGROPE = (
    *(f"{ARCH}rope_type=longrope", f"{ARCH}longrope_attention_factor=1.19"),
    f"{ARCH}longrope_short_factor={[1.0] * 8}",
    f"{ARCH}longrope_long_factor={[1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]}",
)
LATENT_EPSILON = (
    f"{ARCH}latent_norm_epsilon=1e-6",
    f"{ARCH}moe_router_load_balancing_type=none",
    f"{ARCH}moe_aux_loss_coeff=0.0",
)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "model",
    [(*LONGROPE, *SCALED_QUERIES), (*DEEPSEEK, *LATENT_EPSILON, *SCALED_QUERIES)],
    ids=["longrope", "latent-attention"],
)
def test_queries_that_grow_with_their_position(model, samples, ranks):
    layouts = ("packed", "tp2-sp", "pp2-vpp2", "cp2", "packed-tp2-sp-cp2")
    report = check_parity(CONFIG, model, samples=samples, layouts=layouts, steps=1, ranks=ranks)
    assert [row.agrees for row in report.rows] == [True] * len(layouts), report.table()


@pytest.mark.matrix
def test_attention_sinks_windows_and_biases_of_experts(samples, ranks):
    layouts = ("mbs1", "packed", "tp2-sp", "pp2-vpp2", "cp2-ep2", "tp2-sp-ep2-etp1")
    report = check_parity(CONFIG, GPT_OSS, samples=samples, layouts=layouts, steps=1, ranks=ranks)
    assert [row.agrees for row in report.rows] == [True] * len(layouts), report.table()


LINEAR = ("megatron_lm.model.arch.__select__=tiny-qwen3.5",)
LINEAR_LAYOUTS = {"packed-tp2-sp-cp2": ["packed-tp2-sp-cp2"], **parts(DEFAULT_LAYOUTS, 10)}


@pytest.mark.parametrize("layouts", quick(LINEAR_LAYOUTS, ["packed-tp2-sp-cp2"]))
def test_linear_attention_on_every_layout(layouts, samples, ranks):
    report = check_parity(CONFIG, LINEAR, samples=samples, layouts=LINEAR_LAYOUTS[layouts], steps=1, ranks=ranks)
    assert [row.layout for row in report.rows if row.agrees is not True] == [], report.table()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        (OLMO3, ("packed", "tp2-sp", "pp2-vpp2", "cp2", "packed-tp2-sp-cp2")),
        (MINIMAX_M2, ("packed", "tp2-sp-ep2-etp1", "cp2-ep2")),
        (GEMMA3, ("packed", "tp2-sp", "pp2-vpp2", "packed-tp2-sp-cp2")),
        (GEMMA2, ("packed", "tp2-sp", "pp2", "packed-tp2-sp-cp2")),
    ],
    ids=["olmo3", "minimax-m2", "gemma3", "gemma2"],
)
def test_norms_after_the_blocks_and_over_all_heads_rotary_angles_by_window_and_caps(model, layouts, samples, ranks):
    report = check_parity(CONFIG, model, samples=samples, layouts=layouts, steps=1, ranks=ranks)
    assert [row.agrees for row in report.rows] == [True] * len(layouts), report.table()


@pytest.mark.parametrize(
    ("name", "processes", "dp"),
    [("ep2", 2, 2), ("dp4-ep2", 4, 4), ("tp2-sp-ep2", 4, 2), ("tp2-sp-ep2-etp1", 2, 1), ("pp2-ep2", 4, 2),
     ("cp2-ep2", 2, 1), ("ep4", 4, 4)],
)  # fmt: skip
def test_expert_parallelism_uses_the_processes_of_the_other_axes(name, processes, dp):
    case = parse_layout(name)
    assert (case.processes, case.dp) == (processes, dp)
