"""A real Slurm on this machine: munged, slurmctld and a slurmd for each node, with their own ports and folders."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
MISSING = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin") is None]
"""Programs that are not installed; Debian: apt-get install slurmctld slurmd slurm-client munge."""
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
SlurmdTimeout=5
PartitionName=cpu Nodes={nodes} Default=YES MaxTime=INFINITE State=UP
"""
"""Timers are short: a job that is queued again waits for cred_expire, a dead node is noticed after SlurmdTimeout."""


class Cluster:
    """A running Slurm; `environment` has the variables that its commands need.

    Args:
        folder: for its files.
        nodes: names of the nodes, all of them this machine.
        hidden: name of a node -> a folder of which it sees another one, empty, as if it were not shared.
    """

    def __init__(self, folder: Path, nodes: Sequence[str] = ("n1",), hidden: dict[str, Path] | None = None) -> None:
        self.folder, self.nodes, self._hidden = folder, tuple(nodes), hidden or {}
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf"), "XDG_STATE_HOME": str(folder / "records")}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start its daemons, and wait for the nodes."""
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        host, user = socket.gethostname().partition(".")[0], psutil.Process().username()
        ports = _free_ports(1 + len(self.nodes))
        text = _CONFIGURATION.format(host=host, user=user, folder=self.folder, ports=ports, nodes=",".join(self.nodes))
        for name, port in zip(self.nodes, ports[1:], strict=True):
            text += f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=1000\n"
        (self.folder / "slurm.conf").write_text(text)
        files = {"key-file": key, "socket": self.folder / "munge.sock", "pid-file": self.folder / "munged.pid"}
        files |= {"log-file": self.folder / "munged.log", "seed-file": self.folder / "munged.seed"}
        options = [f"--{name}={file}" for name, file in files.items()]
        self._start("munged", ["munged", "--foreground", "--force", *options])
        wait_for(lambda: files["socket"].exists(), 10)
        self._start("slurmctld", ["slurmctld", "-D", "-c"])
        for name in self.nodes:
            self.start_node(name)

    def start_node(self, name: str) -> None:
        """Start the daemon of a node, also after `kill_node`; returns when jobs can run there."""
        command = ["slurmd", "-D", "-N", name]
        if name in self._hidden:
            mount = f'mount -t tmpfs tmpfs "{self._hidden[name]}" && exec "$@"'
            command = ["unshare", "--mount", "bash", "-c", mount, "bash", *command]
        self._start(name, command)
        state = ("sinfo", "--noheader", f"--nodes={name}", "--format=%T")
        wait_for(lambda: self.run(*state).strip() in ("idle", "mixed", "allocated"), 30)  # a job may wait for it

    def kill_node(self, name: str) -> None:
        """SIGKILL for the daemon of a node and all processes of its jobs."""
        killed = [self._processes.pop(name).pid]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                variables = process.environ()
                is_of_node = variables.get("SLURMD_NODENAME") == name
                if is_of_node and variables.get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                    killed += [process.pid, *(p.pid for p in process.parents() if p.name() == "slurmstepd")]
        for pid in dict.fromkeys(killed):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def run(self, *command: str) -> str:
        """The output of one of Slurm's commands, whether it succeeds or not."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout

    def stop(self) -> None:
        """End its jobs and daemons."""
        if "slurmctld" in self._processes:
            self.run("scancel", "--me")
            with contextlib.suppress(AssertionError):
                wait_for(lambda: not self.run("squeue", "--noheader").strip(), 15)
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()

    def _start(self, name: str, command: Sequence[str]) -> None:
        environment = {**os.environ, **self.environment, "PATH": f"{os.environ['PATH']}:/usr/sbin"}
        with (self.folder / f"{name}.out").open("ab") as output:
            self._processes[name] = subprocess.Popen(command, env=environment, stdout=output, stderr=output)


@contextlib.contextmanager
def cluster(folder: Path, nodes: Sequence[str] = ("n1",), hidden: dict[str, Path] | None = None) -> Iterator[Cluster]:
    """A `Cluster` that ends with the block."""
    folder.mkdir(parents=True, exist_ok=True)
    started = Cluster(folder, nodes, hidden)
    try:
        started.start()
        yield started
    finally:
        started.stop()


def wait_for(condition: Callable[[], object], seconds: float = 120) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
