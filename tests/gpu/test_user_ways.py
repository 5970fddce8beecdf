"""The ways of a user as commands, on one GPU with its default layers, on a machine without GPUs on CPUs: what is
trained is saved, resumed, exported, and completes prompts as transformers does. Losses are finite; numbers are compared
elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from _implementations import HAS_TE
from _interpreters import forked_interpreters

ROOT = Path(__file__).parents[2]
ON_GPU = torch.cuda.is_available()
IMPLEMENTATIONS = ["torch", "auto"] if ON_GPU and HAS_TE else ["torch"]
COMMON, ARCH, DTYPE = "megatron_lm.train.common", "megatron_lm.model.arch", "megatron_lm.train.dtype"
ONE = tuple(f"megatron_lm.model.parallel.{key}" for key in ("tensor_model_parallel_size=1", "sequence_parallel=false"))
BF16 = f"{DTYPE}.__select__={'bf16' if ON_GPU else 'fp32'}"
PROMPT = "<|begin|><|user|>\nWhat does the function `len` do?<|end|>\n<|assistant|>\n"
GENERATE = """
import json, sys
from megatron_wrap.core import MegatronWrap
from pathlib import Path
folder, config, implementation, prompts, output = sys.argv[1:6]
overrides = [*sys.argv[6:], f"megatron_lm.model.arch.transformer_impl={implementation}"]
with MegatronWrap.from_pretrained(folder, config, overrides) as wrap:
    wrap.initialize()
    wrap.setup_model()
    completions = wrap.generate(json.loads(prompts), max_new_tokens=20)
Path(output).write_text(json.dumps([completion["token_ids"] for completion in completions]))
"""

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(240 if ON_GPU else 600)]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Sample data and tokenizer."""
    folder = tmp_path_factory.mktemp("data") / "generated"
    subprocess.run([sys.executable, ROOT / "examples/data/build.py", "--output", folder], check=True)
    return folder


@pytest.fixture(scope="module")
def begin(data, tmp_path_factory) -> Path:
    """A Hugging Face folder: a small random Llama with the data's tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "begin"
    make = ROOT / "examples/from_hugging_face/make_model.py"
    subprocess.run([sys.executable, make, folder, data / "tokenizer"], check=True)
    return folder


@pytest.fixture
def run(tmp_path):
    """run(words...) -> standard output and errors of `python words...` in an empty folder, whose exit code is 0."""

    def command(*words: object) -> str:
        unset = ("GPUS_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
        with contextlib.nullcontext() if ON_GPU else forked_interpreters():
            ended = subprocess.run(
                [sys.executable, *map(str, words)],
                cwd=tmp_path,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        assert ended.returncode == 0, f"exit code {ended.returncode}: {' '.join(map(str, words))}\n{ended.stdout}"
        return ended.stdout

    return command


@pytest.fixture
def wrap(run):
    """wrap(words...) -> what `megatron-wrap words...` prints."""
    return lambda *words: run("-m", "megatron_wrap.cli.main", *words)


@pytest.fixture
def train(wrap, data, tmp_path):
    """train(config, overrides...) -> the metrics of each iteration, in the order of metrics.jsonl."""

    def trained(config: str, *overrides: str, rows: tuple[str, str] | None = ("train", "validation"), **keys: object):
        keys = {"train_iters": 3, "log_interval": 1, "eval_interval": 3, "eval_iters": 1, "seq_length": 128, **keys}
        keys = {"save": tmp_path / "checkpoints", **keys}
        files = () if rows is None else (f"train={data / rows[0]}.jsonl", f"validation={data / rows[1]}.jsonl")
        wrap(
            "train",
            ROOT / config,
            *(f"{COMMON}.{key}={value}" for key, value in keys.items()),
            *(f"megatron_wrap.data.{file}" for file in files),
            f"megatron_wrap.logger.output_dir={tmp_path / 'out'}",
            *ONE,
            *overrides,
        )
        lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "loss" in line]
        assert all(line["loss"] == line["loss"] for line in steps)
        return steps

    return trained


def tokenizer_of(folder: Path) -> str:
    return f"megatron_wrap.data.tokenizer={folder / 'tokenizer'}"


def expected_greedy(folder: Path, prompts: list[str]) -> list[list[int]]:
    """transformers' greedy tokens in fp32 on the CPU."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokens = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), []
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        tokens.append(model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :].tolist())
    return tokens


def test_fine_tuning_resumed_exported_and_asked(begin, train, wrap, run, tmp_path):
    """In fp32, so that the greedy tokens of both layer implementations are those of transformers."""
    sft, prompts = "examples/from_hugging_face/sft.yaml", [PROMPT, "len"]
    options = (
        f"megatron_wrap.model_provider.hf_path={begin}",
        f"{COMMON}.sample_prompts={json.dumps(prompts)}",
        "megatron_lm.train.learning-rate.lr_decay_iters=4",
    )
    assert len(train(sft, *options, train_iters=2, eval_interval=2, save_interval=2)) == 2
    steps = train(sft, *options, train_iters=4, eval_interval=2, save_interval=2)
    assert [step["iteration"] for step in steps] == [1, 2, 3, 4]
    wrap("export-hf", tmp_path / "checkpoints", tmp_path / "hf")
    expected = expected_greedy(tmp_path / "hf", prompts)
    (tmp_path / "generate.py").write_text(GENERATE)
    in_fp32 = (f"{DTYPE}.__select__=fp32", f"megatron_wrap.logger.output_dir={tmp_path / 'generate'}")
    for implementation in IMPLEMENTATIONS:
        output = tmp_path / f"{implementation}.json"
        config = ROOT / "tests/distributed/hugging_face.yaml"
        run("generate.py", tmp_path / "hf", config, implementation, json.dumps(prompts), output, *in_fp32)
        tokens = json.loads(output.read_text())
        assert tokens == [each[: len(mine)] for each, mine in zip(expected, tokens, strict=True)]
        assert all(len(mine) == 20 or mine == each for each, mine in zip(expected, tokens, strict=True))
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "What is a list?"}]}))
    answers = ("--prompts", tmp_path / "prompts.jsonl", "--output", tmp_path / "answers.jsonl", "--max-new-tokens", 8)
    wrap("chat", tmp_path / "checkpoints", *answers)
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 1


