"""Functions that the adapter tests run on each rank, and peft's side of each comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import _bridge_runs as bridge
import numpy

STEPS, BATCH, RATE = 5, 4, 2e-3
SELECT = "megatron_wrap.adapter.__select__=lora"
SETTINGS = (
    SELECT,
    f"megatron_lm.train.common.train_iters={STEPS}",
    f"megatron_lm.train.common.global_batch_size={BATCH}",
    "megatron_lm.train.common.micro_batch_size=2",
    f"megatron_lm.train.learning-rate.lr={RATE}",
    f"megatron_lm.train.learning-rate.min_lr={RATE}",
    "megatron_lm.train.learning-rate.lr_decay_style=constant",
    "megatron_lm.train.optimizer.weight_decay=0.1",
    "megatron_lm.train.optimizer.clip_grad=1.0",
    "megatron_lm.train.optimizer.adam_beta2=0.95",
    "megatron_lm.train.optimizer.adam_eps=1e-8",
    "megatron_lm.model.arch.hidden_dropout=0.0",  # GPT-2's folder has 0.1
    "megatron_lm.model.arch.attention_dropout=0.0",
)


def samples(count: int) -> list[dict[str, list[int]]]:
    """Tokenized samples of unequal lengths; some labels are -100."""
    generator = numpy.random.default_rng(31)
    made = []
    for _ in range(count):
        ids = generator.integers(0, 40, int(generator.integers(20, 62)))
        labels = numpy.where(generator.random(len(ids)) < 0.6, ids, -100)
        made.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return made


def overrides_of(adapter: dict[str, Any]) -> tuple[str, ...]:
    """The keys of megatron_wrap.adapter as overrides."""
    import json

    return tuple(f"megatron_wrap.adapter.{key}={json.dumps(value)}" for key, value in adapter.items())


def factors_of(wrap: Any) -> dict[str, Any]:
    """peft's name -> whole factor, on every rank."""
    return {name: tensor.float().numpy().copy() for name, tensor in wrap.export_weights(adapter=True)}


def train(folder: str, overrides: tuple[str, ...], outputs: str, count: int = STEPS) -> Any:
    """(loss, gradient norm) of each step, factors before and after them, logits [2, 64, V] with and without the
    adapter, and whether the base is unchanged: its weights, and bit for bit the logits without the adapter."""
    import torch

    from megatron_wrap.core import MegatronWrap
    from megatron_wrap.evaluation.scoring import sequence_logits
    from megatron_wrap.nn.adapters.lora import only_adapter

    settings = (*SETTINGS, *overrides, f"megatron_wrap.logger.output_dir={outputs}")
    batches = samples(STEPS * BATCH)
    with MegatronWrap.from_pretrained(folder, bridge.CONFIG, settings) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        frozen = [(p, p.detach().clone()) for c in wrap.state.chunks for p in c.parameters() if not p.requires_grad]
        initial = factors_of(wrap)
        with only_adapter(wrap.state.chunks, None):
            before = sequence_logits(wrap.state, bridge.token_ids())
        steps = []
        for step in range(count):
            metrics = wrap.train(batches[step * BATCH : (step + 1) * BATCH])
            steps.append((metrics["loss"], metrics["grad_norm"]))
        factors = factors_of(wrap)
        logits = sequence_logits(wrap.state, bridge.token_ids())
        with only_adapter(wrap.state.chunks, None):
            base = sequence_logits(wrap.state, bridge.token_ids())
        unchanged = bool(frozen) and all(torch.equal(parameter, before) for parameter, before in frozen)
        unchanged &= all(map(torch.equal, before, base))
        wrap.save_pretrained(f"{outputs}/adapter")
        wrap.save_pretrained(f"{outputs}/merged", merge=True)
        if wrap.state.parallel.world.rank == 0:
            return steps, initial, factors, stack(logits), stack(base), unchanged
    return None


