"""Folders with layers for multi-token prediction, and their training by ranks and by transformers' `MtpModel`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import _bridge_runs as runs
from _hf_training_runs import BATCH, samples, settings
from _started import from_folder, train_until

STEPS, FACTOR = 5, 0.3
DEPTHS = {"deepseek-v3": 1, "glm4-moe": 2, "glm4-moe-plain": 1, "qwen3-next": 1, "qwen3.5": 1, "qwen3.5-moe": 1}
"""Family -> layers for multi-token prediction of its folder."""
OF_QWEN: dict[str, dict[str, Any]] = {
    "qwen3-next": {},
    "qwen3.5": {"full_attention_interval": 2, "tie_word_embeddings": True},
    "qwen3.5-moe": {"layer_types": ["linear_attention", "full_attention"] * 2, "tie_word_embeddings": False},
}
"""Family whose layer has names of its own (`mtp.`) -> changes of its model: the last layer has attention, since
`MtpModel` takes the class of its norms from there, and transformers' five steps in fp32 are within 1e-5 of those in
float64."""
ARCH = "megatron_lm.model.arch."


def arch_overrides(name: str) -> tuple[str, ...]:
    """Overrides of a run that trains the layers."""
    return (f"{ARCH}mtp_num_layers={DEPTHS[name]}", f"{ARCH}mtp_loss_scaling_factor={FACTOR}")


def make_folder(name: str, folder: Path) -> Path:
    """As `_bridge_runs.make_folder`, with random layers for multi-token prediction under the names of the published
    folders; those of DeepSeek and GLM contain copies of embedding and output layer."""
    import torch
    from safetensors.torch import load_file, save_file

    runs.make_folder(name, folder, OF_QWEN.get(name, {}))
    tensors, path = load_file(folder / "model.safetensors"), folder / "config.json"
    config = json.loads(path.read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    generator = torch.Generator().manual_seed(22)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator)

    last = f"model.layers.{layers - 1}."
    of_last = {key.removeprefix(last): tensor for key, tensor in tensors.items() if key.startswith(last)}
    center = 0.0 if name in runs.ZERO_CENTERED else 1.0
    for number in range(DEPTHS[name]):
        prefix = "mtp.layers.0." if name in OF_QWEN else f"model.layers.{layers + number}."
        tensors |= {prefix + key: tensor + 0.1 * random(*tensor.shape) for key, tensor in of_last.items()}
        names = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
        if name in OF_QWEN:
            prefix, names = "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
        for norm in names[:3]:
            tensors[f"{prefix}{norm}.weight"] = center + 0.3 * random(hidden)
        tensors[f"{prefix}{names[3]}.weight"] = 0.15 * random(hidden, 2 * hidden)
        if name not in OF_QWEN:
            tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[f"{prefix}shared_head.head.weight"] = tensors.get(
                "lm_head.weight", tensors["model.embed_tokens.weight"]
            ).clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    key = "mtp_num_hidden_layers" if name in OF_QWEN else "num_nextn_predict_layers"
    path.write_text(json.dumps({**config, key: DEPTHS[name]}))
    return folder


def stored(folder: Path) -> dict[str, Any]:
    """Every tensor of a folder."""
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def their_losses(model: Any, prediction: Any, batch: list[dict[str, list[int]]]) -> list[Any]:
    """Mean cross-entropy of the next token, and of each layer for multi-token prediction, of one padded batch."""
    import torch
    from torch.nn.functional import cross_entropy

    longest = max(len(sample["input_ids"]) for sample in batch)

    def padded(key: str, value: int) -> Any:
        return torch.tensor([sample[key] + [value] * (longest - len(sample[key])) for sample in batch])

    ids, labels = padded("input_ids", 0), padded("labels", -100)
    positions = torch.arange(longest)[None].expand_as(ids)
    states = model.model(input_ids=ids, position_ids=positions).last_hidden_state
    logits = [model.lm_head(states)]
    for layer in range(prediction.num_mtp_layers):
        ahead = torch.nn.functional.pad(ids[:, layer + 1 :], (0, layer + 1))
        states = prediction.forward_layer(layer, states, positions, None, input_ids=ahead)
        logits.append(prediction.shared_head(states))
    return [
        cross_entropy(of_layer[:, : -1 - ahead].flatten(0, 1), labels[:, 1 + ahead :].flatten())
        for ahead, of_layer in enumerate(logits)
    ]


def train_transformers(folder: Path) -> tuple[list[tuple[float, float]], list[list[float]]]:
    """(objective, gradient norm before clipping) of each step, as `_hf_training_runs.train_transformers`; and the mean
    losses of the layers for multi-token prediction in it."""
    import torch
    from _hf_training_runs import CLIP, DECAY, RATE, WARMUP
    from transformers import get_cosine_schedule_with_warmup
    from transformers.modeling_layers import MtpModel

    model = runs.transformers_model(folder, attn_implementation="eager")
    if hasattr(model.config, "layer_types"):  # of Qwen's layer it has the names, but not how many there are
        model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    else:  # the patterns of the class have the layer numbers of the published folders alone
        first = model.config.num_hidden_layers
        numbers = range(first, first + model.config.num_mtp_layers)
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{number}.*" for number in numbers]
    prediction = MtpModel.from_pretrained(model)
    parameters = [*model.parameters(), *prediction.layers.parameters()]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1]},
        {"params": [parameter for parameter in parameters if parameter.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY)
    schedule = get_cosine_schedule_with_warmup(optimizer, WARMUP, STEPS)
    batches = samples(STEPS * BATCH, seed=31)
    steps, of_layers = [], []
    for step in range(STEPS):
        loss_of_next, *ahead = their_losses(model, prediction, batches[step * BATCH : (step + 1) * BATCH])
        loss = loss_of_next + FACTOR * sum(ahead) / len(ahead)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        steps.append((loss.item(), norm.item()))
        of_layers.append([value.item() for value in ahead])
    return steps, of_layers


def _of_steps(wrap: Any, save_at: tuple[int, ...] = ()) -> list[tuple[float, float, list[float]]]:
    """(objective, gradient norm, mean losses of the layers for multi-token prediction) of each step taken here."""
    taken = train_until(wrap, samples(STEPS * BATCH, seed=31), STEPS, save_at)
    return [
        (step["loss"], step["grad_norm"], [value for name, value in step.items() if name.startswith("mtp_")])
        for step in taken
    ]


def train_ours(
    folder: str, overrides: tuple[str, ...], outputs: str, exported: tuple[str, ...] = ()
) -> tuple[list[tuple[float, float]], list[list[float]]]:
    """The same by ranks. Writes the model before the first step to `outputs`/before, if `exported` has before, and that
    after the last step to `outputs`/after."""
    with from_folder(folder, (*settings(STEPS), *overrides), outputs) as wrap:
        if "before" in exported:
            wrap.save_pretrained(f"{outputs}/before")
        steps = _of_steps(wrap)
        if "after" in exported:
            wrap.save_pretrained(f"{outputs}/after")
    return [step[:2] for step in steps], [step[2] for step in steps]


def train_saving(folder: str, overrides: tuple[str, ...], outputs: str, save_after: int | None) -> list[Any]:
    """(loss, gradient norm, losses of the layers for multi-token prediction) of each step: all of them with one
    checkpoint in `outputs`/saved after `save_after`, or those after it."""
    key = f"megatron_lm.train.common.{'save' if save_after is not None else 'load'}={outputs}/saved"
    with from_folder(folder, (*settings(STEPS), *overrides, key), outputs) as wrap:
        return [(*values, *ahead) for *values, ahead in _of_steps(wrap, (save_after,))]
