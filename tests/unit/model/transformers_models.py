"""Maps our parameters to transformers' names, for each compared family. The mapping is linear, so it also maps
gradients."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatron_wrap.config import RunConfig
from megatron_wrap.config.schema import derived

Named = dict[str, Tensor]


def split_qkv(tensor: Tensor, config: RunConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value rows of the fused projection's weight or bias. Its rows are ordered by group: the group's
    queries, its key, its value (Megatron-Core's transformer/attention.py, get_query_key_value_tensors)."""
    groups, width = derived.num_query_groups(config.arch), derived.kv_channels(config.arch)
    queries = config.arch.num_attention_heads // groups
    by_group = tensor.reshape(groups, (queries + 2) * width, *tensor.shape[1:])
    parts = by_group.split((queries * width, width, width), dim=1)
    query, key, value = (part.reshape(-1, *tensor.shape[1:]) for part in parts)
    return query, key, value


EXPERTS = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}


def to_llama_like(
    ours: Mapping[str, Tensor],
    config: RunConfig,
    joined_gate: bool = False,
    shared: str = "shared_expert",
    other_names: Mapping[str, str] = MappingProxyType({}),
) -> Named:
    """Names of Llama, Qwen2, Qwen3, StableLM, Nemotron, Mixtral, Qwen2-MoE and Qwen3-MoE; with `joined_gate`, those
    of GLM, which has gate and up in one matrix."""
    theirs: Named = {
        "model.embed_tokens.weight": ours["embedding.word_embeddings.weight"],
        "lm_head.weight": ours.get("output_layer.weight", ours["embedding.word_embeddings.weight"]),
    }
    plain = {
        "input_layernorm": "input_layernorm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "self_attention.linear_proj": "self_attn.o_proj",
        "self_attention.q_layernorm": "self_attn.q_norm",
        "self_attention.k_layernorm": "self_attn.k_norm",
        "mlp.linear_fc2": "mlp.down_proj",
        "mlp.router": "mlp.gate",
        **other_names,
    }
    experts: dict[str, dict[int, Tensor]] = {}
    for number, module, kind, tensor in _by_module(ours):
        layer = f"model.layers.{number}."
        if module == "final_layernorm":
            theirs[f"model.norm.{kind}"] = tensor
        elif module.startswith("mlp.experts."):
            _, _, expert, linear = module.split(".")
            experts.setdefault(f"{layer}mlp.experts.{EXPERTS[linear]}", {})[int(expert)] = tensor
        elif module == "mlp.shared_experts.linear_fc1":
            for name, part in zip(("gate", "up"), tensor.chunk(2), strict=True):
                theirs[f"{layer}mlp.{shared}.{name}_proj.{kind}"] = part
        elif module == "mlp.shared_experts.linear_fc2":
            theirs[f"{layer}mlp.{shared}.down_proj.{kind}"] = tensor
        elif kind == "gate_weight":
            theirs[f"{layer}mlp.{shared}_gate.weight"] = tensor
        elif module == "self_attention.linear_qkv":
            for letter, part in zip("qkv", split_qkv(tensor, config), strict=True):
                theirs[f"{layer}self_attn.{letter}_proj.{kind}"] = part
        elif module == "mlp.linear_fc1" and joined_gate:
            theirs[f"{layer}mlp.gate_up_proj.{kind}"] = tensor
        elif module == "mlp.linear_fc1" and config.arch.swiglu:
            for name, part in zip(("gate", "up"), tensor.chunk(2), strict=True):
                theirs[f"{layer}mlp.{name}_proj.{kind}"] = part
        elif module == "mlp.linear_fc1":
            theirs[f"{layer}mlp.up_proj.{kind}"] = tensor
        else:
            theirs[f"{layer}{plain[module]}.{kind}"] = tensor
    for name, by_number in experts.items():
        theirs[name] = torch.stack([by_number[number] for number in sorted(by_number)])
    return theirs


