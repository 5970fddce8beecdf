"""`megatron-wrap verify-hf`: compare the model built from a Hugging Face folder with transformers, in one process."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_wrap.bridge.loading.hub import local_folder, read_run, read_run_content
from megatron_wrap.bridge.loading.weight_folder import WEIGHT_FILES
from megatron_wrap.config.hugging_face import CONFIG_FILES, read_hugging_face_config
from megatron_wrap.inference.trained_model import content_without_flow
from megatron_wrap.testing.layouts import one_process_overrides

_WITHOUT_CHECKPOINTS = tuple(
    f"megatron_lm.train.common.{key}=null" for key in ("save", "save_interval", "load", "rampup_batch_size")
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    parser.add_argument("folder", metavar="FOLDER", help="Hugging Face folder or hub id")
    parser.add_argument(
        "rest",
        nargs="*",
        default=[],
        metavar="[CONFIG] [a.b.c=value ...]",
        help="YAML of a run whose precision and kernels are used, not its layout (default: fp32), and overrides",
    )
    parser.add_argument(
        "--tokens", type=int, default=64, metavar="N", help="length of each of the two sequences (default: 64)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the verdict to FILE")


def run(arguments: argparse.Namespace) -> int:
    """Prints the verdict; returns 0 if the two models agree, else 1."""
    from megatron_wrap.core import MegatronWrap
    from megatron_wrap.evaluation.verify import verify_hugging_face

    configs = [text for text in arguments.rest if "=" not in text]
    overrides = [text for text in arguments.rest if "=" in text]
    folder = str(local_folder(arguments.folder, CONFIG_FILES + WEIGHT_FILES))
    provider, own = "megatron_wrap.model_provider", read_hugging_face_config(folder).has_tokenizer
    overrides = [
        *one_process_overrides(),
        *_WITHOUT_CHECKPOINTS,
        f"{provider}.verify_hf=false",
        "megatron_wrap.data.new_tokens=[]",
        *([f"megatron_wrap.data.tokenizer={json.dumps(folder)}"] if own else []),
        *overrides,
        f"{provider}.hf_path={json.dumps(folder)}",
    ]
    if configs:
        config = read_run(configs[0], overrides)
    else:
        config = read_run_content(content_without_flow({"seq_length": 64}, {"__select__": "fp32"}, {}), overrides)
    with MegatronWrap(config) as wrap:
        wrap.initialize()
        wrap.setup_model()
        verdict = verify_hugging_face(wrap.state, wrap.tokenizer, arguments.tokens)
    print(verdict.table())
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(verdict.to_json(), indent=2) + "\n", encoding="utf-8")
    return 0 if verdict.agrees else 1
