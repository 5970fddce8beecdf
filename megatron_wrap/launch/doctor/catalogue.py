"""The checks of a node, in the order of the report."""

from __future__ import annotations

import functools

from megatron_wrap.errors import Mistakes, PlatformError
from megatron_wrap.launch.doctor import folders, machine
from megatron_wrap.launch.doctor.checks import Answer, Check, Subject, answers


def _package(name: str) -> Check:
    return Check(name, functools.partial(machine.version_of, name), "error")


CHECKS = (
    _package("Python"),
    _package("torch"),
    Check("Megatron-Core", machine.megatron_core, "error"),
    _package("megatron-wrap"),
    Check("CUDA", machine.cuda_build, "error", is_quick=False),
    Check("Transformer Engine", machine.transformer_engine, "error", is_quick=False),
    Check("GPUs", machine.gpus, "warning"),
    Check("driver", machine.driver, "warning", is_quick=False),
    Check("shared memory", machine.shared_memory),
    Check("open files", machine.open_files),
    Check("checkpoints", folders.tracker),
    Check("free space", folders.free_space),
    Check("clock of files", folders.file_clock),
    Check("hub cache", folders.hub_cache),
)


def quick_answers(subject: Subject) -> list[Answer]:
    """The warnings of the checks that take milliseconds, before a run is started on this node.

    Raises:
        PlatformError: this node cannot run it; the other errors are in `further`.
    """
    results = answers([check for check in CHECKS if check.is_quick], subject)
    mistakes = Mistakes()
    for answer in results:
        if answer.status == "error":
            mistakes.add(PlatformError(f"{answer.name}: {answer.text}"))
    mistakes.raise_first()
    return [answer for answer in results if answer.status == "warning"]
