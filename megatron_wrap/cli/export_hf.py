"""`megatron-wrap export-hf`: write a Hugging Face folder from a checkpoint, in one process."""

from __future__ import annotations

import argparse

from megatron_wrap.bridge.loading.hub import read_run_content
from megatron_wrap.cli.arguments import selected
from megatron_wrap.inference.trained_model import checkpoint_content, checkpoint_of, named_provider


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    parser.add_argument(
        "source", metavar="RUN_OR_CHECKPOINT", help="YAML of a run, the folder of its checkpoints, or one checkpoint"
    )
    parser.add_argument("folder", metavar="FOLDER", help="folder to write")
    parser.add_argument(
        "--merge", action="store_true", help="add the adapter's products to the weights (default: write peft's files)"
    )
    parser.add_argument("--keep-vision", action="store_true", help="also copy the vision encoder of hf_path")
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

    checkpoint = checkpoint_of(arguments.source)
    content = checkpoint_content(checkpoint, arguments.tokenizer, named_provider(arguments.source))
    content["megatron_wrap"]["init"] = {"platform": arguments.platform}
    with MegatronWrap(read_run_content(content)) as wrap:
        wrap.initialize()
        wrap.setup_model()
        options = selected(arguments, "max_shard_size", "dtype", "family", "merge", "keep_vision")
        folder = wrap.save_pretrained(arguments.folder, **options)
    print(folder)
    return 0
