"""Adapters (LoRA) against peft: five training steps, logits, files in both directions, merged weights; and every
layout against one rank."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import _adapter_runs as runs
import _bridge_runs as bridge
import _saved_runs as saved_runs
import numpy
import pytest
from _covering import quick

PLAIN: dict[str, Any] = {"r": 4, "lora_alpha": 8}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", PLAIN),
    "query-value": ("qwen3", {**PLAIN, "target_modules": ["q_proj", "v_proj"]}),
    "patterns": (
        "qwen2-tied",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": r".*\.(q_proj|o_proj|up_proj|down_proj)",
            "exclude_modules": [r"layers.1.self_attn.o_proj"],
            "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.up_proj": 5},
            "alpha_pattern": {"down_proj": 16},
            "use_rslora": True,
        },
    ),
    "whole": ("qwen3", {**PLAIN, "modules_to_save": ["embed_tokens", "lm_head", "norm"]}),
    "gpt2": ("gpt2", {**PLAIN, "modules_to_save": ["wpe", "ln_f"], "bias": "all"}),
    "rows": (
        "qwen3",
        {**PLAIN, "trainable_token_indices": {"embed_tokens": [3, 17, 200, 39], "lm_head": [17, 250]}},
    ),
    "tied-rows": ("qwen2-tied", {**PLAIN, "trainable_token_indices": [39, 3, 200, 17]}),
    "scaled-rows": ("gemma2", {**PLAIN, "trainable_token_indices": [39, 3, 200, 17]}),
    "gpt2-rows": ("gpt2", {**PLAIN, "target_modules": ["c_attn"], "trainable_token_indices": [300, 12, 5]}),
    "tied-whole": ("qwen2-tied", {**PLAIN, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "dora": (
        "qwen3",
        {**PLAIN, "use_dora": True, "target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]},
    ),
    "gpt2-dora": ("gpt2", {**PLAIN, "use_dora": True}),
    "pissa": (
        "qwen3",
        {**PLAIN, "init_lora_weights": "pissa", "rank_pattern": {"o_proj": 3}, "alpha_pattern": {"v_proj": 5}},
    ),
    "gpt2-pissa": ("gpt2", {**PLAIN, "init_lora_weights": "pissa", "use_rslora": True}),
    "phi3": ("phi3", PLAIN),
    "deepseek-v3": (
        "deepseek-v3",
        {**PLAIN, "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]},
    ),
    "deepseek-v3-pissa": (
        "deepseek-v3",
        {**PLAIN, "target_modules": ["q_a_proj", "kv_b_proj", "o_proj"], "init_lora_weights": "pissa"},
    ),
    "qwen3.5": ("qwen3.5", PLAIN),
    "qwen3-next": (
        "qwen3-next",
        {
            **PLAIN,
            "target_modules": ["q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"],
            "rank_pattern": {"q_proj": 3},
        },
    ),
    "mixtral": ("mixtral", {**PLAIN, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
    "mixtral-experts": ("mixtral", {**PLAIN, "target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "qwen3-moe-experts": (
        "qwen3-moe",
        {
            **PLAIN,
            "target_modules": [],
            "target_parameters": EXPERTS,
            "rank_pattern": {"gate_up_proj": 3},
            "use_rslora": True,
        },
    ),
    "gpt-oss-experts": (
        "gpt-oss",
        {**PLAIN, "target_modules": ["q_proj"], "target_parameters": EXPERTS},
    ),
    "deepseek-v3-shared": (
        "deepseek-v3",
        {
            **PLAIN,
            "target_modules": ["o_proj"],
            "target_parameters": [
                *(f"shared_experts.{module}.weight" for module in ("gate_proj", "up_proj", "down_proj")),
                *("0.mlp.up_proj.weight", "mlp.experts.down_proj"),
            ],
            "rank_pattern": {r"shared_experts\.up_proj\.weight": 3},
        },
    ),
    "qwen2-moe-shared": (
        "qwen2-moe",
        {**PLAIN, "target_modules": [], "target_parameters": ["shared_expert.gate_proj.weight", "q_proj.weight"]},
    ),
    "glm4-moe-shared": (
        "glm4-moe",
        {**PLAIN, "target_modules": ["v_proj"], "target_parameters": ["shared_experts.down_proj.weight"]},
    ),
    "deepseek-v3-experts": (
        "deepseek-v3",
        {**PLAIN, "target_modules": ["q_b_proj"], "target_parameters": ["mlp.experts.down_proj"]},
    ),
}


ROUNDED_BASES = ("qwen3.5", "qwen3-next")
"""Their bases alone differ from transformers' by more than 1e-5 (megatron_wrap/bridge/measured_families.json)."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """folder_of(family) -> a random transformers model, made once."""
    return bridge.made_once(tmp_path_factory, lambda folder: None)


