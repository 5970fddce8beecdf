"""moto's S3 server in a process of its own, and a TCP proxy before it whose connections a test can drop."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from s3fs import S3FileSystem

_SERVER = (
    "import sys; from moto.server import ThreadedMotoServer; "
    "server = ThreadedMotoServer('127.0.0.1', 0, verbose=False); server.start(); "
    "print(server.get_host_and_port()[1], flush=True); sys.stdin.read()"
)
KEY = "AKIA0TEST0KEY0OF0MOTO"
SECRET = "secret-of-the-test-0123456789abcdefghij"


class Proxy:
    """Passes connections to a port on, except that `drop_after` bytes from a client end its connection."""

    def __init__(self, port: int) -> None:
        self._target, self.drop_after = port, None
        self.dropped, self.is_down, self.is_silent = 0, False, False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.is_down:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._target))
                for source, target, counts in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._copy, args=(source, target, counts), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(65536):
                while self.is_silent:
                    time.sleep(0.05)
                passed += len(data)
                if self.is_down or (counts and self.drop_after is not None and passed > self.drop_after):
                    self.dropped += 1
                    break
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.close()


@contextmanager
def object_store() -> Iterator[Proxy]:
    """A server with the bucket `runs`, and the environment of this process set to use it through the proxy."""
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as server:
        proxy = None
        try:
            assert server.stdout is not None
            proxy = Proxy(int(server.stdout.readline()))
            url = f"http://127.0.0.1:{proxy.port}"
            urllib.request.urlopen(urllib.request.Request(f"{url}/runs", method="PUT"), timeout=30).close()
            values = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
            os.environ.update(values, AWS_DEFAULT_REGION="us-east-1")
            S3FileSystem.clear_instance_cache()
            yield proxy
        finally:
            for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
                os.environ.pop(name, None)
            if proxy is not None:
                proxy.close()
            server.kill()
