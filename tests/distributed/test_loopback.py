"""What the processes of a run on one node listen on, read from the kernel while they run."""

import json
import socket
from pathlib import Path

import pytest
from _interpreters import forked_interpreters

from megatron_wrap.config import load_run_config
from megatron_wrap.errors import LayoutError
from megatron_wrap.launch.agent import launch_processes
from megatron_wrap.launch.interface import Nodes

ROOT = Path(__file__).parents[2]
RANK = """
import os, sys, datetime, torch, torch.distributed as dist
sys.path.insert(0, {here!r})
from _listening import listening
from megatron_wrap.parallel.launch import start
processes = start("gloo", 2)
group = dist.new_group([0, 1], backend="gloo")
for used in (None, group):
    value = torch.ones(1)
    dist.all_reduce(value, group=used)
    assert value == 2
open({out!r} + str(processes.rank), "w").write(__import__("json").dumps(listening([os.getpid(), os.getppid()])))
dist.barrier()
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the variables that the launcher sets."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)


def _launch(code: str, port: int = 0) -> int:
    config = load_run_config(str(ROOT / "configs/tiny-llama-mock.yaml"), ["megatron_wrap.init.platform=cpu"])
    with forked_interpreters():
        return launch_processes(Nodes(2, 1, 0, "127.0.0.1", port), ["-c", code], config)


def test_a_run_of_two_ranks_listens_on_the_loopback_interface_only(environment: None, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert _launch(RANK.format(here=str(Path(__file__).parent), out=str(tmp_path / "sockets")), port) == 0
    for rank in range(2):
        sockets = json.loads((tmp_path / f"sockets{rank}").read_text())
        assert len({process for process, _, _ in sockets}) == 2, "the agent's store and the rank's gloo"
        assert port in [number for _, _, number in sockets]
        assert {address for _, address, _ in sockets} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_a_port_that_is_taken_is_one_error(environment: None) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LayoutError, match=f"port {port} of 127.0.0.1 cannot be used"):
            _launch("raise SystemExit(1)", port)


def test_the_interface_of_the_environment_is_kept(environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    code = "import os; assert (os.environ['GLOO_SOCKET_IFNAME'], os.environ['NCCL_SOCKET_IFNAME']) == ('eth9', 'lo')"
    assert _launch(code) == 0