@pytest.fixture(scope="module")
def on_one_rank(ranks, folder_of, tmp_path_factory):
    """on_one_rank(name) -> folder, settings, results of five steps, and their output folder; each run once."""

    @functools.cache
    def run(name: str) -> Any:
        family, adapter = ADAPTERS[name]
        folder, outputs = folder_of(family)[0], tmp_path_factory.mktemp(name)
        result = ranks(1).run(runs.train, str(folder), runs.overrides_of(adapter), str(outputs))[0]
        return folder, adapter, result, outputs

    return run


COMPARED = quick(
    ADAPTERS,
    [
        *("llama", "patterns", "whole", "tied-rows", "gpt2-dora", "pissa", "deepseek-v3-pissa", "qwen3-moe-experts"),
        *("deepseek-v3-shared", "gpt-oss-experts", "qwen3-next"),
    ],
)
"""Each kind of adapter, on models of each kind; names of other families only select other modules."""


@pytest.mark.parametrize("name", COMPARED)
def test_it_trains_as_peft_does(name, on_one_rank):
    folder, adapter, (steps, initial, factors, logits, base, unchanged), _ = on_one_rank(name)
    assert unchanged
    assert numpy.abs(logits - base).max() > 1e-3
    assert numpy.abs(base - bridge.expected_logits(folder)).max() <= 1e-4
    initial, factors = runs.trained_of(adapter, initial), runs.trained_of(adapter, factors)
    if "init_lora_weights" in adapter:
        for factor, expected in runs.peft_factors(runs.peft_model(folder, adapter)).items():
            assert numpy.abs(initial[factor] - expected).max() <= 1e-5, factor
    peft = runs.peft_model(folder, adapter, initial)
    numpy.testing.assert_allclose(steps, runs.train_peft(peft), rtol=1e-4)
    for factor, expected in runs.peft_factors(peft).items():
        difference = runs.determined(factor, factors[factor] - expected)
        assert numpy.linalg.norm(difference) <= 1e-4 * numpy.linalg.norm(expected), factor
    assert numpy.abs(logits - runs.peft_logits(peft)).max() <= 1e-4


