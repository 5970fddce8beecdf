"""transformers' Trainer on the samples of packing.py: dynamic padding, and padding-free batches
(DataCollatorWithFlattening) with flex attention or with torch's `varlen_attn` as a registered attention function. Needs
a GPU. A line with real tokens per second.

    python scripts/benchmark/packing_trainer.py {dynamic,flex,varlen} [--micro-batch-size 4] [--accumulate 32]
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
import transformers
from length_mix import mixed_samples
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY, LONGEST = 128256, 4096


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


class Timer(transformers.TrainerCallback):
    """Seconds at the end of each step, which a line of stderr reports."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.begun = time.perf_counter()

    def on_step_end(self, *arguments: Any, **named: Any) -> None:
        """Called by the Trainer."""
        torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        sys.stderr.write(f"step {len(self.ends)} at {self.ends[-1] - self.begun:.1f} s\n")


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Dynamic padding on the right."""
    width = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        tokens = torch.tensor(sample["input_ids"])
        ids[row, : len(tokens)], labels[row, : len(tokens)], mask[row, : len(tokens)] = tokens, tokens, 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def training_arguments(folder: str, micro_batch_size: int, accumulate: int, steps: int) -> TrainingArguments:
    """bf16, fused AdamW, and no saving."""
    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=micro_batch_size,
        gradient_accumulation_steps=accumulate,
        max_steps=steps,
        bf16=True,
        optim="adamw_torch_fused",
        report_to=[],
        save_strategy="no",
        logging_steps=100,
        dataloader_num_workers=4,
        disable_tqdm=True,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
    )


def main() -> None:
    """Measure one way."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=("dynamic", "flex", "varlen"))
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=32)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    attention = {"dynamic": "sdpa", "flex": "flex_attention", "varlen": "varlen"}[arguments.way]
    if attention == "varlen":
        transformers.AttentionInterface.register("varlen", varlen_attention)
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=arguments.layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=8192,
        rope_theta=5e5,
        tie_word_embeddings=False,
        attn_implementation=attention,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    count = arguments.warmup + arguments.steps
    size = arguments.micro_batch_size * arguments.accumulate
    samples = mixed_samples(size * count, LONGEST - 1, VOCABULARY)
    timer = Timer()
    collator = padded if arguments.way == "dynamic" else DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    rows = [{"input_ids": sample["input_ids"]} for sample in samples]
    with tempfile.TemporaryDirectory() as folder:
        settings = training_arguments(folder, arguments.micro_batch_size, arguments.accumulate, count)
        Trainer(model=model, args=settings, train_dataset=rows, data_collator=collator, callbacks=[timer]).train()
    tokens = [sum(len(row["input_ids"]) - 1 for row in rows[step * size : (step + 1) * size]) for step in range(count)]
    seconds = [after - before for before, after in zip(timer.ends, timer.ends[1:], strict=False)]
    rates = [num_tokens / took for num_tokens, took in zip(tokens[1:], seconds, strict=True)][arguments.warmup - 1 :]
    report = {
        "way": f"trainer-{arguments.way}",
        "micro_batch_size": arguments.micro_batch_size,
        "real_tokens_per_second": round(statistics.median(rates)),
        "rates": [round(rate) for rate in rates],
        "step_seconds": round(statistics.median(seconds[arguments.warmup - 1 :]), 4),
        "memory_max_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "transformers": transformers.__version__,
    }
    sys.stdout.write("RESULT " + json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
