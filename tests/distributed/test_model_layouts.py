"""Each kind of model has the same initial weights on every layout, bit for bit, and trains like one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import _model_runs
import numpy
import pytest
from _covering import axes, covering

ARCH = "megatron_lm.model.arch."
PARALLEL = "megatron_lm.model.parallel."
RECOMPUTE = "megatron_lm.train.recompute."
STEPS = 2
"""Of a layout: the loss of the second depends on the update of the first, whose gradients are compared one by one."""


def _overrides(prefix: str, values: dict[str, Any]) -> tuple[str, ...]:
    texts = {key: str(value).lower() if isinstance(value, bool) else value for key, value in values.items()}
    return tuple(f"{prefix}{key}={text}" for key, text in texts.items())


def _layout(**sizes: Any) -> tuple[str, ...]:
    names = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "sp": "sequence_parallel",
        "layers_per_chunk": "num_layers_per_virtual_pipeline_stage",
        "chunks": "virtual_pipeline_model_parallel_size",
        "first": "decoder_first_pipeline_num_layers",
        "last": "decoder_last_pipeline_num_layers",
        "split": "pipeline_model_parallel_layout",
    }
    return _overrides(PARALLEL, {names[key]: value for key, value in sizes.items()})


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"untie_embeddings_and_output_weights": False},
    "gpt2": {
        "position_embedding_type": "learned_absolute",
        "max_position_embeddings": 40,
        "normalization": "LayerNorm",
        "swiglu": False,
        "openai_gelu": True,
        "add_bias_linear": True,
        "untie_embeddings_and_output_weights": False,
    },
    "qk-norm": {"qk_layernorm": True, "add_qkv_bias": True, "kv_channels": 12, "num_query_groups": 2},
    "nemotron": {
        "normalization": "LayerNorm",
        "apply_layernorm_1p": True,
        "swiglu": False,
        "squared_relu": True,
        "rotary_percent": 0.5,
    },
    "six-layers": {"num_layers": 6},
    "six-layers-tied": {"num_layers": 6, "untie_embeddings_and_output_weights": False},
    "unpadded-on-one-rank": {"make_vocab_size_divisible_by": 1},
}

OVERLAP = (
    "megatron_lm.train.optimizer.use_distributed_optimizer=true",
    "megatron_lm.misc.ddp.overlap_grad_reduce=true",
    "megatron_lm.misc.ddp.overlap_param_gather=true",
)
FULL = _overrides(
    RECOMPUTE, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
)
BLOCK = _overrides(RECOMPUTE, {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1})
SELECTIVE = _overrides(RECOMPUTE, {"recompute_granularity": "selective"})
MODULES = (*SELECTIVE, f"{RECOMPUTE}recompute_modules=[core_attn,mlp,layernorm]")


@dataclass(frozen=True)
class Case:
    """A model in a layout, compared with the same model on one rank."""

    model: str
    layout: str
    processes: int
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.model}-{self.layout}"


TP2_SP, PP2, CP2 = _layout(tp=2, sp=True), _layout(pp=2), _layout(cp=2)
TP2_PP2 = _layout(tp=2, sp=True, pp=2)
CASES = [
    *(Case(model, "tp2-sp", 2, TP2_SP) for model in ("tied", "gpt2", "qk-norm", "nemotron", "unpadded-on-one-rank")),
    *(Case(model, "pp2", 2, PP2) for model in ("tied", "gpt2", "qk-norm")),
    *(Case(model, "cp2", 2, CP2) for model in ("tied", "gpt2", "qk-norm")),
    *(Case(model, "tp2-pp2", 4, TP2_PP2) for model in ("tied", "gpt2", "qk-norm")),
    Case("qk-norm", "tp2", 2, _layout(tp=2, sp=False)),
    Case("tied", "pp2-vpp2", 2, _layout(pp=2, layers_per_chunk=1)),
    Case("gpt2", "dp2-overlap", 2, OVERLAP),
    Case("tied", "pp2-overlap", 4, (*PP2, *OVERLAP)),
    # 301 rows on four ranks of 128 rows: the third has some padding, the fourth only padding
    Case("llama", "tp4", 4, _layout(tp=4, sp=True)),
    Case("llama", "pp2-first-1", 2, _layout(pp=2, first=1)),
    Case("tied", "pp2-last-1", 2, _layout(pp=2, last=1)),
    Case("six-layers", "pp2-vpp2-first-2", 2, _layout(pp=2, chunks=2, first=2)),
    Case("six-layers-tied", "pp4-first-1-last-1", 4, _layout(pp=4, first=1, last=1)),
    Case("gpt2", "pp2-uneven", 2, _layout(pp=2, split="Et*3|tL")),
    Case("six-layers", "pp2-vpp2-uneven", 2, _layout(pp=2, split="Et|t*2|t|t*2L")),
    Case("six-layers-tied", "pp4-by-cost", 4, _layout(pp=4)),
    Case("llama", "dp2-overlap", 2, OVERLAP),
    Case("llama", "tp2-dp2-overlap", 4, (*TP2_SP, *OVERLAP)),
    Case("llama", "pp2-vpp2-dp2-overlap", 4, (*_layout(pp=2, layers_per_chunk=1), *OVERLAP)),
    Case("llama", "cp2-overlap", 2, (*CP2, *OVERLAP)),
    Case("llama", "recompute-full", 1, FULL),
    Case("llama", "recompute-modules", 1, MODULES),
    Case("llama", "tp2-sp-recompute-full", 2, (*TP2_SP, *FULL)),
    Case(
        "llama",
        "tp2-recompute-split-activations",
        2,
        (*_layout(tp=2, sp=False), *FULL, f"{RECOMPUTE}distribute_saved_activations=true"),
    ),
    Case("llama", "tp2-sp-recompute-selective", 2, (*TP2_SP, *SELECTIVE)),
    Case("llama", "pp2-recompute-block", 2, (*PP2, *BLOCK)),
    Case("llama", "cp2-recompute-modules", 2, (*CP2, *MODULES)),
]


@pytest.fixture(scope="module")
def one_rank(ranks, tmp_path_factory):
    """one_rank(model, *overrides) -> results of one rank; each is trained once."""
    actual: dict[tuple[Any, ...], dict[str, Any]] = {}

    def train(model: str, *overrides: str, lone_token: bool = False) -> dict[str, Any]:
        key = (model, lone_token, *overrides)
        if key not in actual:
            arguments = ((*_overrides(ARCH, MODELS[model]), *overrides), str(tmp_path_factory.mktemp("one")))
            (actual[key],) = ranks(1).run(_model_runs.train, *arguments, lone_token)
        return actual[key]

    return train


def _of_all_ranks(
    ranks: Any, case: Case, folder: Any, *overrides: str, lone_token: bool = False, steps: int = 3
) -> dict[str, Any]:
    """Results of a layout, checked to be the same on each rank; with the digests of every copy of the embedding, and
    unsharded gradients."""
    arguments = ((*_overrides(ARCH, MODELS[case.model]), *case.overrides, *overrides), str(folder))
    of_ranks = ranks(case.processes).run(_model_runs.train, *arguments, lone_token, steps)
    embeddings = [of_rank.pop("embeddings") for of_rank in of_ranks]
    gradients = [of_rank.pop("gradients") for of_rank in of_ranks]
    for other in of_ranks[1:]:
        assert other == of_ranks[0]
    return {**of_ranks[0], "embeddings": embeddings, "gradients": gradients[0]}


@pytest.mark.parametrize("case", covering(CASES))
def test_a_model_trains_like_one_rank(case: Case, one_rank, ranks, tmp_path):
    expected = one_rank(case.model)
    actual = _of_all_ranks(ranks, case, tmp_path, steps=STEPS)
    assert actual["initial"] == expected["initial"]  # digests of all bits
    for name in ("losses", "grad_norms"):
        assert len(actual[name]) == STEPS
        numpy.testing.assert_allclose(actual[name], expected[name][:STEPS], rtol=1e-5)
    assert actual["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        difference = numpy.linalg.norm(actual["gradients"][name] - gradient)
        assert difference <= 1e-5 * numpy.linalg.norm(gradient), name
    if "tp2" not in case.layout and "tp4" not in case.layout:
        # the embedding's copies on the first and the last stage and on all replicas are equal after training
        assert len({digest for of_rank in actual["embeddings"] for digest in of_rank}) == 1
        tied = not MODELS[case.model].get("untie_embeddings_and_output_weights", True)
        stages = 2 if tied and "pp" in case.layout else 1
        assert sum(map(len, actual["embeddings"])) >= stages


def test_another_seed_gives_other_weights(one_rank):
    usual, other = one_rank("gpt2")["initial"], one_rank("gpt2", "megatron_lm.train.common.seed=1235")["initial"]
    same = {name for name in usual if usual[name] == other[name]}
    assert same == {name for name in usual if "layernorm" in name or name.endswith("bias")}


HALF_LAYOUTS = [
    Case("tied", "dp2", 2, ()),
    Case("tied", "tp2-sp", 2, TP2_SP),
    Case("tied", "pp2", 2, PP2),
    Case("tied", "cp2", 2, CP2),
    Case("tied", "dp2-overlap", 2, OVERLAP),
]
BF16 = ("megatron_lm.train.dtype.bf16=true",)
FP16 = _overrides(
    "megatron_lm.train.dtype.", {"fp16": True, "hysteresis": 1, "loss_scale_window": 2, "initial_loss_scale": 2.0**16}
)


@pytest.mark.parametrize("case", covering(HALF_LAYOUTS, lambda case: axes(case) - {"pp2", "overlap"}))
def test_bf16_trains_the_same_on_every_layout(case: Case, one_rank, ranks, tmp_path):
    expected, exact = one_rank(case.model, *BF16), one_rank(case.model)
    actual = _of_all_ranks(ranks, case, tmp_path, *BF16)
    assert actual["initial"] == expected["initial"] != exact["initial"]
    for reference in (expected, exact):
        numpy.testing.assert_allclose(actual["losses"], reference["losses"], rtol=5e-3)
        numpy.testing.assert_allclose(actual["grad_norms"], reference["grad_norms"], rtol=0.1)


@pytest.mark.parametrize("case", covering(HALF_LAYOUTS, lambda case: axes(case) - {"tp2", "sp", "cp2"}))
def test_fp16_skips_an_overflow_on_all_ranks(case: Case, one_rank, ranks, tmp_path):
    """The second step overflows on some ranks: all skip it and halve the scale, which doubles after two good steps."""
    expected = one_rank(case.model, *FP16, lone_token=True)
    actual = _of_all_ranks(ranks, case, tmp_path, *FP16, lone_token=True)
    assert expected["skipped"] == [0, 1, 1, 1]
    for key in ("initial", "skipped", "samples", "changed", "loss_scales"):
        assert actual[key] == expected[key], key
    assert actual["changed"] == [True, False, True, True]
    assert actual["samples"] == [4, 8, 12, 16]
    assert actual["loss_scales"] == [2.0**16, 2.0**15, 2.0**15, 2.0**16]
    assert actual["grad_norms"][1] == 0.0  # the step was skipped
    numpy.testing.assert_allclose(actual["losses"], expected["losses"], rtol=5e-3)
    numpy.testing.assert_allclose(actual["grad_norms"], expected["grad_norms"], rtol=0.1)


def test_fp16_trains_like_fp32(one_rank):
    """The growing loss scale does not affect gradients and updates."""
    exact, half = one_rank("tied"), one_rank("tied", *FP16)
    assert half["skipped"] == [0, 0, 0]
    assert half["loss_scales"] == [2.0**16, 2.0**17, 2.0**17]
    numpy.testing.assert_allclose(half["losses"], exact["losses"], rtol=5e-3)
    numpy.testing.assert_allclose(half["grad_norms"], exact["grad_norms"], rtol=0.1)


def test_a_run_that_gathers_parameters_in_the_forward_pass_is_freed(ranks, tmp_path):
    overrides = (*OVERLAP, f"megatron_wrap.logger.output_dir={tmp_path}")
    assert ranks(2).run(_model_runs.is_freed, overrides) == [True, True]