@pytest.mark.parametrize("name", COMPARED)
def test_files_are_peft_s(name, on_one_rank):
    """peft loads what we write, and merges to what we merge."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, _, (_, _, factors, logits, _, _), outputs = on_one_rank(name)

    def base(path):
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")

    peft = PeftModel.from_pretrained(base(folder), outputs / "adapter", is_trainable=True)
    loaded = runs.peft_factors(peft)
    assert loaded.keys() == factors.keys()
    assert all(numpy.array_equal(loaded[factor], factors[factor]) for factor in factors)
    bound = 1e-4 if name in ROUNDED_BASES else 1e-5
    assert numpy.abs(logits - runs.peft_logits(peft)).max() <= bound
    merged, ours = peft.merge_and_unload().state_dict(), base(outputs / "merged").state_dict()
    for weight, expected in merged.items():
        assert torch.allclose(ours[weight], expected, rtol=0, atol=1e-6), weight


P = bridge.PARALLEL
TP2, PP2 = f"{P}tensor_model_parallel_size=2", f"{P}pipeline_model_parallel_size=2"
SP, CP2 = f"{P}sequence_parallel=true", f"{P}context_parallel_size=2"
DISTRIBUTED = "megatron_lm.train.optimizer.use_distributed_optimizer=true"
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp2": (2, (TP2, f"{P}sequence_parallel=false")),
    "tp2-sp": (2, (TP2, SP)),
    "pp2": (2, (PP2,)),
    "pp2-vpp2": (2, (PP2, f"{P}virtual_pipeline_model_parallel_size=2")),
    "cp2-packed": (2, (CP2, "megatron_wrap.flow.packing=true")),
    "dp2-distributed-overlap": (
        2,
        (
            DISTRIBUTED,
            "megatron_lm.misc.ddp.overlap_grad_reduce=true",
            "megatron_lm.misc.ddp.overlap_param_gather=true",
            "megatron_lm.misc.ddp.ddp_bucket_size=500",
        ),
    ),
    "tp2-sp-pp2": (4, (TP2, SP, PP2)),
    "tp2-sp-recompute": (
        2,
        (
            TP2,
            SP,
            "megatron_lm.train.recompute.recompute_granularity=full",
            "megatron_lm.train.recompute.recompute_method=uniform",
            "megatron_lm.train.recompute.recompute_num_layers=1",
        ),
    ),
    "ep2": (2, (f"{P}expert_model_parallel_size=2",)),
    "ep2-expert-tp2": (
        4,
        (TP2, SP, f"{P}expert_model_parallel_size=2", f"{P}expert_tensor_parallel_size=2"),
    ),
    "tp2-sp-expert-tp2": (2, (TP2, SP, f"{P}expert_tensor_parallel_size=2")),
    "tp2-sp-ep2": (2, (TP2, SP, f"{P}expert_model_parallel_size=2", f"{P}expert_tensor_parallel_size=1")),
}
ON_LAYOUTS = [
    *(
        ("llama", layout)
        for layout in LAYOUTS
        if "vpp" not in layout and "expert" not in layout and "ep2" not in layout
    ),
    ("query-value", "tp2-sp"),
    ("four-layers", "pp2-vpp2"),
    ("gpt2", "tp2-sp-pp2"),
    ("whole", "tp2"),
    ("whole", "tp2-sp-pp2"),
    ("whole", "dp2-distributed-overlap"),
    ("rows", "tp2"),
    ("rows", "tp2-sp-pp2"),
    ("tied-rows", "tp2-sp"),
    ("tied-rows", "pp2"),
    ("tied-rows", "dp2-distributed-overlap"),
    ("gpt2-rows", "tp2-sp-pp2"),
    ("tied-whole", "tp2-sp-pp2"),
    ("dora", "tp2-sp"),
    ("dora", "dp2-distributed-overlap"),
    ("gpt2-dora", "tp2-sp"),
    ("gpt2-dora", "tp2-sp-pp2"),
    ("pissa", "tp2-sp-pp2"),
    ("pissa", "dp2-distributed-overlap"),
    ("gpt2-pissa", "tp2-sp"),
    ("deepseek-v3-pissa", "tp2-sp"),
    ("phi3", "tp2-sp"),
    ("mixtral", "ep2"),
    ("mixtral", "tp2-sp-ep2"),
    ("mixtral-experts", "ep2"),
    ("mixtral-experts", "tp2-sp-expert-tp2"),
    ("qwen3-moe-experts", "tp2-sp-ep2"),
    ("mixtral-experts", "ep2-expert-tp2"),
    ("qwen3-moe-experts", "dp2-distributed-overlap"),
    ("qwen3-moe-experts", "cp2-packed"),
    ("mixtral-experts", "tp2-sp-recompute"),
    ("deepseek-v3-experts", "pp2"),
    ("gpt-oss-experts", "ep2-expert-tp2"),
    ("deepseek-v3", "tp2-sp"),
    ("deepseek-v3-shared", "tp2-sp-ep2"),
    ("qwen2-moe-shared", "tp2-sp-pp2"),
    ("qwen3.5", "tp2-sp-pp2"),
    ("qwen3.5", "tp2"),
    ("qwen3.5", "cp2-packed"),
    ("qwen3-next", "tp2-sp-ep2"),
]
ADAPTERS["four-layers"] = ("llama-four-layers", PLAIN)


QUICK = (
    ("four-layers", "pp2-vpp2"),
    ("llama", "cp2-packed"),
    ("llama", "tp2-sp-recompute"),
    ("whole", "dp2-distributed-overlap"),
    ("gpt2-dora", "tp2-sp"),
    ("deepseek-v3-pissa", "tp2-sp"),
    ("mixtral-experts", "ep2-expert-tp2"),
    ("qwen3-moe-experts", "tp2-sp-ep2"),
)
"""Each axis and each kind of adapter, of runs on one rank that peft is compared with where there is one; PiSSA is
resumed from TP2 on PP2, and loaded on both."""


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(*case, id="-".join(case), marks=() if case in QUICK else pytest.mark.matrix) for case in ON_LAYOUTS],
)
def test_a_layout_trains_like_one_rank(name, layout, on_one_rank, ranks, tmp_path):
    folder, adapter, (steps, initial, factors, logits, _, _), _ = on_one_rank(name)
    world_size, overrides = LAYOUTS[layout]
    settings = (*runs.overrides_of(adapter), *overrides)
    measured = ranks(world_size).run(runs.train, str(folder), settings, str(tmp_path))[0]
    numpy.testing.assert_allclose(measured[0], steps, rtol=1e-5)
    for factor, values in initial.items():  # norms of rows are sums over ranks
        numpy.testing.assert_allclose(measured[1][factor], values, rtol=1e-6 if "magnitude" in factor else 0)
    for factor, expected in factors.items():
        difference = runs.determined(factor, measured[2][factor] - expected)
        assert numpy.linalg.norm(difference) <= 1e-4 * numpy.linalg.norm(expected), factor
    assert numpy.abs(measured[3] - logits).max() <= 1e-4
    assert measured[5]


RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "dora": ("llama", {"use_dora": True}),
    "pissa": ("llama", {"init_lora_weights": "pissa"}),
    "tied-rows": ("qwen2-tied", {"trainable_token_indices": [39, 3, 200]}),
    "tied-whole": ("qwen2-tied", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
}


@pytest.mark.parametrize("name", quick(list(RESUMED), ["pissa"]))
def test_a_resumed_run_continues_on_another_layout_without_the_base_in_its_checkpoint(name, folder_of, ranks, tmp_path):
    """Saved on TP2 with SP after two of three steps; on the same layout bit for bit."""
    folder, adapter = str(folder_of(RESUMED[name][0])[0]), runs.overrides_of(RESUMED[name][1])
    tensor, pipeline = ((*adapter, *LAYOUTS[layout][1]) for layout in ("tp2-sp", "pp2"))
    whole = ranks(2).run(runs.train_and_resume, folder, tensor, str(tmp_path), 3, None)[0]
    saved = ranks(2).run(runs.train_and_resume, folder, tensor, str(tmp_path / "run"), 2, None)[0]
    assert whole[0][:2] == saved[0]
    names = {name for name in saved[1] if name.startswith(("decoder", "embedding", "output"))}
    assert names
    assert all("_adapter." in name for name in names)
    same = ranks(2).run(runs.train_and_resume, folder, tensor, str(tmp_path / "run"), 3, None)[0]
    assert same[0] == whole[0][2:]
    other = ranks(2).run(runs.train_and_resume, folder, pipeline, str(tmp_path / "run"), 3, 2)[0]
    numpy.testing.assert_allclose(other[0], whole[0][2:], rtol=1e-5)
    with pytest.raises(Exception, match="another model or was changed"):
        ranks(1).run(
            runs.train_and_resume, str(runs.copy_of(folder, tmp_path)), adapter, str(tmp_path / "run"), 3, None
        )


@pytest.mark.parametrize("name", quick(["patterns", "whole", "pissa", "tied-rows"], ["pissa"]))
def test_an_adapter_of_peft_is_loaded_on_a_layout(name, on_one_rank, ranks, tmp_path):
    """The factors are peft's bit for bit, and the logits those of its model."""
    folder, adapter, (_, _, factors, logits, _, _), _ = on_one_rank(name)
    factors = runs.trained_of(adapter, factors)
    peft = runs.peft_model(folder, adapter, factors)
    peft.save_pretrained(tmp_path / "peft")
    settings = (runs.SELECT, *runs.overrides_of({**adapter, "path": str(tmp_path / "peft")}), *LAYOUTS["tp2-sp-pp2"][1])
    loaded, actual = ranks(4).run(runs.load, str(folder), settings, str(tmp_path / "out"))[0]
    loaded = runs.trained_of(adapter, loaded)
    assert all(numpy.array_equal(loaded[factor], factors[factor]) for factor in factors)
    assert numpy.abs(actual - logits).max() <= 1e-5
    started = ranks(1).run(runs.load, str(tmp_path / "peft"), (), str(tmp_path / "out"))[0]
    assert numpy.array_equal(started[1].argmax(-1), logits.argmax(-1))
    other = (runs.SELECT, *runs.overrides_of({**adapter, "path": str(tmp_path / "peft"), "r": 5}))
    with pytest.raises(Exception, match=r"r is 4 there and 5 here; write megatron_wrap.adapter.r=4"):
        ranks(1).run(runs.load, str(folder), other, str(tmp_path / "out"))


