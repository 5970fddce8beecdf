"""Functions that the bridge tests run on each rank, and the transformers models that they start from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from _layouts import layout
from _started import HUGGING_FACE, from_folder, train_until

CONFIG = HUGGING_FACE
VOCAB = 301
NO_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    **NO_IDS,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (values.pop("class"), values)
    for name, values in yaml.safe_load(Path(__file__).with_name("families.yml").read_text(encoding="utf-8")).items()
}
"""Name -> transformers' class, and the values of its configuration that differ from `SIZES`."""


ZERO_CENTERED = ("qwen3-next", "qwen3.5", "qwen3.5-moe", "gemma3", "gemma2", "gemma")
"""Their norms are stored as weight - 1."""
OTHER_TYPES = {"kimi-k2": "kimi_k2"}
"""Name -> model_type that replaces transformers' in config.json."""

PARALLEL = "megatron_lm.model.parallel."
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    **{name: layout(name) for name in ("one", "tp2", "pp2", "tp2-pp2", "cp2", "ep2")},
    "ep2-tp2": layout("dp2-tp2-ep2-etp1"),
}
"""Name -> number of processes, and overrides."""

EXPERT_COUNTS = {"n_routed_experts", "num_experts", "num_local_experts"}
EXPERTS = tuple(name for name, (_, values) in FAMILIES.items() if EXPERT_COUNTS & values.keys())
NEW_FAMILIES = (
    *("smollm3", "seed-oss", "glm4-moe", "glm4-moe-plain", "moonlight", "kimi-k2", "glm4-moe-lite"),
    *("gpt-oss", "phi4-mini", "ministral", "ministral3", "mistral4", "qwen3-next", "qwen3.5", "qwen3.5-moe"),
    *("olmo2", "olmo3", "minimax-m2", "gemma3", "gemma2", "gemma"),
)
"""Trained in `test_family_steps.py`, on layouts of which logits and exports are compared on one each."""
VARIANTS = (
    *("phi3-window", "mistral-window", "llama-four-layers", "llama-biases", "llama3.1", "llama-linear-rope"),
    *("llama-yarn", "qwen2-tied", "smollm3-tied", "glm4-moe-plain", "moonlight", "phi4-mini-long"),
)
"""Cases that are split like another case; they run only on one rank and with all splits at once."""
CASES = [
    (family, name)
    for family in FAMILIES
    for name in (("one", "tp2-pp2") if family in VARIANTS else LAYOUTS)
    if family in EXPERTS or not name.startswith("ep2")
]
"""(family, layout) of each comparison with transformers on GPUs."""


def _is_on_cpus(family: str, name: str) -> bool:
    if name == "tp2-pp2" or family in ("llama", "mixtral"):
        return True
    return family not in VARIANTS and (name == "ep2-tp2" or (name == "cp2" and family not in NEW_FAMILIES))


ON_CPUS = [case for case in CASES if _is_on_cpus(*case)]
"""Cases that CPUs run: all splits at once, and each axis on which no other test compares the family. A dense model and
one with experts have all cases."""


def make_folder(
    name: str, folder: Path, changes: Mapping[str, Any] = MappingProxyType({}), **save_arguments: Any
) -> Path:
    """A random transformers model of the family, every parameter random, saved into `folder`.

    Args:
        changes: values of its configuration that differ from those in `FAMILIES`.
    """
    import torch
    import transformers

    from megatron_wrap.platform.base.machine import GPU_KERNELS, without_packages

    class_name, settings = FAMILIES[name]
    with without_packages(GPU_KERNELS):
        model_class = getattr(transformers, class_name)
    sizes = {} if class_name.startswith("GPT2") else SIZES
    config = model_class.config_class(**{**sizes, **settings, **changes})
    model = model_class._from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(21)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            norm = parameter.dim() == 1 and parameter_name.endswith("weight")
            if parameter_name.endswith("conv1d.weight"):
                noise = 4 * noise  # so that values are not much smaller than the residual stream
            center = 0.0 if name in ZERO_CENTERED and not parameter_name.endswith("linear_attn.norm.weight") else 1.0
            parameter.copy_(center + 0.3 * noise if norm else 0.15 * noise)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    _condition_delta_rule(model)
    model.save_pretrained(folder, **save_arguments)
    if name in OTHER_TYPES:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": OTHER_TYPES[name]}))
    return folder


def _condition_delta_rule(model: Any) -> None:
    """Make the weights of gated delta networks well conditioned: their states lose about 3% with each token instead of
    half, and keys are similar to queries.

    Without it the output of a head is almost zero for some tokens, mostly rounding, and the norm that follows divides
    by its size. The fp32 logits of `qwen3.5` then differ from transformers' fp64 logits by 2.6e-4 in transformers, and
    by 1.4e-4 to 2.0e-4 here on one rank, TP2 and CP2; with it by 1.8e-5, and by 1.2e-5 to 2.0e-5."""
    import torch

    with torch.no_grad():
        for layer in model.modules():
            if not hasattr(layer, "A_log"):
                continue
            layer.A_log -= 3
            heads, width = layer.num_k_heads, layer.head_k_dim
            both = 2 * heads * width
            convolution = layer.conv1d.weight[:both].unflatten(0, (2, -1))
            if hasattr(layer, "in_proj_qkv"):
                projection = layer.in_proj_qkv.weight[:both].unflatten(0, (2, -1))
            else:  # by key head
                by_head = layer.in_proj_qkvz.weight.unflatten(0, (heads, -1))[:, : 2 * width]
                projection = by_head.unflatten(1, (2, -1)).transpose(0, 1)
            for query, key in (convolution, projection):
                key.mul_(0.3).add_(query)


