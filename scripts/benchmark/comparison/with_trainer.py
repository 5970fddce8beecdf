"""transformers' Trainer and trl's SFTTrainer on transformers' own model of the same config.json, with bf16 weights,
fused AdamW and transformers' grouped experts; with adapters of peft, flex attention, Liger-Kernel and fp32 weights as
well."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import transformers

from comparison.task import Outcome, StepClock, Task

WITHOUT_SDPA = ("gpt_oss",)
"""Families whose attention torch's scaled_dot_product_attention cannot express."""


def varlen_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **named: Any
) -> tuple[Any, None]:
    """Attention within each sequence of a flattened batch, [1, heads, T, d] -> [1, T, heads, d]."""
    from torch.nn.attention.varlen import varlen_attn

    copies = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))  # torch 2.11 has no groups
    query, key, value = (tensor.squeeze(0).transpose(0, 1).contiguous() for tensor in (query, key, value))
    lengths = (named["cu_seq_lens_q"], named["cu_seq_lens_k"], int(named["max_length_q"]), int(named["max_length_k"]))
    output = varlen_attn(query, key, value, *lengths, scale=scaling, window_size=(-1, 0))
    return output.unsqueeze(0), None


class _Recorder(transformers.TrainerCallback):
    def __init__(self, clock: StepClock) -> None:
        self.clock = clock
        self.losses: list[float] = []

    def on_step_end(self, *arguments: Any, **named: Any) -> None:
        self.clock.step_ends()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **named: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


class _Rows(torch.utils.data.Dataset):
    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def run(task: Task, options: dict[str, Any]) -> Outcome:
    """Train with `options["trainer"]`: "transformers", "transformers-flex", "transformers-liger",
    "transformers-liger-fp32" (fp32 weights and moments, matmuls in bf16 by autocast) or "trl"."""
    transformers.set_seed(1234)  # the same initial weights in each run
    liger = options["trainer"].startswith("transformers-liger")
    dtype = torch.bfloat16 if task.bf16 and not options["trainer"].endswith("-fp32") else torch.float32
    attention = "flex_attention" if options["trainer"] == "transformers-flex" else _attention(task)
    with tempfile.TemporaryDirectory() as folder:
        trainer = (_trl_trainer if options["trainer"] == "trl" else _trainer)(task, folder, liger, attention, dtype)
        trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
        recorder = _Recorder(StepClock(task))
        trainer.add_callback(recorder)
        trainer.train()
        seconds = recorder.clock.measured_seconds()
    settings = _settings(task, folder)
    notes = f"transformers, {attention}, {_dtypes(task, dtype)}, {settings['optim']}"
    notes = notes.replace("transformers", "trl") if options["trainer"] == "trl" else notes
    notes += ", grouped experts" if task.num_experts else ""
    notes += ", peft" if task.lora_rank else ""
    notes += ", padding-free batches" if task.mixed_lengths else ""
    notes += ", Liger-Kernel" if liger else ""
    notes += ", gradient checkpointing" if task.recompute else ""
    return Outcome(seconds, recorder.losses, notes)


def _dtypes(task: Task, dtype: torch.dtype) -> str:
    if dtype == torch.bfloat16:
        return "bf16 weights"
    return "fp32 weights with bf16 autocast" if task.bf16 else "fp32"


def _attention(task: Task) -> str:
    """Name of the attention implementation. On a GPU, padding-free batches have attention within each sequence; sdpa
    masks the other sequences. gpt-oss has no sdpa."""
    if task.hf_config["model_type"] in WITHOUT_SDPA:
        return "eager"
    if not (task.mixed_lengths and task.platform == "cuda"):
        return "sdpa"
    transformers.AttentionInterface.register("varlen_attn", varlen_attention)
    return "varlen_attn"


def _model(task: Task, attention: str, dtype: torch.dtype) -> Any:
    experts = {"experts_implementation": "grouped_mm"} if task.num_experts else {}
    config = transformers.AutoConfig.for_model(**task.hf_config, attn_implementation=attention, **experts)
    with task.device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    if not task.lora_rank:
        return model
    import peft

    lora = peft.LoraConfig(
        r=task.lora_rank, lora_alpha=task.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, lora)


def _settings(task: Task, folder: str) -> dict[str, Any]:
    cuda = task.platform == "cuda"
    return {
        "output_dir": folder,
        "per_device_train_batch_size": task.micro_batch_size,
        "gradient_accumulation_steps": task.num_microbatches,
        "max_steps": task.warmup + task.steps,
        "bf16": task.bf16,
        "use_cpu": not cuda,
        "optim": "adamw_torch_fused" if cuda else "adamw_torch",
        "learning_rate": task.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": task.weight_decay,
        "adam_beta1": task.adam_betas[0],
        "adam_beta2": task.adam_betas[1],
        "adam_epsilon": task.adam_eps,
        "max_grad_norm": task.clip_grad,
        "gradient_checkpointing": task.recompute,
        "train_sampling_strategy": "sequential",
        "dataloader_num_workers": 4 if cuda else 0,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def _trainer(task: Task, folder: str, liger: bool, attention: str, dtype: torch.dtype) -> transformers.Trainer:
    arguments = transformers.TrainingArguments(**_settings(task, folder), use_liger_kernel=liger)
    model = _model(task, attention, dtype)
    if not task.mixed_lengths:
        return transformers.Trainer(model=model, args=arguments, train_dataset=_Rows(_rows(task)))
    arguments.remove_unused_columns = False
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=attention == "varlen_attn")
    samples: Any = [{"input_ids": tokens[:-1]} for tokens in task.samples()]
    return transformers.Trainer(model=model, args=arguments, train_dataset=samples, data_collator=collator)


def _rows(task: Task) -> torch.Tensor:
    return torch.from_numpy(task.token_rows())[:, :-1].contiguous()


def _trl_trainer(task: Task, folder: str, _liger: bool, attention: str, dtype: torch.dtype) -> transformers.Trainer:
    import datasets
    from tokenizers import Tokenizer, models
    from trl import SFTConfig, SFTTrainer

    # the trainer asks for a tokenizer, also of rows that are tokenized
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    arguments = SFTConfig(
        **_settings(task, folder), max_length=task.seq_length, dataset_kwargs={"skip_prepare_dataset": True}
    )
    tokens = list(_rows(task).numpy())
    columns = datasets.table.InMemoryTable.from_pydict({"input_ids": tokens, "labels": tokens})
    table = datasets.Dataset(columns, fingerprint="rows")  # else `datasets` pickles the content for it
    model = _model(task, attention, dtype)
    return SFTTrainer(model=model, args=arguments, train_dataset=table, processing_class=tokenizer)
