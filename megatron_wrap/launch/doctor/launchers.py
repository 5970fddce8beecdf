"""What a launcher needs on the node from which a run is started."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator

from megatron_wrap.launch.doctor.checks import Finding, Subject

_COMMANDS = {
    "slurm": ("sbatch", "srun", "scontrol", "squeue"),
    "kubernetes": ("kubectl",),
}
_ADVICE = {
    "slurm": "run this on a login node of the cluster",
    "kubernetes": "install kubectl, or apply the file that --dry-run prints elsewhere",
}


def launcher(subject: Subject) -> Iterator[Finding]:
    """Whether the commands or packages of the launcher are installed."""
    name = subject.launcher
    missing = [command for command in _COMMANDS.get(name, ()) if shutil.which(command) is None]
    if missing:
        yield Finding(f"{name} needs {', '.join(missing)}, not in PATH; {_ADVICE[name]}", "error")
    elif name == "ray" and importlib.util.find_spec("ray") is None:
        yield Finding("ray is not installed; pip install 'megatron-wrap[ray]'", "error")
    elif name != "local":
        yield Finding(name)