def test_preference_optimization(train, data):
    rows = ("preference-train", "preference-validation")
    train("configs/tiny-llama-dpo.yaml", tokenizer_of(data), BF16, rows=rows)


def test_policy_optimization_with_its_own_rollouts(run, tmp_path):
    options = (f"{COMMON}.{key}" for key in ("train_iters=3", "eval_interval=3", "save_interval=3", "log_interval=1"))
    folders = (f"{COMMON}.save={tmp_path / 'checkpoints'}", f"megatron_wrap.logger.output_dir={tmp_path / 'out'}")
    tokenizer = f"megatron_wrap.data.tokenizer={ROOT / 'examples/grpo/tokenizer'}"
    run(ROOT / "examples/grpo/train.py", *options, *folders, tokenizer, BF16)
    assert len((tmp_path / "out/rollouts.jsonl").read_text().splitlines()) == 3


def test_an_adapter_trained_and_merged(begin, train, wrap, run, tmp_path):
    """In fp32, as in which peft adds the adapter to the folder's weights."""
    train("examples/lora/lora.yaml", f"megatron_wrap.model_provider.hf_path={begin}")
    wrap("export-hf", tmp_path / "checkpoints", tmp_path / "adapter")
    wrap("export-hf", tmp_path / "checkpoints", tmp_path / "merged", "--merge")
    run(ROOT / "examples/lora/with_peft.py", tmp_path / "adapter", tmp_path / "merged")


def test_a_mixture_of_experts(train, data):
    one = "megatron_lm.model.parallel.expert_model_parallel_size=1"
    train("configs/tiny-mixtral-sft.yaml", tokenizer_of(data), BF16, one)


def test_linear_attention(train, data, tmp_path):
    import _bridge_runs

    folder = _bridge_runs.make_folder("qwen3.5", tmp_path / "linear", {"vocab_size": 4096})
    provider = ("megatron_wrap.model_provider.verify_hf=false", f"megatron_wrap.model_provider.hf_path={folder}")
    steps = train("examples/from_hugging_face/sft.yaml", *provider, tokenizer_of(data), BF16)
    assert len(steps) == 3


@pytest.mark.skipif(not ON_GPU or not HAS_TE, reason="FP8 needs a GPU and Transformer Engine")
def test_training_in_fp8(train, data):
    options = (f"{DTYPE}.fp8=hybrid", f"{DTYPE}.fp8_recipe=delayed")
    train("configs/tiny-llama-sft.yaml", tokenizer_of(data), BF16, *options)


def test_packed_rows(train, data):
    train("configs/tiny-llama-sft.yaml", tokenizer_of(data), BF16, "megatron_wrap.flow.packing=true")


def test_the_profile_of_a_step(wrap, data, tmp_path):
    files = (f"{name}={data / name}.jsonl" for name in ("train", "validation"))
    options = (*(f"megatron_wrap.data.{file}" for file in files), tokenizer_of(data), *ONE, BF16)
    options += (f"{COMMON}.seq_length=128",)
    steps = ("--steps", 1, "--warmup", 2, "--output", tmp_path / "profile")
    wrap("profile", ROOT / "configs/tiny-llama-sft.yaml", *options, *steps)
    [table] = (tmp_path / "profile").glob("*/profile.txt")
    assert "matmuls" in table.read_text()


def test_an_asynchronous_save_is_resumed(train, data):
    options = (tokenizer_of(data), BF16, "megatron_wrap.checkpoint.async_save=true")
    options += ("megatron_lm.train.learning-rate.lr_decay_iters=4",)
    train("configs/tiny-llama-sft.yaml", *options, train_iters=2, eval_interval=2, save_interval=1)
    steps = train("configs/tiny-llama-sft.yaml", *options, train_iters=3, eval_interval=2, save_interval=1)
    assert [step["iteration"] for step in steps] == [1, 2, 3]


@pytest.mark.gpus(2)
def test_layouts_agree(wrap, data):
    files = (f"{name}={data / name}.jsonl" for name in ("train", "validation"))
    options = (*(f"megatron_wrap.data.{file}" for file in files), tokenizer_of(data), f"{COMMON}.seq_length=64")
    printed = wrap(
        "check-parity",
        ROOT / "configs/tiny-llama-sft.yaml",
        *options,
        "--layouts",
        "dp2,tp2-sp,cp2",
        "--platform",
        "cuda" if ON_GPU else "cpu",
    )
    assert "tp2-sp" in printed