def train_without_a_folder(overrides: tuple[str, ...], outputs: str) -> tuple[float, bool, list[float]]:
    """Largest difference of logits with and without the adapter before training, whether 20 steps leave the frozen
    weights as they are, and the losses."""
    import torch

    from megatron_wrap.core import MegatronWrap
    from megatron_wrap.evaluation.scoring import sequence_logits
    from megatron_wrap.nn.adapters.lora import only_adapter

    config = Path(__file__).parents[2] / "scripts" / "benchmark" / "overhead.yaml"
    settings = [
        *(SELECT, *overrides, "megatron_wrap.init.platform=cpu", f"megatron_wrap.logger.output_dir={outputs}"),
        *("megatron_lm.model.arch.hidden_size=32", "megatron_lm.model.arch.ffn_hidden_size=64"),
        *("megatron_lm.model.arch.num_layers=2", "megatron_lm.model.arch.vocab_size=301"),
        *(f"megatron_lm.train.common.global_batch_size={BATCH}", "megatron_lm.train.common.train_iters=20"),
        *("megatron_lm.train.learning-rate.lr=1e-2", "megatron_lm.train.learning-rate.lr_warmup_iters=0"),
    ]
    with MegatronWrap(config, settings) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        chunks = wrap.state.chunks
        frozen = [(p, p.detach().clone()) for c in chunks for p in c.parameters() if not p.requires_grad]
        logits = stack(sequence_logits(wrap.state, bridge.token_ids()))
        with only_adapter(chunks, None):
            base = stack(sequence_logits(wrap.state, bridge.token_ids()))
        losses = [wrap.train(samples(BATCH))["loss"] for _ in range(20)]
        unchanged = bool(frozen) and all(torch.equal(parameter, before) for parameter, before in frozen)
        return float(numpy.abs(logits - base).max()), unchanged, losses


def determined(name: str, values: Any) -> Any:
    """The values without those of GPT-2's key biases: a softmax is invariant to them, so their gradient is rounding,
    from which Adam makes steps of its whole learning rate."""
    if not name.endswith("attn.c_attn.base_layer.bias"):
        return values
    queries, _, tokens = numpy.split(values, 3)
    return numpy.concatenate([queries, tokens])


def copy_of(folder: str, target: Path) -> Path:
    """A folder with the same weights and another config.json."""
    import shutil

    copied = Path(shutil.copytree(folder, target / "copy"))
    (copied / "config.json").write_text((copied / "config.json").read_text() + "\n")
    return copied


def with_other_weights(folder: str, target: Path) -> Path:
    """A folder of the same model with other weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    model.save_pretrained(target / "other")
    return target / "other"


def train_and_resume(
    folder: str, overrides: tuple[str, ...], outputs: str, stop: int, back_to: int | None
) -> tuple[list[tuple[float, float]], list[str]]:
    """(loss, gradient norm) of the steps until `stop`, of a run that resumes if it can; names in its last checkpoint.

    Args:
        back_to: remove later checkpoints first, so that the run resumes from that of this iteration.
    """
    import shutil

    from megatron.core import dist_checkpointing

    from megatron_wrap.core import MegatronWrap
    from megatron_wrap.parallel.collectives import broadcast_object

    save = f"{outputs}/checkpoints"
    settings = (
        *SETTINGS,
        "megatron_wrap.adapter.r=4",
        *overrides,
        f"megatron_wrap.logger.output_dir={outputs}",
        f"megatron_lm.train.common.save={save}",
        "megatron_lm.train.common.save_interval=1",
    )
    batches, steps = samples(STEPS * BATCH), []
    if back_to is not None:
        for path in Path(save).glob("iter_*"):
            if int(path.name[5:]) > back_to:
                shutil.rmtree(path, ignore_errors=True)
        broadcast_object(None, source_rank=0)
    with MegatronWrap.from_pretrained(folder, bridge.CONFIG, settings) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        while wrap.iteration < stop:
            step = wrap.iteration
            metrics = wrap.train(batches[step * BATCH : (step + 1) * BATCH])
            steps.append((metrics["loss"], metrics["grad_norm"]))
            wrap.save()
    saved = dist_checkpointing.serialization.load_sharded_metadata(f"{save}/iter_{stop:07d}")
    return steps, [entry.key for entry in saved.values() if "rng" not in entry.key]


def gradients(folder: str, overrides: tuple[str, ...], outputs: str) -> Any:
    """Global name -> gradient of each factor of the first step."""
    from megatron_wrap.core import MegatronWrap
    from megatron_wrap.engine.step import gradients_of_batch
    from megatron_wrap.testing.gradients import gather_gradients

    settings = (*SETTINGS, *overrides, f"megatron_wrap.logger.output_dir={outputs}")
    with MegatronWrap.from_pretrained(folder, bridge.CONFIG, settings) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        gradients_of_batch(wrap.state, samples(BATCH))
        return {name: values.numpy() for name, values in gather_gradients(wrap.state).items()}


def load(folder: str, overrides: tuple[str, ...], outputs: str) -> Any:
    """Factors and logits [2, 64, V] of a model, or of peft's folder, that is not trained."""
    from megatron_wrap.core import MegatronWrap
    from megatron_wrap.evaluation.scoring import sequence_logits

    settings = (*SETTINGS[1:], *overrides, f"megatron_wrap.logger.output_dir={outputs}")
    with MegatronWrap.from_pretrained(folder, bridge.CONFIG, settings) as wrap:
        wrap.initialize()
        wrap.setup_model()
        logits, factors = sequence_logits(wrap.state, bridge.token_ids()), factors_of(wrap)
        return (factors, stack(logits)) if wrap.state.parallel.world.rank == 0 else None


