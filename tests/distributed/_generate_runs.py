"""Functions that the generation tests run on each rank, and transformers' completions."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from _bridge_runs import VOCAB, samples_of_length, transformers_model
from _layouts import layout
from _started import from_folder, refusal_of

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp2-sp": layout("tp2"),
    "tp2": layout("tp2-nosp"),
    "ep2-tp2": layout("dp2-tp2-ep2-etp1"),
    "ep2-pp2": layout("dp2-pp2-ep2"),
    **{name: layout(name) for name in ("one", "pp2", "pp2-vpp2", "dp2", "tp2-pp2", "ep2", "cp2", "cp2-tp2", "cp2-pp2")},
    **{name: layout(name) for name in ("ep2-cp2", "cp2-dp2", "dp2-overlap")},
}
DENSE = ("one", "tp2-sp", "pp2", "dp2", "tp2-pp2")
SPARSE = ("one", "tp2-sp", "ep2", "ep2-tp2", "ep2-pp2", "ep2-cp2")
CASES = [
    *(("llama", layout) for layout in (*DENSE, "tp2", "cp2-tp2", "cp2-pp2", "cp2-dp2")),
    ("llama-four-layers", "pp2-vpp2"),
    *(("gpt2", layout) for layout in (*DENSE, "cp2")),
    *(("qwen3", layout) for layout in DENSE),
    *(("mixtral", layout) for layout in SPARSE),
    *(("deepseek-v2", layout) for layout in SPARSE),
    ("mistral-window", "one"),
    ("mistral-window", "tp2-pp2"),
    ("llama3.2-tied", "tp2-pp2"),
    ("smollm3", "tp2-pp2"),
    ("seed-oss", "one"),
]
NEW_TOKENS = 12


def prompts(count: int = 5) -> list[list[int]]:
    """Random prompts of unequal lengths; the first is not the shortest."""
    import numpy

    random = numpy.random.default_rng(5)
    return [random.integers(0, VOCAB, length).tolist() for length in (9, 3, 17, 5, 1, 12, 4)[:count]]


def expected(folder: Path, max_new_tokens: int) -> list[list[int]]:
    """transformers' greedy new tokens, one prompt at a time."""
    import torch

    model = transformers_model(folder, attn_implementation="eager").eval()
    actual = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
        )
        actual.append(output[0, len(prompt) :].tolist())
    return actual


def expected_greedy(folder: Path) -> list[list[int]]:
    """`expected` with `NEW_TOKENS` tokens."""
    return expected(folder, NEW_TOKENS)


def expected_log_probs(folder: Path, completions: list[list[int]]) -> list[list[float]]:
    """transformers' log-probabilities of the tokens of a completion of each prompt."""
    import torch

    model = transformers_model(folder, attn_implementation="eager").eval()
    actual = []
    for prompt, new_ids in zip(prompts(), completions, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + new_ids])).logits[0, len(prompt) - 1 : -1]
        actual.append(logits.log_softmax(dim=-1).gather(1, torch.tensor(new_ids)[:, None])[:, 0].tolist())
    return actual


def generate(folder: str, overrides: tuple[str, ...], outputs: str, calls: list[dict[str, Any]]) -> Any:
    """The results of `wrap.generate` for each of the argument dictionaries in `calls`."""
    with from_folder(folder, overrides, outputs, training=False) as wrap:
        return [wrap.generate(**call) for call in calls]


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer of 257 entries, the last one an end token, with a chat template, into `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    bytes_alone = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_alone, eos_token="<|end|>")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer.save_pretrained(folder)


def refusals(folder: str, overrides: tuple[str, ...], outputs: str, calls: list[dict[str, Any]]) -> list[str]:
    """The error of each call of `wrap.generate`."""
    with from_folder(folder, overrides, outputs, training=False) as wrap:
        return [refusal_of(functools.partial(wrap.generate, **call)) for call in calls]


def from_rank_0(folder: str, overrides: tuple[str, ...], outputs: str) -> Any:
    """Completions of prompts that only global rank 0 passes."""
    import torch

    with from_folder(folder, overrides, outputs, training=False) as wrap:
        return wrap.generate(prompts() if torch.distributed.get_rank() == 0 else None, max_new_tokens=12)


def with_constant_shapes(folder: str, overrides: tuple[str, ...], outputs: str, padding: list[int]) -> Any:
    """As `cached_and_recomputed`, with the passes that a GPU records as a graph."""
    from unittest import mock

    with mock.patch("megatron_wrap.generation.cached_model._constant_shapes", return_value=True):
        return cached_and_recomputed(folder, overrides, outputs, padding)


def cached_and_recomputed(folder: str, overrides: tuple[str, ...], outputs: str, padding: list[int]) -> Any:
    """For each decoding step of left-padded sequences, the largest difference between its logits and those of one
    forward pass over the full sequence; on the ranks of the last pipeline stage."""
    import torch

    from megatron_wrap.evaluation.scoring import sequence_logits
    from megatron_wrap.generation.cached_model import CachedModel
    from megatron_wrap.platform.megatron_core.generation import whole_sequences

    length, prefilled = 24, 7
    tokens = torch.tensor([(prompt * length)[:length] for prompt in ([3, 141, 59], [26, 5, 35])])
    with from_folder(folder, overrides, outputs, training=False) as wrap:
        alone = [row[slots:].tolist() for row, slots in zip(tokens, padding, strict=True)]
        whole = [torch.cat([row[:1].expand(length - len(row), -1), row]) for row in sequence_logits(wrap.state, alone)]
        expected = torch.stack(whole)
        differences = []
        with (
            wrap.state.evaluation_mode(),
            whole_sequences(wrap.state.chunks),
            CachedModel(wrap.state, padding, length) as model,
        ):
            for start, stop in [(0, prefilled), *((index, index + 1) for index in range(prefilled, length))]:
                actual = model.next_logits(tokens[:, start:stop].to(wrap.platform.device))
                if actual is not None:
                    differences.append((actual.cpu() - expected[:, stop - 1]).abs().max().item())
    return differences


def train_with_generation(folder: str, overrides: tuple[str, ...], outputs: str, generates: bool) -> list[float]:
    """Losses of three steps, with or without calls of `wrap.generate` before and between them."""
    losses = []
    with from_folder(folder, overrides, outputs) as wrap:
        for batch in wrap.batches(samples_of_length(12)):
            if generates:
                wrap.generate(prompts(), max_new_tokens=4, temperature=1.0)
            losses.append(wrap.train(batch)["loss"])
            if wrap.iteration == 3:
                break
    return losses


def samples_at_evaluation(folder: str, overrides: tuple[str, ...], outputs: str, prompts: list[str]) -> Any:
    """The lines that an evaluation logs for its sample prompts, and completions of the same prompts."""
    import json

    from loguru import logger

    shown = f"megatron_lm.train.common.sample_prompts={json.dumps(prompts)}"
    lines: list[str] = []
    with from_folder(folder, (*overrides, shown), outputs) as wrap:
        sink = logger.add(lambda message: lines.append(str(message)), level="INFO")
        wrap.evaluate({"held_out": [{"text": "a few words"}]})
        logger.remove(sink)
        return [line for line in lines if "sample of" in line], wrap.generate(prompts)
