"""The manifest of a run on Kubernetes: `trainjob.yaml` with the values of the run, and the checks of its settings.

Trainer makes a JobSet of the three objects, with one pod for each node. In each pod runs `megatron-wrap ... --launcher
local`, with torchrun's variables (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, ...) from Trainer.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from yaml.reader import Reader

from megatron_wrap.config import RunConfig
from megatron_wrap.config.checks.contradictions import check_each, refuse
from megatron_wrap.config.reading.tree import OVERLAY_FOLDER, shipped_root
from megatron_wrap.errors import ConfigError
from megatron_wrap.hidden_secrets import hide_secrets
from megatron_wrap.launch.interface import Launch
from megatron_wrap.parallel.watch.ending import RESUME

CONFIG_FOLDER = "/etc/megatron-wrap"
"""Folder in a pod that contains the run's YAML."""
CONTAINER = "node"
"""Name that Trainer gives to the container that trains, and to the group of its pods."""
_KEYS = "megatron_wrap.launch.kubernetes"
_MAX_CONFIG_BYTES = 900_000
"""Largest size of the YAML and its overlay in bytes; Kubernetes refuses objects above 1 MiB."""
_MAX_NAME = 40
"""Largest number of characters of a job's name; Kubernetes derives names of pods from it, which have at most 63."""
_OURS = ("containers", "volumes", "restartPolicy", "terminationGracePeriodSeconds", "nodeSelector", "tolerations")
"""Fields of a pod that other settings determine."""
_DEFAULT_GRACE_SECONDS, _END_SECONDS = 600, 30
"""Seconds that a run may take to save by default, and further seconds that a pod needs to end."""


def job_name(config: RunConfig) -> str:
    """Name of the objects of a run."""
    if config.kubernetes.name is not None:
        return config.kubernetes.name
    words = re.sub("[^a-z0-9]+", "-", config.name.lower()).strip("-")
    return (words if words[:1].isalpha() else f"run-{words}")[:_MAX_NAME].rstrip("-")


def manifest(launch: Launch) -> str:
    """The three objects as commented YAML.

    Raises:
        ConfigError: a setting is wrong, the manifest would contain a secret, or the files are too large for a
            ConfigMap.
    """
    config = launch.config
    check_each(config, [partial(refuse, keys=keys, rule=rule) for keys, rule in _violations(config)])
    files = _files(Path(launch.command[1]), config.name)
    size = sum(len(text.encode()) for text in files.values())
    if size > _MAX_CONFIG_BYTES:
        raise ConfigError(
            f"the YAML and its overlay have {size:,} bytes, and a ConfigMap of Kubernetes takes {_MAX_CONFIG_BYTES:,}"
        )
    template = resources.files("megatron_wrap.launch").joinpath("trainjob.yaml").read_text(encoding="utf-8")
    values = _values(launch, files)
    missing = "|".join(name for name, value in values.items() if value == "null")
    text = Template(re.sub(rf"^.*: \$({missing})\n", "", template, flags=re.MULTILINE)).substitute(values)
    if hide_secrets(text) != text:
        line = next(line for line in text.split("\n") if hide_secrets(line) != line)
        raise ConfigError(
            f"the manifest would contain a secret, in the line {hide_secrets(line).strip()[:200]!r}; put it into a "
            f"Secret of Kubernetes, and name that in {_KEYS}.secret_env"
        )
    return text


# ---- checks that Kubernetes does not make, or makes only in the pods ----


def _violations(config: RunConfig) -> Iterator[tuple[list[str], str]]:
    """(key, the rule that it violates) for each wrong setting."""
    settings, save_seconds = config.kubernetes, config.train.stop_within_seconds
    name, grace = settings.name, settings.termination_grace_seconds
    if name is not None and (not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > _MAX_NAME):
        rule = f"{name!r} is no name of Kubernetes: it needs a letter, then letters, digits and -, all lower case"
        yield ["kubernetes.name"], f"{rule}, at most {_MAX_NAME}, and ends with a letter or digit"
    for key in ("env", "node_selector", "labels"):
        for variable, value in getattr(settings, key).items():
            if not isinstance(value, str):
                yield [f"kubernetes.{key}"], f"{variable} is {value!r}, not a text; write '{value}'"
    for entry in settings.secret_env:
        if not re.fullmatch("[^=/]+=[^=/]+/[^=/]+", entry):
            rule = f"{entry!r} is not of the form VARIABLE=SECRET/KEY, such as WANDB_API_KEY=wandb/api-key"
            yield ["kubernetes.secret_env"], rule
    for path, source in settings.volumes.items():
        if not path.startswith("/"):
            yield ["kubernetes.volumes"], f"{path!r} is where the pods mount a volume; write an absolute path"
        if not isinstance(source, str) and not (isinstance(source, Mapping) and len(source) == 1):
            rule = f"{path} is {source!r}; name a PersistentVolumeClaim, or write one volume source of Kubernetes"
            yield ["kubernetes.volumes"], f"{rule}, such as {{nfs: {{server: HOST, path: /data}}}}"
    for field in set(settings.pod) & set(_OURS):
        yield ["kubernetes.pod"], f"{field} is determined by other settings of {_KEYS}"
    save = config.train.save
    if save is not None and "://" not in save and not _is_in_volume(save, settings.working_dir, settings.volumes):
        volumes = f"the volumes are {', '.join(settings.volumes)}" if settings.volumes else "there is none"
        rule = f"{save} is in no volume of {_KEYS}.volumes ({volumes}), and is lost with its pod; save into one"
        yield ["train.save", "kubernetes.volumes", "kubernetes.working_dir"], rule
    if grace is not None and save_seconds is not None and grace < save_seconds:
        rule = f"a pod is killed after {grace} s, before the {save_seconds:g} s of stop_within_seconds are over"
        yield ["kubernetes.termination_grace_seconds", "train.stop_within_seconds"], f"{rule}; raise it"


