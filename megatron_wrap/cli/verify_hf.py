"""`megatron-wrap verify-hf`: hold our model of a Hugging Face folder against transformers, in one process."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_wrap.cli.one_process import SINGLE, run_file
from megatron_wrap.config.hugging_face import resolve_folder

RUN = {
    "megatron_lm": {
        "train": {
            "common": {"micro_batch_size": 1, "global_batch_size": 1, "seq_length": 64, "train_iters": 1},
            "learning-rate": {"lr": 0.0},
            "dtype": {"__select__": "fp32"},
        }
    },
    "megatron_wrap": {"flow": {"__select__": "minimal_mock"}},
}
"""The run of a folder that is given without a configuration."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the subcommand."""
    parser.add_argument("folder", metavar="FOLDER", help="Hugging Face folder or hub id")
    parser.add_argument(
        "rest",
        nargs="*",
        default=[],
        metavar="[CONFIG] [a.b.c=value ...]",
        help="YAML of a run (its precision and kernels are taken, not its layout; default: fp32), and overrides",
    )
    parser.add_argument("--tokens", type=int, default=64, help="length of each of the two sequences (default 64)")
    parser.add_argument("--json", metavar="FILE", help="write the verdict there, too")


def run(arguments: argparse.Namespace) -> int:
    """0 when our model is that of transformers, 1 when it differs; a mistake of the user is 2."""
    from megatron_wrap.core import MegatronWrap
    from megatron_wrap.engine.verify import verify_hugging_face

    configs = [text for text in arguments.rest if "=" not in text]
    overrides = [text for text in arguments.rest if "=" in text]
    folder = str(resolve_folder(arguments.folder))
    settings = [*SINGLE, "megatron_wrap.model_provider.verify_hf=false", *overrides]
    with run_file(RUN) as made, MegatronWrap.from_pretrained(folder, configs[0] if configs else made, settings) as wrap:
        wrap.initialize()
        wrap.setup_model()
        verdict = verify_hugging_face(wrap.state, wrap.tokenizer, arguments.tokens)
    print(verdict.table())
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(verdict.to_json(), indent=2) + "\n", encoding="utf-8")
    return 0 if verdict.agrees else 1
