"""Sockets on which processes listen, read from the kernel."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path


def listening(processes: list[int]) -> list[tuple[int, str, int]]:
    """Process, address and port of each listening TCP socket of the processes."""
    owners = {}
    for process in processes:
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            try:
                owners[os.readlink(descriptor)] = process
            except FileNotFoundError:
                continue
    sockets = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        table = Path("/proc/net", name)
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in owners:
                address, _, port = fields[1].partition(":")
                words = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
                text = socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
                sockets.append((owners[f"socket:[{fields[9]}]"], text, int(port, 16)))
    return sockets