def test_the_base_is_the_reference(folder_of, ranks, tmp_path):
    """DPO with `reference: base` equals DPO with the folder's own model as the reference, also after some steps, and
    with parameters that are trained whole."""
    folder = str(folder_of("llama")[0])
    whole = runs.overrides_of({"modules_to_save": ["embed_tokens", "lm_head"]})
    base = ranks(2).run(runs.train_dpo, folder, "base", (*LAYOUTS["tp2-sp"][1], *whole), str(tmp_path / "base"))[0]
    path = ranks(1).run(runs.train_dpo, folder, {"hf_path": folder}, whole, str(tmp_path / "path"))[0]
    assert abs(base[-1]["rewards/margins"]) > 1e-4
    for ours, expected in zip(base, path, strict=True):
        assert ours == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_checkpoint_with_the_base_needs_no_folder(folder_of, ranks, tmp_path):
    """`keep_base`: the frozen weights are saved, and the resumed run equals the unbroken one."""
    folder, settings = str(folder_of("llama")[0]), runs.overrides_of({"keep_base": True})
    whole = ranks(1).run(runs.train_and_resume, folder, settings, str(tmp_path), 2, None)[0]
    saved = ranks(1).run(runs.train_and_resume, folder, settings, str(tmp_path / "run"), 1, None)[0]
    assert "embedding.word_embeddings.weight" in saved[1]
    copied = str(runs.copy_of(folder, tmp_path))
    assert ranks(1).run(runs.train_and_resume, copied, settings, str(tmp_path / "run"), 2, None)[0][0] == whole[0][1:]


