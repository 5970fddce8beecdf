"""`megatron-wrap export-hf`: write a Hugging Face folder from a checkpoint, in one process."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from megatron_wrap.bridge.loading.hub import read_run_content
from megatron_wrap.checkpoint.precheck import find_checkpoint
from megatron_wrap.checkpoint.saved_run import SavedRun, read_saved_run
from megatron_wrap.checkpoint.store import RESOLVED
from megatron_wrap.config import load_run_config
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
    saved = read_saved_run(checkpoint)
    if saved is None:
        raise CheckpointError(
            f"{checkpoint}: has no {RESOLVED}, which describes the model; was it saved by Megatron-LM?"
        )
    with MegatronWrap(read_run_content(_content(checkpoint, saved, arguments))) as wrap:
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
    checkpoint = find_checkpoint(folder)
    if checkpoint is None:
        raise CheckpointError(f"{folder}: contains no checkpoint")
    return checkpoint


def _content(checkpoint: Path, saved: SavedRun, arguments: argparse.Namespace) -> dict[str, Any]:
    """Content of a run's YAML with the model of the checkpoint and minimal training settings."""
    hf_path, tokenizer = saved.section("model_provider").get("hf_path"), saved.section("data").get("tokenizer")
    provider = {"provider_key": saved.section("model_provider")["provider_key"]}
    if _is_folder(hf_path):
        provider["hf_path"] = hf_path
    if arguments.tokenizer or not _is_folder(tokenizer):
        tokenizer = arguments.tokenizer
    dtype = {"__select__": "fp32", "__override__": {key: saved.section("dtype")[key] for key in ("bf16", "fp16")}}
    common = {"micro_batch_size": 1, "global_batch_size": 1, "seq_length": 1, "train_iters": 1}
    return {
        "megatron_lm": {
            "model": {"arch": saved.arch_selection()},
            "train": {
                "common": {**common, "load": str(checkpoint.absolute()), "finetune": True},
                "learning-rate": {"lr": 0.0},
                "dtype": dtype,
            },
        },
        "megatron_wrap": {
            "init": {"platform": arguments.platform},
            "model_provider": {"__override__": provider},
            "data": {"__select__": "none", "__override__": {"tokenizer": tokenizer}},
            "flow": {"__select__": "minimal_mock"},
        },
    }


def _is_folder(path: str | None) -> bool:
    return path is not None and os.path.isdir(os.path.expanduser(path))