def train_dpo(folder: str, reference: Any, overrides: tuple[str, ...], outputs: str) -> list[dict[str, float]]:
    """Loss, gradient norm and rewards of each step of DPO."""
    import json

    from megatron_wrap.core import MegatronWrap

    settings = (
        *SETTINGS,
        "megatron_wrap.adapter.r=4",
        "megatron_wrap.flow.__select__=gpt_dpo",
        f"megatron_wrap.models.reference={json.dumps(reference)}",
        *overrides,
        f"megatron_wrap.logger.output_dir={outputs}",
    )
    ids = [sample["input_ids"] for sample in samples(3 * BATCH * STEPS)]
    pairs = [
        {"prompt_ids": prompt[:9], "chosen_ids": chosen[:15], "rejected_ids": rejected[:12]}
        for prompt, chosen, rejected in zip(ids[::3], ids[1::3], ids[2::3], strict=True)
    ]
    kept = []
    with MegatronWrap.from_pretrained(folder, bridge.CONFIG, settings) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        for step in range(STEPS):
            metrics = wrap.train(pairs[step * BATCH : (step + 1) * BATCH])
            kept.append({name: metrics[name] for name in ("loss", "grad_norm", "rewards/margins", "rewards/chosen")})
    return kept


def stack(logits: Any) -> Any:
    """[2, 64, V] of sequences' logits."""
    return numpy.stack([row.float().numpy() for row in logits])


def train_peft(peft: Any) -> list[tuple[float, float]]:
    """(loss, gradient norm) of the same steps by peft and torch's AdamW."""
    import torch
    from test_hf_training import their_loss

    trained = [parameter for parameter in peft.parameters() if parameter.requires_grad]
    vectors = [parameter for parameter in trained if parameter.dim() == 1]  # no decay, as in Megatron-Core
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    batches = samples(STEPS * BATCH)
    steps = []
    for step in range(STEPS):
        loss = their_loss(peft, batches[step * BATCH : (step + 1) * BATCH])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), norm.item()))
    return steps


