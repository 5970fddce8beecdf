"""Addresses and ports by which the nodes of a run reach each other."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from collections.abc import Iterator

from megatron_wrap.launch.doctor.checks import Finding, Subject

MEETING_PORT = 29500
"""torchrun's."""
_SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface (netdevice(7))."""
_OPEN_PORTS = "open all TCP ports between the nodes"


def own_address(several_nodes: bool) -> str:
    """The IPv4 address on which gloo listens, which the other nodes connect to.

    Raises:
        OSError: there is no such interface, or the name of this host has no address.
    """
    if not several_nodes:
        return "127.0.0.1"
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if not interface:
        return socket.gethostbyname(socket.gethostname())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("256s", interface[:15].encode())
        return socket.inet_ntoa(fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)[20:24])


def address(subject: Subject) -> Iterator[Finding]:
    """The address that this node announces to the others."""
    try:
        yield Finding(own_address(several_nodes=True))
    except OSError as error:
        yield Finding(
            f"{socket.gethostname()} has no address ({error.strerror}); set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME "
            "to an interface that `ip address` lists",
            "error",
        )


def meeting_port(subject: Subject) -> Iterator[Finding]:
    """Whether node 0 can listen on the port at which the nodes meet; whether the others find its address."""
    port = subject.master_port or MEETING_PORT
    shown = f"port {port} of {subject.master_address}"
    if subject.node_rank == 0:
        with socket.socket() as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listening.bind(("", port))
            except OSError as error:
                yield Finding(f"{shown} cannot be used ({error.strerror}); set MASTER_PORT to another one", "error")
                return
        yield Finding(f"{shown} is free")
        return
    try:
        socket.getaddrinfo(subject.master_address, port)
    except OSError as error:
        yield Finding(f"MASTER_ADDR {subject.master_address} has no address ({error.strerror}); correct it", "error")
        return
    yield Finding(shown)


def reached(subject: Subject, seconds: float) -> Finding:
    """Wait until node 0 listens on the meeting port; called on the other nodes."""
    port, end = subject.master_port or MEETING_PORT, time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((subject.master_address, port), timeout=2).close()
            return Finding(f"port {port} of {subject.master_address} is open")
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > end:
            return Finding(
                f"port {port} of {subject.master_address} did not open within {seconds:.0f} s ({reason}); start the "
                f"same command on node 0 at the same time, and {_OPEN_PORTS}, or set MASTER_PORT to an open one",
                "error",
            )
        time.sleep(0.2)
