"""What to do after a run: commands that evaluate, resume and export exactly this run, and its records."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_wrap.bridge.export.export_format import export_format
from megatron_wrap.checkpoint.precheck import find_checkpoint
from megatron_wrap.config import RunConfig
from megatron_wrap.config.hugging_face import resolve_folder
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.derived import output_dir, tensorboard_dir
from megatron_wrap.errors import ConfigError, MegatronWrapError
from megatron_wrap.launch.contract import LAUNCHED_BY

_TRAIN = "megatron_lm.train.common."
_UNITS = {"train_iters": "step", "train_samples": "sample", "train_epochs": "epoch"}
_LAUNCH_VARIABLES = ("GPUS_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def next_steps(config: RunConfig, command: Sequence[str], evaluates: bool) -> str:
    """Commands for the run that has just ended, each below a comment; only those whose files exist.

    Args:
        config: the run.
        command: arguments of `megatron-wrap` that started it: train CONFIG, options, overrides.
        evaluates: the training script evaluates at the end, even if no steps are left.
    """
    lines = ["next:"]

    def add(comment: str, *commands: str) -> None:
        lines.extend([f"  # {comment}", *(f"  {text}" for text in commands)])

    if config.train.save is None:
        save = f"{_TRAIN}save={os.path.join(output_dir(config), 'checkpoints')}"
        add("train again and save checkpoints", _train(config, [*command, save]))
    elif _has_checkpoint(config.train.save):
        if evaluates and derived.evaluation_set_names(config):
            add("evaluate the checkpoint: no steps are left, so nothing is trained", _train(config, command))
        key, last = _doubled(config)
        until = f"{_UNITS[key]} {last}" if isinstance(last, int) else f"{_UNITS[key]} {last:g}"
        add(
            f"resume up to {until}, on the schedule of the longer run",
            _train(config, _longer(config, command, f"{_TRAIN}{key}=", last)),
        )
        if _is_exportable(config):
            folder = os.path.join(output_dir(config), "hf")
            merged = ["--merge"] if config.adapter.adapter_type != "none" else []
            add(
                "export to a Hugging Face folder",
                _shell([_program("megatron-wrap"), "export-hf", config.train.save, folder, *merged]),
            )
            if config.data.tokenizer is not None:
                comment, program = _use(config, folder, config.data.tokenizer)
                add(f"then {comment} with transformers", _shell([_program("python"), "-c", program]))
        if config.data.tokenizer is not None and not derived.has_value_head(config):
            chats = _has_chat_template(config.data.tokenizer)
            comment = "talk to the model" if chats else "let the model complete what you type"
            add(f"{comment}; Ctrl-D ends", _shell([_program("megatron-wrap"), "chat", config.train.save]))
    metrics, events = Path(output_dir(config), "metrics.jsonl"), tensorboard_dir(config)
    if metrics.is_file():
        add("the metrics of each step", _shell(["tail", "-n", "3", str(metrics)]))
        add("a page of the whole run", _shell([_program("megatron-wrap"), "report", output_dir(config)]))
    if events is not None and Path(events).is_dir():
        add("their curves in TensorBoard", _shell([_program("tensorboard"), "--logdir", events]))
    return "\n".join(lines)


def _doubled(config: RunConfig) -> tuple[str, float]:
    """The key of the run's length, and its value for a run of twice the length."""
    train = config.train
    if train.train_epochs is not None:
        return "train_epochs", 2 * train.train_epochs
    if train.train_samples is not None:
        return "train_samples", 2 * train.train_samples
    return "train_iters", 2 * derived.train_iters(config)


def _longer(config: RunConfig, command: Sequence[str], key: str, length: float) -> list[str]:
    """The command for a longer run: a schedule of another length is refused unless one of two keys selects one."""
    words = [text for text in command if not text.startswith(key)]
    if derived.is_indexed(config.data) and config.data.index_samples is None:
        words.append(f"megatron_wrap.data.index_samples={derived.indexed_samples(config)}")  # the same order of windows
    words.append(f"{key}{length:g}" if isinstance(length, float) else f"{key}{length}")
    chosen = config.optimizer.override_opt_param_scheduler or config.optimizer.use_checkpoint_opt_param_scheduler
    return words if chosen else [*words, "megatron_lm.train.optimizer.override_opt_param_scheduler=true"]


def _use(config: RunConfig, folder: str, tokenizer: str) -> tuple[str, str]:
    """What the exported model is for, and a Python program that does it; with double quotes, because the shell's are
    single."""
    chats = _has_chat_template(tokenizer)
    question = {"role": "user", "content": "What is the capital of France?"}
    if derived.has_value_head(config):
        answer = {"role": "assistant", "content": "Paris."}
        text = f"{question['content']} {answer['content']}"
        shown = f"score.tokenizer.apply_chat_template({_literal([question, answer])}, tokenize=False)"
        score = f'score = pipeline("text-classification", {_literal(folder)}, function_to_apply="none")'
        call = f"score({shown}, add_special_tokens=False)" if chats else f"score({_literal(text)})"
        return "score an answer", f'from transformers import pipeline; {score}; print({call}[0]["score"])'
    prompts = config.train.sample_prompts or [[question] if chats and config.flow.flow_key != "gpt_pretrain" else "The"]
    pipe = (
        f'pipeline("text-generation", {_literal(folder)})({_literal(prompts[0])}, max_new_tokens=64, do_sample=False)'
    )
    text_of = "" if isinstance(prompts[0], str) else '[-1]["content"]'
    return "generate", f'from transformers import pipeline; print({pipe}[0]["generated_text"]{text_of})'


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _has_chat_template(tokenizer: str) -> bool:
    """Whether the files of a tokenizer contain a chat template."""
    with suppress(ConfigError, OSError, ValueError):
        folder = resolve_folder(tokenizer)
        if (folder / "chat_template.jinja").is_file():
            return True
        return bool(json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template"))
    return False


def _train(config: RunConfig, command: Sequence[str]) -> str:
    """A shell command that starts processes as this run did."""
    names = () if LAUNCHED_BY in os.environ else _LAUNCH_VARIABLES  # a job sets them itself
    names = (*names, "PYTHONPATH") if ":" in config.flow.flow_key else names
    variables = [f"{name}={shlex.quote(os.environ[name])}" for name in names if os.environ.get(name)]
    return " ".join([*variables, _shell([_program("megatron-wrap"), *command])])


def _shell(words: Sequence[str]) -> str:
    """The words as one line of shell; a leading "PROGRAM ARGUMENTS" of `_program` stays several words."""
    program, *arguments = words
    return " ".join([program, shlex.join(arguments)])


def _program(name: str) -> str:
    """How to start a program of this environment: by its name if the shell finds it, else by its path."""
    script = Path(sys.executable).parent / name
    on_path = shutil.which(name)
    if on_path is not None and Path(on_path).parent.samefile(script.parent):
        return name
    if script.is_file():
        relative = os.path.relpath(script)
        return shlex.quote(str(script) if relative.startswith("..") else relative)
    return f"{shlex.quote(sys.executable)} -m megatron_wrap.cli.main" if name == "megatron-wrap" else name


def _has_checkpoint(folder: str) -> bool:
    with suppress(MegatronWrapError):
        return find_checkpoint(folder) is not None
    return False


def _is_exportable(config: RunConfig) -> bool:
    """Whether a Hugging Face family can express the architecture."""
    with suppress(MegatronWrapError):
        export_format(config, config.arch.vocab_size or 1)  # the family does not depend on it
        return True
    return False