def test_parameters_trained_whole_are_resumed_with_their_originals(folder_of, ranks, tmp_path):
    """On another layout; with `keep_base` the originals come from the checkpoint, here with another folder."""
    folder = str(folder_of("llama")[0])
    whole = runs.overrides_of({"r": 4, "modules_to_save": ["embed_tokens", "lm_head", "1.input_layernorm"]})
    tp2, pp2 = (*LAYOUTS["tp2-sp"][1], *whole), (*LAYOUTS["pp2"][1], *whole)
    straight = ranks(1).run(runs.train_and_resume, folder, whole, str(tmp_path / "straight"), 3, None)[0]
    saved = ranks(2).run(runs.train_and_resume, folder, tp2, str(tmp_path / "run"), 2, None)[0]
    weights = {name for name in saved[1] if not name.startswith(("optimizer.", "common_state"))}
    assert {name.removeprefix("modules_to_save.") for name in weights if "lora_" not in name} == {
        "embedding.word_embeddings.weight",
        "output_layer.weight",
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",  # Megatron-Core's name of input_layernorm
    }
    after = ranks(2).run(runs.train_and_resume, folder, pp2, str(tmp_path / "run"), 3, None)[0]
    numpy.testing.assert_allclose(after[0], straight[0][2:], rtol=1e-5)

    kept = (*whole, *runs.overrides_of({"keep_base": True}))
    first = ranks(1).run(runs.train_and_resume, folder, kept, str(tmp_path / "kept"), 1, None)[0]
    assert {"output_layer.weight", "modules_to_save.output_layer.weight"} <= set(first[1])
    other = str(runs.with_other_weights(folder, tmp_path))
    base = ranks(2).run(saved_runs.base_logits, other, (*kept, *LAYOUTS["pp2"][1]), str(tmp_path / "kept/checkpoints"))
    assert numpy.abs(base[0] - bridge.expected_logits(Path(folder))).max() <= 1e-4


def test_dropout_is_in_training_alone_and_initial_factors_are_peft_s(folder_of, ranks, tmp_path):
    """Gaussian: A has the deviation 1 / r, B is zero. With a B that is not zero, dropout changes the loss of a step and
    not the logits before it."""
    folder = str(folder_of("llama")[0])

    def train(count: int, **adapter: Any) -> Any:
        settings = runs.overrides_of({**PLAIN, **adapter})
        return ranks(1).run(runs.train, folder, settings, str(tmp_path), count)[0]

    gaussian = train(0, init_lora_weights="gaussian")[1]
    values = numpy.concatenate([factor.ravel() for name, factor in gaussian.items() if "lora_A" in name])
    assert values.std() == pytest.approx(1 / PLAIN["r"], rel=0.05)
    assert not any(factor.any() for name, factor in gaussian.items() if "lora_B" in name)

    active = {"init_lora_weights": False}
    assert numpy.array_equal(train(0, **active)[3], train(0, **active, lora_dropout=0.5)[3])
    (plain,), (dropped,) = train(1, **active)[0], train(1, **active, lora_dropout=0.5)[0]
    assert abs(plain[0] - dropped[0]) > 1e-3


