"""The validations of a run before it begins, in one order for `MegatronWrap` and the command line.

They need no process group, and write nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_wrap.bridge.adapters.peft_folder import adapter_folder
from megatron_wrap.bridge.adapters.run_adapter import run_adapter
from megatron_wrap.bridge.adapters.trained_parameters import adapter_lines, check_frozen
from megatron_wrap.bridge.loading.hf_path import check_hugging_face
from megatron_wrap.checkpoint.files.run_folder import read_manifest
from megatron_wrap.checkpoint.reference_config import reference_config
from megatron_wrap.checkpoint.saved_run import (
    check_checkpoints,
    check_resumption,
    differing_runs,
    read_saved_run,
    starting_checkpoint,
)
from megatron_wrap.config import RunConfig
from megatron_wrap.config.checks.layout import check_layout
from megatron_wrap.config.checks.run import check_flow_options, check_values
from megatron_wrap.config.schema import derived
from megatron_wrap.core.validation.candidate import Candidate, Note
from megatron_wrap.core.validation.paths import check_data_files, check_folders
from megatron_wrap.core.validation.samples import check_data, check_first_rows, check_lengths, is_known_flow
from megatron_wrap.core.validation.setup import check_flow, check_platform, check_tokenizer
from megatron_wrap.errors import MegatronWrapError
from megatron_wrap.metrics.number_format import counted


@dataclass(frozen=True)
class Validation:
    """One item of the validation of a run."""

    name: str
    notes: Callable[[Candidate], Iterable[Note]]
    """Function that validates, and yields notes about what it found; raises the first mistake, with others in its
    `further`."""
    by: Literal["process", "command", "set-up"]
    """Part of `megatron-wrap train` that validates the item. process: every process, after the command; command: only
    the command that starts them; set-up: the processes, while they set up the run."""
    needs: tuple[str, ...] = ()
    """Names of validations without which this one has no meaning."""
    anywhere: bool = False
    """Whether the validation depends on the configuration alone, not on the files and devices of this machine."""


class Item(NamedTuple):
    """One line of a report."""

    status: Literal["ok", "warning", "error", "not checked"]
    name: str
    """Name of the validation."""
    text: str


def validate(
    config: RunConfig, num_processes: int | None = None, own_script: bool = False, has_files: bool = True
) -> RunConfig | None:
    """Validate a decoded configuration.

    Args:
        num_processes: number of processes, over all nodes, of a run that a command is about to start: its layout, data
            files and flow are validated once, for all processes. None: this process is one of them.
        own_script: the processes run a script of the user, which may register the flow itself.
        has_files: the processes see the files and devices of this machine.

    Returns:
        The configuration of the reference or teacher model, from `reference_config`.

    Raises:
        MegatronWrapError: the first mistake.
    """
    candidate = Candidate(config, num_processes, own_script, has_files)
    for validation in VALIDATIONS:
        if not (has_files or validation.anywhere):
            continue
        if validation.by == "process" or (validation.by == "command" and num_processes is not None):
            deque(validation.notes(candidate), maxlen=0)
    return candidate.reference


def check(candidate: Candidate) -> list[Item]:
    """Run every validation, also after mistakes where they do not depend on them; starts no process."""
    items: list[Item] = []
    failed: set[str] = set()
    for validation in VALIDATIONS:
        if not (candidate.has_files or validation.anywhere):
            continue
        missing = failed.intersection(validation.needs)
        if missing:
            failed.add(validation.name)
            items.append(Item("not checked", validation.name, f"needs {', '.join(sorted(missing))}"))
            continue
        try:
            for note in validation.notes(candidate):
                items.append(Item("warning" if note.is_warning else "ok", validation.name, note.text))
        except MegatronWrapError as error:
            failed.add(validation.name)
            items += errors_of(validation.name, error)
        except Exception:
            if not failed:
                raise
            # values that are refused above can make a later validation fail in any way
            items.append(Item("not checked", validation.name, f"needs {', '.join(sorted(failed))}"))
            failed.add(validation.name)
    if not candidate.has_files:
        items.append(Item("not checked", "files, devices", "they are not those of this machine"))
    return items


def errors_of(name: str, error: MegatronWrapError) -> list[Item]:
    """The lines of an error and of the errors in its `further`."""
    return [Item("error", name, str(each)) for each in (error, *error.further)]


def _configuration(candidate: Candidate) -> Iterator[Note]:
    config = candidate.config
    check_values(config)
    if not candidate.has_files:  # else the flow itself checks them
        check_flow_options(config)
    train = config.train
    if train.train_epochs is not None:
        length = counted(train.train_epochs, "epoch")
    elif train.train_samples is not None:
        length = counted(train.train_samples, "sample")
    else:
        length = counted(derived.train_iters(config), "step")
    batch = f"a global batch of {counted(train.global_batch_size, 'sample')}"
    yield Note(f"{config.name}: {length}, {batch}, sequences of up to {counted(train.seq_length, 'token')}")


def _without_notes(check: Callable[[RunConfig], object]) -> Callable[[Candidate], Iterable[Note]]:
    def notes(candidate: Candidate) -> Iterable[Note]:
        check(candidate.config)
        return ()

    return notes


def _folders(candidate: Candidate) -> Iterator[Note]:
    check_folders(candidate.config)
    yield Note(f"output folder {derived.output_dir(candidate.config)}")


def _layout(candidate: Candidate) -> Iterator[Note]:
    if candidate.num_processes is None:
        return
    config, parallel = candidate.config, candidate.config.parallel
    replicas = check_layout(config, candidate.num_processes)
    sizes = {
        "TP": parallel.tensor_model_parallel_size,
        "PP": parallel.pipeline_model_parallel_size,
        "CP": parallel.context_parallel_size,
        "DP": replicas,
    }
    experts = f", EP {parallel.expert_model_parallel_size}" if config.arch.num_experts is not None else ""
    count = derived.num_microbatches(config, replicas)
    shown = " x ".join(f"{name} {size}" for name, size in sizes.items())
    processes, micro_batches = counted(candidate.num_processes, "process"), counted(count, "micro-batch")
    yield Note(f"{processes} = {shown}{experts}; {micro_batches} of each replica per step")


def _checkpoint(candidate: Candidate) -> Iterator[Note]:
    config = candidate.config
    check_checkpoints(config)
    start, save = starting_checkpoint(config), config.train.save
    if start is None:
        yield Note("a new run, which saves no checkpoint" if save is None else f"a new run, which saves to {save}")
        return
    iteration, saved = read_manifest(start.path).get("iteration"), read_saved_run(start.path)
    if not start.resumes:
        yield Note(f"begins with the {'weights' if config.train.finetune else 'state'} of {start.path}")
        return
    yield Note(f"resumes from {start.path}")
    differences = [] if saved is None else differing_runs(saved, config)
    if differences:
        advice = "choose another save folder unless this run continues it"
        yield Note(f"{save} contains another run: {'; '.join(differences)}; {advice}", is_warning=True)
    known_length = config.train.train_epochs is None
    if known_length and iteration is not None and iteration >= derived.train_iters(config):
        steps = counted(derived.train_iters(config), "step")
        advice = "raise the length, or choose another save folder"
        text = f"no step is left: the checkpoint is of iteration {iteration}, and the run has {steps}; {advice}"
        yield Note(text, is_warning=True)


def _weights(candidate: Candidate) -> Iterator[Note]:
    config = candidate.config
    check_hugging_face(config)
    path = config.model_provider.hf_path
    if path is not None:
        yield Note(f"the architecture of {path}" if starting_checkpoint(config) else f"the weights of {path}")


def _adapter(candidate: Candidate) -> Iterator[Note]:
    config = candidate.config
    vocab_size = candidate.vocab_size or config.arch.vocab_size
    adapter = run_adapter(config, vocab_size)
    if adapter is None:
        return
    # without a tokenizer's size the processes compare the folder; the factors of a checkpoint replace it
    if vocab_size is not None and starting_checkpoint(config) is None:
        adapter_folder(config, adapter)
    yield from map(Note, adapter_lines(adapter, vocab_size))


def _reference(candidate: Candidate) -> Iterator[Note]:
    models = candidate.config.models
    candidate.reference = reference_config(candidate.config)
    settings = models.reference_or_teacher
    if settings is not None:
        yield Note(f"{models.role}: {settings.source}")


def _flow(candidate: Candidate) -> Iterator[Note]:
    config = candidate.config
    if candidate.own_script:
        yield Note(f"{config.flow.flow_key}, which the script may register")
    else:
        yield Note(f"{config.flow.flow_key} ({check_flow(config)})")


def _lengths(candidate: Candidate) -> Iterator[Note]:
    if is_known_flow(candidate):
        check_lengths(candidate.config)
    yield from ()


VALIDATIONS = (
    Validation("configuration", _configuration, "process", anywhere=True),
    Validation("data files", _without_notes(check_data_files), "process"),
    Validation("folders", _folders, "process"),
    Validation("layout", _layout, "command", anywhere=True),
    Validation("data", check_data, "command"),
    Validation("checkpoint", _checkpoint, "process", ("folders",)),
    Validation("learning-rate schedule", _without_notes(check_resumption), "command", ("configuration", "checkpoint")),
    Validation("Hugging Face weights", _weights, "process"),
    Validation("frozen parameters", _without_notes(check_frozen), "process"),
    Validation("reference model", _reference, "process", ("configuration",)),
    Validation("flow", _flow, "command"),
    Validation("sample lengths", _lengths, "command", ("data", "flow")),
    Validation("platform", check_platform, "set-up", ("configuration",)),
    Validation("tokenizer", check_tokenizer, "set-up", ("folders", "checkpoint")),
    Validation("adapter", _adapter, "process", ("configuration", "checkpoint")),
    Validation("first rows", check_first_rows, "set-up", ("flow", "tokenizer")),
)
"""All validations in their order. Only data, flow, and those after it import torch."""
