"""MoE models and multi-latent attention on one GPU: implementations of layers and experts have equal initial weights
and losses, and load each other's checkpoints."""

import importlib.util
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)
if importlib.util.find_spec("transformer_engine") is None:
    pytest.skip("Transformer Engine is not installed", allow_module_level=True)

import numpy

from megatron_wrap.core import MegatronWrap

CONFIG = Path(__file__).parents[2] / "scripts/benchmark/overhead.yaml"
EXPERTS = {
    "num_experts": 8,
    "moe_ffn_hidden_size": 256,
    "moe_router_dtype": "fp32",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
}
MODELS = {
    "mixtral": EXPERTS,
    "qwen2-moe": {
        **EXPERTS,
        "moe_layer_freq": "[0,1,1,1]",
        "moe_router_pre_softmax": "true",
        "moe_router_topk": 3,
        "moe_shared_expert_intermediate_size": 256,
        "moe_shared_expert_gate": "true",
    },
    "deepseek-v3": {
        **EXPERTS,
        "moe_layer_freq": "([0]*1+[1]*3)",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": "true",
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_group_score_experts": 2,
        "moe_shared_expert_intermediate_size": 256,
        "multi_latent_attention": "true",
        "num_query_groups": "null",
        "qk_layernorm": "true",
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_head_dim": 32,
        "qk_pos_emb_head_dim": 32,
        "v_head_dim": 32,
        "rope_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "original_max_position_embeddings": 256,
        "mscale_all_dim": 1.0,
    },
}
LOSSES = ("load_balancing_loss", "seq_load_balancing_loss", "z_loss")


def samples(count: int) -> list[dict]:
    """Random tokens of unequal lengths."""
    generator = numpy.random.default_rng(3)
    lengths = generator.integers(64, 258, count).tolist()
    return [{"input_ids": generator.integers(0, 4096, n).tolist(), "loss_mask": [1] * n} for n in lengths]


def train(folder: Path, model: str, implementation: tuple[str, str], steps: int, save: bool = False) -> dict:
    """Losses per step (objective first), and initial or loaded matrices in fp32.

    Args:
        implementation: of the layers, and of the experts.
    """
    from megatron_wrap.testing.gradients import gather_weights

    overrides = [
        *(f"megatron_lm.model.arch.{key}={value}" for key, value in MODELS[model].items()),
        f"megatron_lm.model.arch.transformer_impl={implementation[0]}",
        f"megatron_lm.model.arch.experts_impl={implementation[1]}",
        "megatron_lm.train.dtype.__select__=fp32",
        f"megatron_lm.train.common.save={folder}/checkpoints",
        f"megatron_wrap.logger.output_dir={folder}",
    ]
    with MegatronWrap(CONFIG, overrides=overrides) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        state = wrap.state
        weights = {name: weight for name, weight in gather_weights(state).items() if weight.dim() == 2}
        size, first = wrap.global_batch_size, wrap.iteration
        data = samples(64)
        metrics = [wrap.train(data[step * size : (step + 1) * size]) for step in range(first, first + steps)]
        if save:
            wrap.save()
    losses = [[step["loss"], *(step[name] for name in LOSSES if name in step)] for step in metrics]
    return {"losses": losses, "weights": weights}


GROUPED, GROUPED_IN_TE = ("torch", "grouped_mm"), ("transformer_engine", "grouped_mm")
TRANSFORMER_ENGINE = ("transformer_engine", "transformer_engine")


@pytest.mark.parametrize("model", MODELS)
def test_the_implementations_agree(tmp_path, model):
    reference = train(tmp_path / "sequential", model, ("torch", "sequential"), 4)
    assert len(reference["losses"][0]) == 3
    for implementation in (GROUPED, GROUPED_IN_TE, TRANSFORMER_ENGINE):
        actual = train(tmp_path / "-".join(implementation), model, implementation, 4)
        assert actual["weights"].keys() == reference["weights"].keys()
        for name, weight in reference["weights"].items():
            assert torch.equal(actual["weights"][name], weight), name
        numpy.testing.assert_allclose(actual["losses"], reference["losses"], rtol=1e-3)


@pytest.mark.parametrize(("saves", "loads"), [(GROUPED, TRANSFORMER_ENGINE), (TRANSFORMER_ENGINE, GROUPED_IN_TE)])
@pytest.mark.parametrize("model", MODELS)
def test_checkpoint_of_one_implementation_loads_in_the_other(tmp_path, model, saves, loads):
    uninterrupted = train(tmp_path / "uninterrupted", model, saves, 4)
    train(tmp_path / "resumed", model, saves, 2, save=True)
    resumed = train(tmp_path / "resumed", model, loads, 2)
    numpy.testing.assert_allclose(resumed["losses"], uninterrupted["losses"][2:], rtol=1e-3)