def test_a_base_without_a_folder_is_decomposed_as_well(ranks, tmp_path):
    """The weights are those of the seed. The model begins as its base, and is trained."""
    adapter = {**PLAIN, "init_lora_weights": "pissa"}
    initial, unchanged, losses = ranks(1).run(runs.train_without_a_folder, runs.overrides_of(adapter), str(tmp_path))[0]
    assert initial <= 1e-5
    assert unchanged
    assert losses[-1] < losses[0]


def test_the_learning_rate_of_b(folder_of, ranks, tmp_path):
    """LoRA+: Adam's first step moves each element by its learning rate."""
    settings = (*runs.overrides_of({**PLAIN, "loraplus_lr_ratio": 4}), "megatron_lm.train.optimizer.weight_decay=0.0")
    result = ranks(1).run(runs.train, str(folder_of("llama")[0]), settings, str(tmp_path), 1)[0]
    for factor, before in result[1].items():
        moved = numpy.abs(result[2][factor] - before).max()
        expected = runs.RATE * (4 if "lora_B" in factor else 0)  # the gradient of A is zero while B is
        assert moved == pytest.approx(expected, rel=1e-3), factor


def test_frozen_adapters_beside_the_trained_one(folder_of, ranks, tmp_path):
    """Each as when it is loaded alone, on TP2 x PP2; the trained one is the only one in checkpoints."""
    folder = str(folder_of("llama")[0])
    others, expected = {}, {}
    made = {"first": {"r": 3, "lora_alpha": 6}, "values": {"r": 2, "target_modules": ["v_proj", "up_proj"]}}
    for name, keys in made.items():
        adapter = {**keys, "init_lora_weights": False}
        result = ranks(1).run(runs.train, folder, runs.overrides_of(adapter), str(tmp_path / name), 1)[0]
        others[name], expected[name] = str(tmp_path / name / "adapter"), result[3]
        expected[None] = result[4]
    # one whose base peft changed
    peft = runs.peft_model(Path(folder), {"r": 3, "init_lora_weights": "pissa"})
    for parameter in peft.parameters():
        parameter.data.mul_(1.1 if parameter.requires_grad else 1)
    peft.save_pretrained(tmp_path / "decomposed")
    others["decomposed"], expected["decomposed"] = str(tmp_path / "decomposed"), runs.peft_logits(peft)
    layout = (*LAYOUTS["tp2-sp"][1], *LAYOUTS["pp2"][1])
    arguments = folder, others, layout, str(tmp_path / "run")
    before, after, refused, names = ranks(4).run(runs.with_named_adapters, *arguments)[0]
    for name, logits in expected.items():
        assert numpy.abs(before[name][0] - logits).max() <= 1e-5, name
        assert numpy.array_equal(before[name][0], after[name][0]), name
        assert before[name][1] == after[name][1], name
    assert numpy.array_equal(before["default"][0], before[None][0])  # B is zero
    assert numpy.abs(after["default"][0] - after[None][0]).max() > 1e-4
    assert numpy.array_equal(after["outside"][0], after["default"][0])
    assert "leave the context to train" in refused
    model = [name for name in names if name.startswith(("decoder", "embedding", "output"))]
    assert model
    assert all("_adapter." in name for name in model)
    # DPO against a frozen adapter: at the first step the policy is the base, so rewards differ from those against it
    reference = {"adapter": "first"}
    against_adapter = ranks(1).run(
        runs.train_dpo, folder, reference, runs.overrides_of({"others": others}), str(tmp_path / "dpo")
    )
    against_base = ranks(1).run(runs.train_dpo, folder, "base", (), str(tmp_path / "base"))
    assert against_base[0][0]["rewards/chosen"] == 0 != against_adapter[0][0]["rewards/chosen"]
    # a checkpoint remembers the files of the frozen adapters
    config = Path(others["first"]) / "adapter_config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(Exception, match=r"the frozen adapter first of .* has another content"):
        ranks(1).run(runs.with_named_adapters, folder, others, (), str(tmp_path / "run"))