VISION: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ministral3": (
        "Mistral3",
        "pixtral",
        {
            **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"head_dim": 8, "image_size": 28, "patch_size": 14},
        },
    ),
    "gemma3": (
        "Gemma3",
        "siglip_vision_model",
        {
            **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"image_size": 28, "patch_size": 14, "vision_use_head": False},
        },
    ),
    **{
        name: (
            class_name,
            kind,
            {
                **{"hidden_size": 16, "intermediate_size": 24, "depth": 1, "num_heads": 2, "patch_size": 4},
                **{"out_hidden_size": SIZES["hidden_size"], "num_position_embeddings": 16},
            },
        )
        for name, class_name, kind in (
            ("qwen3.5", "Qwen3_5", "qwen3_5_vision"),
            ("qwen3.5-moe", "Qwen3_5Moe", "qwen3_5_moe_vision"),
        )
    },
}
"""Name of the text model -> transformers' class, and type and sizes of its vision encoder."""


def make_folder_with_vision(name: str, folder: Path) -> Any:
    """Save a random text model with a vision encoder; returns its logits [2, 64, V] of `token_ids` without images. Of
    Qwen3.5 as published, with layers for multi-token prediction and stacked experts."""
    import torch
    import transformers

    class_name, vision_type, sizes = VISION[name]
    text_class, text = FAMILIES[name]
    text_type = getattr(transformers, text_class).config_class.model_type
    tied = text.get("tie_word_embeddings", False)
    published = name in ("ministral3", "gemma3")
    ahead = {} if published else {"mtp_num_hidden_layers": 1}
    config = getattr(transformers, f"{class_name}Config")(
        text_config={"model_type": text_type, **SIZES, **text, **ahead},
        vision_config={"model_type": vision_type, **sizes},
        tie_word_embeddings=tied,
    )
    torch.manual_seed(5)
    model = getattr(transformers, f"{class_name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            norm = parameter.dim() == 1 and (name not in ZERO_CENTERED or "linear_attn.norm" in parameter_name)
            parameter.copy_(0.15 * torch.randn(parameter.shape) + norm)
    _condition_delta_rule(model)
    model.save_pretrained(folder, max_shard_size="100KB" if published else "1GB")
    if not published:
        _as_published(folder / "model.safetensors", text["num_hidden_layers"], text.get("num_experts", 0))
    with torch.no_grad():
        return model(input_ids=torch.tensor(token_ids())).logits.numpy()


def _as_published(file: Path, layers: int, num_experts: int) -> None:
    """Stack the experts of each layer, and add a layer for multi-token prediction like the first one; without experts
    a tensor of it."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    for layer in range(layers):
        owner = f"model.language_model.layers.{layer}.mlp.experts"
        if f"{owner}.0.gate_proj.weight" not in tensors:
            continue
        gates, ups, downs = (
            [tensors.pop(f"{owner}.{expert}.{part}_proj.weight") for expert in range(num_experts)]
            for part in ("gate", "up", "down")
        )
        tensors[f"{owner}.gate_up_proj"] = torch.cat((torch.stack(gates), torch.stack(ups)), dim=1)
        tensors[f"{owner}.down_proj"] = torch.stack(downs)
    first, hidden = "model.language_model.layers.0.", SIZES["hidden_size"]
    tensors["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden)
    if f"{first}mlp.experts.down_proj" in tensors:
        of_first = {name.removeprefix(first): tensor for name, tensor in tensors.items() if name.startswith(first)}
        tensors |= {f"mtp.layers.0.{name}": tensor + 0.1 for name, tensor in of_first.items()}
        norms = ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
        tensors |= {f"{norm}.weight": torch.randn(hidden) for norm in norms}
    save_file(tensors, file, metadata={"format": "pt"})


def transformers_model(folder: Path, **arguments: Any) -> Any:
    """transformers' model of a folder in fp32, by the class that config.json names: Kimi's type is unknown to it."""
    import torch
    import transformers

    from megatron_wrap.platform.base.machine import GPU_KERNELS, without_packages

    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    with without_packages(GPU_KERNELS):
        model_class = getattr(transformers, architecture)
    config = model_class.config_class.from_pretrained(folder)
    config.model_type = model_class.config_class.model_type  # by which the conversion of experts is found
    return model_class.from_pretrained(folder, config=config, dtype=torch.float32, **arguments)


def made_once(
    folders: Any, expected: Callable[[Path], Any], **save_arguments: Any
) -> Callable[[str], tuple[Path, Any]]:
    """original(family) -> its folder and `expected(folder)`; each is created once, with pytest's factory `folders`."""
    made: dict[str, tuple[Path, Any]] = {}

    def original(name: str) -> tuple[Path, Any]:
        if name not in made:
            folder = make_folder(name, folders.mktemp(name), **save_arguments)
            made[name] = folder, expected(folder)
        return made[name]

    return original


def stored(folder: Path) -> dict[str, Any]:
    """Every tensor of a folder's safetensors files; checks that the index names them."""
    from safetensors.torch import load_file

    stored_in = {
        name: (file.name, tensor) for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {name: file for name, (file, _) in stored_in.items()}
    return {name: tensor for name, (_, tensor) in stored_in.items()}


def token_ids(count: int = 2, length: int = 64) -> list[list[int]]:
    """The same random tokens on every rank."""
    import numpy

    return numpy.random.default_rng(22).integers(0, VOCAB, (count, length)).tolist()


def expected_logits(folder: Path) -> Any:
    """transformers' logits [2, 64, V] of a folder as a numpy array."""
    import torch

    model = transformers_model(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor(token_ids())).logits.numpy()


def logits_of(wrap: Any) -> Any:
    """Logits [2, 64, V] of `token_ids` on rank 0; None on others."""
    import numpy

    from megatron_wrap.evaluation.scoring import sequence_logits

    logits = sequence_logits(wrap.state, token_ids())
    return numpy.stack([row.float().numpy() for row in logits]) if wrap.state.parallel.world.rank == 0 else None


def logits_and_export(
    folder: str, overrides: tuple[str, ...], export_to: str, max_shard_size: str | int, keep_vision: bool = False
) -> Any:
    """Start from `folder` on the layout of `overrides`, export to `export_to`; returns `logits_of`."""
    with from_folder(folder, overrides, f"{export_to}-outputs", training=False) as wrap:
        logits = logits_of(wrap)
        wrap.save_pretrained(export_to, max_shard_size=max_shard_size)
        if keep_vision:
            wrap.save_pretrained(f"{export_to}-vision", max_shard_size="200KB", keep_vision=True)
        return logits


def samples_of_length(count: int, length: int = 40) -> list[dict[str, list[int]]]:
    """Samples of random tokens, each with a loss."""
    return [{"input_ids": ids, "loss_mask": [1] * len(ids)} for ids in token_ids(count, length)]


def train_beside_vision(folder: str, overrides: tuple[str, ...], outputs: str) -> Any:
    """Train the text model of `folder` for a step, and export it with the vision encoder to `outputs`/model; returns
    `logits_of`."""
    with from_folder(folder, overrides, outputs) as wrap:
        wrap.train(next(iter(wrap.batches(samples_of_length(8)))))
        logits = logits_of(wrap)
        wrap.save_pretrained(f"{outputs}/model", max_shard_size="100KB", keep_vision=True)
        return logits


def verify(folder: str, overrides: tuple[str, ...], outputs: str) -> Any:
    """Verdict on the folder's model, verdict after one weight of layer 2 was changed, and the unchanged weights as
    exported (name -> numpy array)."""
    import torch

    from megatron_wrap.evaluation.verify import verify_hugging_face
    from megatron_wrap.model.chunks import bare_model
    from megatron_wrap.model.initial_weights import global_names

    with from_folder(folder, (*overrides, "megatron_wrap.model_provider.verify_hf=true"), outputs) as wrap:
        good = verify_hugging_face(wrap.state)
        streamed = {name: tensor.numpy() for name, tensor in wrap.export_weights()}
        with torch.no_grad():
            for chunk in wrap.state.chunks:
                for name, parameter, _ in global_names(bare_model(chunk), tied=False):
                    if name == "decoder.layers.2.mlp.linear_fc2.weight" and wrap.tp_rank == 0:
                        parameter[3, 5] += 0.5
        bad = verify_hugging_face(wrap.state)
    return good.to_json(), bad.to_json(), streamed


def train_twice(folder: str, overrides: tuple[str, ...], outputs: str) -> Any:
    """Losses of steps 3 and 4 of an uninterrupted run, those of a run that resumes from the checkpoint of step 2, and
    the final weights as `setup_model` exports them from the last checkpoint."""
    import shutil

    from megatron_wrap.parallel.collectives import broadcast_object

    train = "megatron_lm.train.common"
    settings = (*overrides, f"{train}.save={outputs}/checkpoints", f"{train}.save_interval=2")

    def run() -> list[float]:
        with from_folder(folder, settings, outputs) as wrap:
            return [step["loss"] for step in train_until(wrap, samples_of_length(16), 4)]

    whole = run()[2:]
    with from_folder(folder, settings, outputs, training=False) as wrap:
        exported = {name: tensor.numpy() for name, tensor in wrap.export_weights()}
        wrap.save_pretrained(f"{outputs}/out")
        if wrap.state.parallel.world.rank == 0:  # back to the checkpoint of step 2
            shutil.rmtree(f"{outputs}/checkpoints/iter_0000004")
        broadcast_object(None, source_rank=0)
    return whole, run(), exported
