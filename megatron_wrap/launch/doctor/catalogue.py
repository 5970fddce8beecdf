"""The checks of a node, in the order of the report."""

from __future__ import annotations

import functools

from megatron_wrap.errors import Mistakes, PlatformError
from megatron_wrap.launch.doctor import folders, launchers, machine, packages, ports
from megatron_wrap.launch.doctor.checks import Answer, Check, Subject, answers


def _package(name: str) -> Check:
    return Check(name, functools.partial(packages.version_of, name), if_nodes_differ="error")


CHECKS = (
    Check("launcher", launchers.launcher),
    _package("Python"),
    _package("torch"),
    Check("Megatron-Core", packages.megatron_core, if_nodes_differ="error"),
    _package("megatron-wrap"),
    Check("CUDA", packages.cuda_build, is_quick=False, if_nodes_differ="error"),
    Check("Transformer Engine", packages.transformer_engine, is_quick=False, if_nodes_differ="error"),
    Check("linear attention", packages.linear_attention, is_quick=False, if_nodes_differ="warning"),
    Check("requirements", packages.requirements),
    Check("GPUs", machine.gpus, if_nodes_differ="warning"),
    Check("driver", machine.driver, is_quick=False, if_nodes_differ="warning"),
    Check("shared memory", machine.shared_memory),
    Check("open files", machine.open_files),
    Check("locked memory", machine.locked_memory),
    Check("address", ports.address, ("nodes",)),
    Check("port", ports.meeting_port, ("meeting",)),
    Check("checkpoints", folders.tracker, ("save",)),
    Check("free space", folders.free_space, ("save",)),
    Check("write speed", folders.write_speed, ("save",), is_quick=False),
    Check("clock of files", folders.file_clock, ("save",)),
    Check("hub cache", folders.hub_cache),
)


def quick_answers(subject: Subject) -> list[Answer]:
    """The warnings of what takes milliseconds, before a run is started on this node.

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
