"""Checks of `megatron_wrap.launch.kubernetes` that Kubernetes does not make, or makes only in the pods."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping

from megatron_wrap.config import RunConfig
from megatron_wrap.config.checks.located_errors import check_each, refuse

_OURS = ("containers", "volumes", "restartPolicy", "terminationGracePeriodSeconds", "nodeSelector", "tolerations")
"""Fields of a pod that other settings determine."""
_MAX_NAME = 40
"""Kubernetes makes names of pods of it, which have at most 63 characters."""
_DEFAULT_GRACE_SECONDS, _END_SECONDS = 600, 30
"""Of a run that may take as long as it needs to save; what else a pod needs to end."""


def check_settings(config: RunConfig) -> None:
    """Check the settings.

    Raises:
        ConfigError: the first one that is wrong; the others are in its `further`.
    """
    check_each(config, (_check_name, _check_texts, _check_volumes, _check_pod, _check_save, _check_grace))


def job_name(config: RunConfig) -> str:
    """The name of the objects of a run."""
    if config.kubernetes.name is not None:
        return config.kubernetes.name
    words = re.sub("[^a-z0-9]+", "-", config.name.lower()).strip("-")
    return (words if words[:1].isalpha() else f"run-{words}")[:_MAX_NAME].rstrip("-")


def grace_seconds(config: RunConfig) -> int:
    """Between the two signals that end a pod, in seconds."""
    settings, save_seconds = config.kubernetes, config.train.stop_within_seconds
    if settings.termination_grace_seconds is not None:
        return settings.termination_grace_seconds
    return _DEFAULT_GRACE_SECONDS if save_seconds is None else round(save_seconds) + _END_SECONDS


def _check_name(config: RunConfig) -> None:
    name = config.kubernetes.name
    if name is not None and (not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > _MAX_NAME):
        rule = f"{name!r} is no name of Kubernetes: it needs a letter, then letters, digits and -, all lower case"
        refuse(config, ["kubernetes.name"], f"{rule}, at most {_MAX_NAME}, and ends with a letter or digit")


def _check_texts(config: RunConfig) -> None:
    for key in ("env", "node_selector", "labels"):
        for name, value in getattr(config.kubernetes, key).items():
            if not isinstance(value, str):
                refuse(config, [f"kubernetes.{key}"], f"{name} is {value!r}, not a text; write '{value}'")
    for entry in config.kubernetes.secret_env:
        if not re.fullmatch("[^=/]+=[^=/]+/[^=/]+", entry):
            rule = f"{entry!r} is not of the form VARIABLE=SECRET/KEY, such as WANDB_API_KEY=wandb/api-key"
            refuse(config, ["kubernetes.secret_env"], rule)


def _check_volumes(config: RunConfig) -> None:
    for path, source in config.kubernetes.volumes.items():
        if not path.startswith("/"):
            refuse(config, ["kubernetes.volumes"], f"{path!r} is where the pods mount a volume; write an absolute path")
        if not isinstance(source, str) and not (isinstance(source, Mapping) and len(source) == 1):
            rule = f"{path} is {source!r}; name a PersistentVolumeClaim, or write one volume source of Kubernetes"
            refuse(config, ["kubernetes.volumes"], f"{rule}, such as {{nfs: {{server: HOST, path: /data}}}}")


def _check_pod(config: RunConfig) -> None:
    for name in config.kubernetes.pod:
        if name in _OURS:
            refuse(
                config, ["kubernetes.pod"], f"{name} is determined by other settings of megatron_wrap.launch.kubernetes"
            )


def _check_save(config: RunConfig) -> None:
    """A checkpoint in the file system of a container is lost with its pod."""
    save, settings = config.train.save, config.kubernetes
    if save is None or "://" in save:
        return
    folder = posixpath.normpath(posixpath.join(settings.working_dir or "", save))
    mounted = [posixpath.normpath(path) for path in settings.volumes]
    if not any(folder == path or folder.startswith(path.rstrip("/") + "/") for path in mounted):
        volumes = f"the volumes are {', '.join(mounted)}" if mounted else "there is none"
        rule = (
            f"{save} is in no volume of megatron_wrap.launch.kubernetes.volumes ({volumes}), and is lost with its pod"
        )
        refuse(config, ["train.save", "kubernetes.volumes", "kubernetes.working_dir"], f"{rule}; save into one")


def _check_grace(config: RunConfig) -> None:
    seconds, save_seconds = config.kubernetes.termination_grace_seconds, config.train.stop_within_seconds
    if seconds is not None and save_seconds is not None and seconds < save_seconds:
        rule = f"a pod is killed after {seconds} s, before the {save_seconds:g} s of stop_within_seconds are over"
        refuse(config, ["kubernetes.termination_grace_seconds", "train.stop_within_seconds"], f"{rule}; raise it")
