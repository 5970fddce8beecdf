"""Python and the installed packages, and which of them do not fit each other."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Iterator

from megatron_wrap.errors import PlatformError
from megatron_wrap.launch.doctor.checks import Finding, Subject
from megatron_wrap.platform.base.machine import installed_versions
from megatron_wrap.platform.megatron_core.versions import check_version

_WITH_REQUIREMENTS = (
    "megatron-wrap",
    "torch",
    "transformer_engine",
    "transformer_engine_torch",
    "flash-attn",
    "triton",
)
"""Packages whose requirements are compared with what is installed, as `pip check` does for all."""


_BINARIES = re.compile(r"torch|triton|nvidia-.*|cuda-.*|megatron-core|transformer[-_]engine.*|flash[-_]attn")
"""Packages whose compiled code is loaded together. What others need of each other, such as torch of setuptools, matters
where something is built."""


def version_of(name: str, subject: Subject) -> Iterator[Finding]:
    """The version of one of `installed_versions`."""
    version = installed_versions()[name]
    yield Finding("not installed" if version is None else version)


def megatron_core(subject: Subject) -> Iterator[Finding]:
    """Whether this package works with the installed Megatron-Core."""
    try:
        check_version()
    except PlatformError as error:
        yield Finding(str(error), "error")
        return
    yield from version_of("Megatron-Core", subject)


def requirements(subject: Subject) -> Iterator[Finding]:
    """Compare what the packages require of each other with what is installed."""
    from packaging.requirements import Requirement

    conflicts = []
    for package in _WITH_REQUIREMENTS:
        try:
            lines = importlib.metadata.requires(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, lines):
            if package != "megatron-wrap" and not _BINARIES.fullmatch(requirement.name.lower()):
                continue
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            try:
                version = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                version = "none"
            if version == "none" or not requirement.specifier.contains(version, prereleases=True):
                installed = "which is not installed" if version == "none" else f"and {version} is installed"
                conflicts.append(f"{package} requires {requirement.name}{requirement.specifier}, {installed}")
    for conflict in conflicts:
        yield Finding(f"{conflict}; pip install the version that is required", "warning")
    if not conflicts:
        yield Finding("the installed packages meet each other's requirements")


def cuda_build(subject: Subject) -> Iterator[Finding]:
    """The CUDA and the NCCL that torch was built with; imports torch."""
    import torch

    if torch.version.cuda is None:
        yield Finding("torch is built without CUDA")
        return
    nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    yield Finding(f"CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, nccl))}")


def transformer_engine(subject: Subject) -> Iterator[Finding]:
    """Whether Transformer Engine, where it is installed, can be imported with this torch; imports both."""
    version = installed_versions()["Transformer Engine"]
    if version is None:
        yield Finding("not installed; layers are those of torch")
        return
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        yield Finding(
            f"{version} cannot be imported with torch {installed_versions()['torch']} ({reason}); install the build "
            "for this torch and CUDA, or uninstall it",
            "error",
        )
        return
    yield Finding(version)


def linear_attention(subject: Subject) -> Iterator[Finding]:
    """Whether flash-linear-attention, where a run can use it, trains on these GPUs; imports both it and torch."""
    if subject.config is not None and subject.config.arch.experimental_attention_variant is None:
        return
    from megatron_wrap.nn.linear_attention.kernels import has_fla, why_fla_cannot_train

    if not has_fla():
        yield Finding("flash-linear-attention is not installed; the gated delta rule is that of torch")
        return
    import torch

    if not torch.cuda.is_available():
        yield Finding("the gated delta rule is that of torch on a CPU")
        return
    try:
        reason = why_fla_cannot_train()
    except (ImportError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        yield Finding(f"flash-linear-attention cannot be imported ({reason}); install another version of it", "error")
        return
    if reason is None:
        yield Finding("kernels of flash-linear-attention")
    else:
        yield Finding(f"training takes the gated delta rule in torch, which is slower: {reason}", "warning")