DEEPSEEK = {
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.q_layernorm": "self_attn.q_a_layernorm",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
}


def to_deepseek(ours: Mapping[str, Tensor], config: RunConfig) -> Named:
    """Names of DeepSeek V2 and V3."""
    return to_llama_like(ours, config, shared="shared_experts", other_names=DEEPSEEK)


def to_glm(ours: Mapping[str, Tensor], config: RunConfig) -> Named:
    """Names of GLM."""
    return to_llama_like(ours, config, joined_gate=True)


def to_gpt2(ours: Mapping[str, Tensor], config: RunConfig) -> Named:
    """Names of GPT-2, whose linear layers are transposed (Conv1D), with queries, keys and values in three blocks."""
    theirs: Named = {
        "transformer.wte.weight": ours["embedding.word_embeddings.weight"],
        "transformer.wpe.weight": ours["embedding.position_embeddings.weight"],
        "lm_head.weight": ours.get("output_layer.weight", ours["embedding.word_embeddings.weight"]),
    }
    names = {
        "input_layernorm": "ln_1",
        "pre_mlp_layernorm": "ln_2",
        "self_attention.linear_qkv": "attn.c_attn",
        "self_attention.linear_proj": "attn.c_proj",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    }
    for number, module, kind, tensor in _by_module(ours):
        if module == "self_attention.linear_qkv":
            tensor = torch.cat(split_qkv(tensor, config))
        prefix = "ln_f" if module == "final_layernorm" else f"h.{number}.{names[module]}"
        theirs[f"transformer.{prefix}.{kind}"] = tensor.T.contiguous() if tensor.dim() == 2 else tensor
    return theirs


def _by_module(ours: Mapping[str, Tensor]) -> Iterator[tuple[str, str, str, Tensor]]:
    """(layer number, module inside the layer, weight or bias, tensor) of the decoder's parameters."""
    for name, tensor in ours.items():
        path, kind = name.rsplit(".", 1)
        if path == "decoder.final_layernorm":
            yield "", "final_layernorm", kind, tensor
        elif path.startswith("decoder.layers."):
            number, module = path.removeprefix("decoder.layers.").split(".", 1)
            yield number, module, kind, tensor


def load_all(model: PreTrainedModel, theirs: Named) -> None:
    """Copy all parameters into a transformers model; a missing or unexpected name is an error."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert parameters.keys() == theirs.keys(), parameters.keys() ^ theirs.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            assert parameter.shape == theirs[name].shape, name
            parameter.copy_(theirs[name])


def build(model_class: type[PreTrainedModel], arch: Any, mapping: Callable[..., Named], **settings: Any) -> Any:
    """A transformers model with the architecture's sizes, in fp32 and evaluation mode; `settings` go to its config."""
    sizes: dict[str, Any] = {
        "vocab_size": arch.vocab_size,
        "tie_word_embeddings": not arch.untie_embeddings_and_output_weights,
        # the default ids exceed this vocabulary
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    if mapping is to_gpt2:
        sizes |= {
            "n_layer": arch.num_layers,
            "n_embd": arch.hidden_size,
            "n_inner": arch.ffn_hidden_size,
            "n_head": arch.num_attention_heads,
            "n_positions": arch.max_position_embeddings,
            "layer_norm_epsilon": arch.norm_epsilon,
        }
    else:
        sizes |= {
            "num_hidden_layers": arch.num_layers,
            "hidden_size": arch.hidden_size,
            "intermediate_size": arch.ffn_hidden_size,
            "num_attention_heads": arch.num_attention_heads,
            "num_key_value_heads": derived.num_query_groups(arch),
            "head_dim": derived.kv_channels(arch),
            "max_position_embeddings": 131072,
            **dict.fromkeys(("rms_norm_eps", "norm_eps", "layer_norm_eps"), arch.norm_epsilon),
        }
    config = model_class.config_class(**(sizes | settings))
    return model_class._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
