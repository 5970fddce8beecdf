"""`megatron-wrap export-hf`: write a Hugging Face folder from a checkpoint, in one process."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from megatron_wrap.checkpoint import find_checkpoint
from megatron_wrap.checkpoint.store import RESOLVED, read_facts
from megatron_wrap.cli.one_process import run_file
from megatron_wrap.config import load_resolved, load_run_config
from megatron_wrap.config.schema import SECTION_PATHS
from megatron_wrap.errors import CheckpointError

EXAMPLES = (
    (
        "the newest checkpoint of the run that scripts/run_example.sh has trained",
        "export-hf configs/tiny-llama-sft.yaml outputs/tiny-llama-sft/hf",
    ),
    (
        "one checkpoint, in bfloat16",
        "export-hf outputs/tiny-llama-sft/checkpoints/iter_0000100 outputs/tiny-llama-sft/hf-100 --dtype bfloat16",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    parser.add_argument(
        "source", metavar="RUN_OR_CHECKPOINT", help="YAML of a run, the folder of its checkpoints, or one checkpoint"
    )
    parser.add_argument("folder", metavar="FOLDER", help="folder to write")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: as trained)")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="largest weight file (default: 5GB)")
    parser.add_argument(
        "--family", metavar="MODEL_TYPE", help="a model_type of transformers (default: that of the run)"
    )
    parser.add_argument("--tokenizer", metavar="FOLDER", help="tokenizer to write (default: that of the run)")
    parser.add_argument(
        "--platform", choices=("auto", "cpu", "cuda"), default="cpu", help="device of the model (default: cpu)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the folder and prints its path."""
    from megatron_wrap.core import MegatronWrap

    checkpoint = _checkpoint(arguments.source)
    with run_file(_run_of(checkpoint, arguments)) as config, MegatronWrap(config) as wrap:
        wrap.initialize()
        wrap.setup_model()
        folder = wrap.save_pretrained(
            arguments.folder,
            max_shard_size=arguments.max_shard_size,
            dtype=arguments.dtype,
            family=arguments.family,
        )
    print(folder)
    return 0


def _checkpoint(run_or_checkpoint: str) -> Path:
    folder = run_or_checkpoint
    if os.path.isfile(folder):
        save = load_run_config(folder).train.save
        if save is None:
            raise CheckpointError(f"{folder}: megatron_lm.train.common.save is null, so the run has no checkpoint")
        folder = save
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder}: no such run or checkpoint; name a run's YAML, or a folder of checkpoints")
    found = find_checkpoint(folder)
    if found is None:
        raise CheckpointError(f"{folder}: holds no checkpoint")
    if not (found / RESOLVED).is_file():
        raise CheckpointError(f"{found}: has no {RESOLVED}, which describes the model; was it saved by Megatron-LM?")
    return found


def _run_of(checkpoint: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Content of a run's YAML with the model of the checkpoint and minimal training settings."""
    saved = load_resolved(checkpoint / RESOLVED)

    def section(name: str) -> dict[str, Any]:
        values: Any = saved
        for part in SECTION_PATHS[name].split("."):
            values = values[part]
        return dict(values)

    arch, provider, data = section("arch"), section("model_provider"), section("data")
    arch["vocab_size"] = read_facts(checkpoint).get("vocab_size", arch["vocab_size"])
    arch["max_position_embeddings"] = arch["max_position_embeddings"] or section("train")["seq_length"]
    hf_path = provider.get("hf_path")
    keep = {"hf_path": hf_path} if hf_path is not None and os.path.isdir(os.path.expanduser(hf_path)) else {}
    tokenizer = arguments.tokenizer or data.get("tokenizer")
    if tokenizer is not None and not arguments.tokenizer and not os.path.isdir(os.path.expanduser(tokenizer)):
        tokenizer = None
    # language-model-base gives no dimensions; the saved values override all its keys
    chosen = {"__select__": "language-model-base", "__override__": arch}
    dtype = {"__select__": "fp32", "__override__": {key: section("dtype")[key] for key in ("bf16", "fp16")}}
    common = {"micro_batch_size": 1, "global_batch_size": 1, "seq_length": 1, "train_iters": 1}
    return {
        "megatron_lm": {
            "model": {"arch": chosen},
            "train": {
                "common": {**common, "load": str(checkpoint.absolute()), "finetune": True},
                "learning-rate": {"lr": 0.0},
                "dtype": dtype,
            },
        },
        "megatron_wrap": {
            "init": {"platform": arguments.platform},
            "model_provider": {"__override__": {"provider_key": provider["provider_key"], **keep}},
            "data": {"__select__": "none", "__override__": {"tokenizer": tokenizer}},
            "flow": {"__select__": "minimal_mock"},
        },
    }