def _is_in_volume(save: str, working_dir: str | None, volumes: Iterable[str]) -> bool:
    folder = posixpath.normpath(posixpath.join(working_dir or "", save))
    return any(f"{folder}/".startswith(posixpath.normpath(path).rstrip("/") + "/") for path in volumes)


# ---- the values of the template ----


def _values(launch: Launch, files: Mapping[str, str]) -> dict[str, str]:
    """Name in the template -> YAML. A key whose whole value is null is left out."""
    config, settings = launch.config, launch.config.kubernetes
    nodes, processes = launch.layout()
    save_seconds = config.train.stop_within_seconds
    grace_seconds = _DEFAULT_GRACE_SECONDS if save_seconds is None else round(save_seconds) + _END_SECONDS
    requested = dict(settings.resources)
    if config.init.platform != "cpu":
        requested[settings.gpu_resource] = processes
    env: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in settings.env.items()]
    for entry in settings.secret_env:
        name, secret, key = re.split("[=/]", entry)
        env.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    shared_memory = {"medium": "Memory", "sizeLimit": settings.shared_memory}
    values = {
        "name": job_name(config),
        "namespace": settings.namespace,
        "nodes": nodes,
        "processes": processes,
        "max_restarts": settings.max_restarts,
        "resume": RESUME,
        "grace_seconds": settings.termination_grace_seconds or grace_seconds,
        "image": settings.image,
        "image_pull_policy": settings.image_pull_policy,
        "image_pull_secrets": [{"name": name} for name in settings.image_pull_secrets] or None,
        "working_dir": settings.working_dir,
        "node_selector": settings.node_selector or None,
        "tolerations": settings.tolerations or None,
        "env_from": [{"secretRef": {"name": name}} for name in settings.env_from_secrets] or None,
        "env": env or None,
        "items": [{"key": _data_key(path), "path": path} for path in files],
        "shared_memory": {key: value for key, value in shared_memory.items() if value is not None},
        "labels": {"app.kubernetes.io/managed-by": "megatron-wrap", **settings.labels},
        "command": ["megatron-wrap", *_words(launch)],
        "resources": {"limits": requested, "requests": requested} if requested else None,
    }
    claims = {
        path: {"persistentVolumeClaim": {"claimName": source}} if isinstance(source, str) else source
        for path, source in settings.volumes.items()
    }
    volumes = [{"name": f"volume-{index}", **source} for index, source in enumerate(claims.values())]
    mounts = [{"name": f"volume-{index}", "mountPath": path} for index, path in enumerate(claims)]
    return {
        **{name: _yaml(value) for name, value in values.items()},
        "title": f"{job_name(config)} on {nodes} x {processes} processes",
        "folder": CONFIG_FOLDER,
        "files": "\n".join(f"  {_yaml(_data_key(path))}: {_text(text)}" for path, text in files.items()),
        "pod": "\n".join(f"{' ' * 16}{_yaml(key)}: {_yaml(value)}" for key, value in settings.pod.items()),
        "mounts": "\n".join(f"{' ' * 18}- {_yaml(mount)}" for mount in mounts),
        "volumes": "\n".join(f"{' ' * 16}- {_yaml(volume)}" for volume in volumes),
    }


def _yaml(value: object) -> str:
    """A value as YAML on one line: JSON, in which further characters that end a line or have no glyph are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return re.sub("[\x7f-\x9f\u2028\u2029\ufeff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _text(text: str) -> str:
    """A text as a literal block below a key that is indented by two, if it can be one without further indicators."""
    lines = text.removesuffix("\n").split("\n")
    is_block = text.endswith("\n") and lines == text.splitlines() and bool(lines[-1]) and text[0] not in " \n"
    if not is_block or Reader.NON_PRINTABLE.search(text):
        return _yaml(text)
    return "|\n" + "\n".join(f"    {line}" if line else "" for line in lines)


def _data_key(path: str) -> str:
    """The key of a file in a ConfigMap, which allows no slash."""
    return path.replace("/", "__")


def _words(launch: Launch) -> list[str]:
    """The arguments of `megatron-wrap` in a pod, in which Kubernetes replaces no variable. Overrides of launchers are
    left out, because they have no effect there."""
    subcommand, _, *rest = launch.command
    rest = [word for word in rest if not word.startswith("megatron_wrap.launch.")]
    words = [subcommand, f"{CONFIG_FOLDER}/{launch.config.name}.yaml", "--launcher", "local", *rest]
    return [word.replace("$(", "$$(") for word in words]


def _files(run: Path, name: str) -> dict[str, str]:
    """Path in the pod's folder -> content of the run's YAML and of the overlay's files."""
    files = {f"{name}.yaml": run.read_text(encoding="utf-8")}
    overlay = run.resolve().parent / OVERLAY_FOLDER
    if overlay.is_dir() and overlay != shipped_root().resolve():
        for path in sorted(overlay.rglob("*")):
            if path.is_file():
                inside = os.path.join(OVERLAY_FOLDER, path.relative_to(overlay).as_posix())
                files[inside] = path.read_text(encoding="utf-8")
    return files
