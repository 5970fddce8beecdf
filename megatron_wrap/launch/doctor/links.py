"""Connections between nodes over TCP: whether they open, how fast they are, and whose clock differs."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

from megatron_wrap.launch.doctor.checks import Answer
from megatron_wrap.metrics.number_format import with_prefix

_CONNECT_SECONDS, _ANSWER_SECONDS = 5.0, 30.0
_SEND_SECONDS, _SEND_BYTES, _PIECE, _BUFFER = 0.5, 64 * 2**20, 2**18, 2**20
_SLOW_BYTES = 30 * 10**6
"""Per second: a quarter of Gigabit Ethernet."""
_CLOCK_SECONDS, _WRONG_CLOCK_SECONDS = 1.0, 60.0
"""Differences of clocks that are a warning and an error: munge and Kerberos refuse messages that are minutes old."""
_ROUNDS = 5
_TIME, _DATA = b"t", b"d"
_DOUBLE, _COUNT = struct.Struct("!d"), struct.Struct("!q")


class Listener:
    """Answers other nodes on a free port until `close`: its time, and how many bytes have arrived.

    Args:
        address: IPv4 address on which it listens.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.create_server((address, 0), backlog=64)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no further connection."""
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.settimeout(_ANSWER_SECONDS)
            while (request := connection.recv(1)) == _TIME:
                connection.sendall(_DOUBLE.pack(time.time()))
            if request == _DATA:
                received = 0
                while data := connection.recv(_PIECE):
                    received += len(data)
                connection.sendall(_COUNT.pack(received))


def clock(address: str, port: int) -> list[Answer]:
    """Compare the clock of this node with that of node 0, whose listener this is."""
    try:
        with socket.create_connection((address, port), timeout=_CONNECT_SECONDS) as connection:
            _, ahead = min(_round(connection) for _ in range(_ROUNDS))
    except OSError:  # `link` reports it
        return []
    if abs(ahead) < _CLOCK_SECONDS:
        return [Answer("clock", f"within {_CLOCK_SECONDS:g} s of node 0", "ok")]
    text = f"{abs(ahead):,.1f} s {'ahead of' if ahead > 0 else 'behind'} node 0; synchronize the clocks (chrony, NTP)"
    return [Answer("clock", text, "error" if abs(ahead) > _WRONG_CLOCK_SECONDS else "warning")]


def _round(connection: socket.socket) -> tuple[float, float]:
    """Seconds of a question and its answer, and how far the clock of this node is ahead of the other one. The other
    clock was read between the two, so the error is at most half of those seconds (as in NTP, RFC 5905)."""
    begin = time.time()
    connection.sendall(_TIME)
    answer = connection.recv(_DOUBLE.size, socket.MSG_WAITALL)
    end = time.time()
    if len(answer) < _DOUBLE.size:
        raise ConnectionResetError
    return end - begin, (begin + end) / 2 - float(_DOUBLE.unpack(answer)[0])


def link(other: str, address: str, port: int) -> list[Answer]:
    """Connect to a port of another node, and measure latency and speed."""
    where = f"port {port} of {other} ({address})"
    try:
        with socket.create_connection((address, port), timeout=_CONNECT_SECONDS) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            latency = min(_round(connection)[0] for _ in range(_ROUNDS))
            speed = _speed(connection)
    except OSError as error:
        advice = (
            "open all TCP ports between the nodes, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface "
            "that connects them"
        )
        return [Answer("link", f"{where} cannot be reached ({error.strerror or error}); {advice}", "error")]
    text = f"{with_prefix(speed)}B/s and {1000 * latency:.2g} ms to {other}"
    if speed < _SLOW_BYTES:
        advice = "if the nodes have a faster interface, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to it"
        return [Answer("link", f"{text}; {advice}", "warning")]
    return [Answer("link", text, "ok")]


def _speed(connection: socket.socket) -> float:
    """Bytes per second that arrive."""
    content, sent, start = b"\0" * _PIECE, 0, time.monotonic()
    connection.sendall(_DATA)
    while sent < _SEND_BYTES and time.monotonic() - start < _SEND_SECONDS:
        connection.sendall(content)
        sent += len(content)
    connection.shutdown(socket.SHUT_WR)
    answer = connection.recv(_COUNT.size, socket.MSG_WAITALL)
    if len(answer) < _COUNT.size:
        raise ConnectionResetError
    return float(_COUNT.unpack(answer)[0]) / (time.monotonic() - start)