def trained_of(adapter: dict[str, Any], factors: dict[str, Any]) -> dict[str, Any]:
    """The trained factors of an exported adapter, which with PiSSA also has the initial ones."""
    if adapter.get("init_lora_weights") != "pissa":
        return factors
    return {
        name: values[: len(values) // 2] if "lora_A" in name else values[:, : values.shape[1] // 2]
        for name, values in factors.items()
    }


def peft_factors(peft: Any) -> dict[str, Any]:
    """Name in peft's files -> trained parameter."""
    return {name: value.detach().numpy() for name, value in _trained(peft).items()}


def _trained(peft: Any) -> dict[str, Any]:
    named = ((name, value) for name, value in peft.named_parameters() if value.requires_grad)
    norms = ".lora_magnitude_vector"
    named = ((name.replace(f"{norms}.default.weight", norms), value) for name, value in named)
    named = ((name.replace(".modules_to_save", "").replace(".default.", "."), value) for name, value in named)
    return {name.removesuffix(".default"): value for name, value in named}  # rows of tokens


def peft_logits(peft: Any) -> Any:
    """[2, 64, V] of `_bridge_runs.token_ids`."""
    import torch

    with torch.no_grad():
        return peft(torch.tensor(bridge.token_ids())).logits.numpy()


def peft_model(folder: Path, adapter: dict[str, Any], factors: dict[str, Any] | None = None) -> Any:
    """peft's model of a folder with new factors, or with those given under peft's names."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    options = {"target_modules": "all-linear", **adapter}
    peft = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out="gpt2" in str(folder), **options))
    if factors is not None:
        weights = _trained(peft)
        assert weights.keys() == factors.keys(), weights.keys() ^ factors.keys()
        with torch.no_grad():
            for name, value in factors.items():
                weights[name].copy_(torch.from_numpy(value))
    return peft


def train_quantized(folder: str, overrides: tuple[str, ...], outputs: str) -> Any:
    """(loss, gradient norm) of three steps with a quantized base and with an ordinary one with the same values, the
    factors of both, the quantized values' relative error, and their share of the memory of this rank's weights."""
    import torch

    from megatron_wrap.core import MegatronWrap
    from megatron_wrap.model.fp8_parameters import in_high_precision
    from megatron_wrap.nn.layers.quantized_weights import quantized_of

    results: dict[bool, Any] = {}
    kept: dict[str, Any] = {}
    errors, memory = [], [0, 0]
    for quantized in (True, False):
        settings = (*SETTINGS, *overrides, f"megatron_wrap.logger.output_dir={outputs}/{quantized}")
        settings += () if quantized else ("megatron_wrap.adapter.base_weights=bf16",)
        with MegatronWrap.from_pretrained(folder, bridge.CONFIG, settings) as wrap:
            wrap.initialize()
            wrap.setup_model_and_optimizer()
            for name, parameter in (pair for chunk in wrap.state.chunks for pair in chunk.named_parameters()):
                if quantized and (weight := quantized_of(parameter)) is not None:
                    kept[name] = in_high_precision(parameter)
                    memory[0] += weight.nbytes + parameter.untyped_storage().nbytes()
                    memory[1] += parameter.nbytes
                elif name in kept:
                    errors.append((kept[name] - parameter.detach()).norm() / parameter.norm())
                    parameter.data.copy_(kept[name])
            assert not quantized or all("linear_" in name for name in kept)
            batches = samples(STEPS * BATCH)
            steps = []
            for step in range(3):
                metrics = wrap.train(batches[step * BATCH : (step + 1) * BATCH])
                steps.append((metrics["loss"], metrics["grad_norm"]))
            results[quantized] = steps, factors_of(wrap)
    assert len(kept) == len(errors) >= 4
    error = float(torch.stack(errors).max())
    return results[True][0], results[False][0], results[True][1], results[False][1], error, memory[0] / memory[1]


def merge_refusal(folder: str, overrides: tuple[str, ...], outputs: str) -> str:
    """The error of merging into the base, and of streaming merged weights."""
    from megatron_wrap.core import MegatronWrap
    from megatron_wrap.errors import ConfigError

    settings = (*SETTINGS, *overrides, f"megatron_wrap.logger.output_dir={outputs}")
    with MegatronWrap.from_pretrained(folder, bridge.CONFIG, settings) as wrap:
        wrap.initialize()
        wrap.setup_model()
        messages = set()
        for export in (lambda: wrap.save_pretrained(f"{outputs}/merged", merge=True), lambda: [*wrap.export_weights()]):
            try:
                export()
            except ConfigError as error:
                messages.add(str(error))
        wrap.save_pretrained(f"{outputs}/adapter")
    (message,) = messages
    return message


def with_named_adapters(folder: str, others: dict[str, str], overrides: tuple[str, ...], outputs: str) -> Any:
    """Logits [2, 64, V] before and after two steps: {name: with this adapter}, completions of each, the error of
    training within the context, and the names in the checkpoint."""
    from megatron.core import dist_checkpointing

    from megatron_wrap.core import MegatronWrap
    from megatron_wrap.errors import TrainingError
    from megatron_wrap.evaluation.scoring import sequence_logits

    settings = (
        *(*SETTINGS, "megatron_wrap.adapter.r=4", *overrides, *overrides_of({"others": others})),
        f"megatron_wrap.logger.output_dir={outputs}",
        f"megatron_lm.train.common.save={outputs}/checkpoints",
    )
    batches, prompts = samples(2 * BATCH), [list(range(5, 12)), list(range(20, 25))]
    with MegatronWrap.from_pretrained(folder, bridge.CONFIG, settings) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()

        def computed() -> dict[Any, Any]:
            results = {}
            for name in (None, "default", *others):
                with wrap.adapter(name):
                    tokens = [completion["token_ids"] for completion in wrap.generate(prompts, max_new_tokens=6)]
                    results[name] = stack(sequence_logits(wrap.state, bridge.token_ids())), tokens
            results["outside"] = stack(sequence_logits(wrap.state, bridge.token_ids())), results["default"][1]
            return results

        before = computed()
        for step in range(2):
            wrap.train(batches[step * BATCH : (step + 1) * BATCH])
        after = computed()
        refused = ""
        with wrap.adapter(None):
            try:
                wrap.train(batches[:BATCH])
            except TrainingError as error:
                refused = str(error)
        path = wrap.save()
        names = sorted(dist_checkpointing.load_tensors_metadata(str(path)))
        return before, after, refused, names


def _growing(folder: str, new: list[str], overrides: tuple[str, ...], outputs: str) -> tuple[str, ...]:
    import json

    return (
        *SETTINGS[1:],
        *overrides,
        f"megatron_wrap.data.new_tokens={json.dumps(new)}",
        f"megatron_wrap.data.tokenizer={folder}",
        f"megatron_wrap.logger.output_dir={outputs}",
    )


def grow_and_export(folder: str, new: list[str], overrides: tuple[str, ...], outputs: str) -> None:
    """Write the model with new tokens, without a step."""
    from megatron_wrap.core import MegatronWrap

    with MegatronWrap.from_pretrained(folder, bridge.CONFIG, _growing(folder, new, overrides, outputs)) as wrap:
        wrap.initialize()
        wrap.setup_model()
        wrap.save_pretrained(f"{outputs}/model")


def grow_and_train(folder: str, new: list[str], overrides: tuple[str, ...], outputs: str) -> Any:
    """Logits [2, 64, V] after two steps on samples with new tokens, and those of a run that resumes from them."""
    from megatron_wrap.core import MegatronWrap
    from megatron_wrap.evaluation.scoring import sequence_logits

    settings = (*_growing(folder, new, overrides, outputs), f"megatron_lm.train.common.save={outputs}/checkpoints")
    batches = samples(2 * BATCH)
    for number, sample in enumerate(batches):
        sample["input_ids"][3] = sample["labels"][3] = bridge.VOCAB + number % max(1, len(new)) - (not new)
    logits = []
    for resumed in (False, True):
        with MegatronWrap.from_pretrained(folder, bridge.CONFIG, settings) as wrap:
            wrap.initialize()
            wrap.setup_model_and_optimizer()
            for step in range(0 if resumed else 2):
                wrap.train(batches[step * BATCH : (step + 1) * BATCH])
            logits.append(stack(sequence_logits(wrap.state, bridge.token_ids())))
            if not resumed:
                wrap.save()
                wrap.save_pretrained(f"{outputs}/adapter")
    return logits
