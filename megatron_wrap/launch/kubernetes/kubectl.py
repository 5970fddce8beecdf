"""Calls of `kubectl`."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_wrap.config.schema.launch.kubernetes import KubernetesConfig
from megatron_wrap.errors import PlatformError

_SECONDS = 60
"""Of a call that does not follow anything."""
_LOG_LINE = re.compile(r"[IWEF]\d{4} \d\d:")
"""Of the logger of kubectl, which also prints the error itself."""
_NO_TRAINER = ("doesn't have a resource type", 'no matches for kind "Train')


class Kubectl:
    """The program, in the context and the namespace of the settings.

    Raises:
        PlatformError: it is not installed.
    """

    def __init__(self, settings: KubernetesConfig) -> None:
        program = shutil.which("kubectl")
        if program is None:
            raise PlatformError(
                "kubectl is not installed here; install it, or write the manifest with --dry-run and apply it elsewhere"
            )
        options = {"--context": settings.context, "--namespace": settings.namespace}
        self._options = [word for option, value in options.items() if value for word in (option, value)]
        self._program = program

    def shown(self, *words: str) -> str:
        """A command as it is typed."""
        return shlex.join(["kubectl", *self._options, *words])

    def apply(self, manifest: Path) -> None:
        """Create or change the objects of a file."""
        self._run("apply", "--filename", str(manifest))

    def delete(self, kind: str, name: str) -> None:
        """Delete an object and what belongs to it, and wait until both are gone."""
        self._run("delete", kind, name, "--cascade=foreground", "--wait", seconds=600)

    def get(self, kind: str, name: str) -> Mapping[str, Any] | None:
        """An object; None: there is none."""
        text = self._run("get", kind, name, "--ignore-not-found", "--output", "json")
        return json.loads(text) if text.strip() else None

    def list(self, kind: str, selector: str) -> list[Mapping[str, Any]]:
        """Objects with labels."""
        items: list[Mapping[str, Any]] = json.loads(self._run("get", kind, "--selector", selector, "--output", "json"))[
            "items"
        ]
        return items

    def follow_log(self, pod: str, since: str | None) -> bool:
        """Print the log of a pod until it ends, or the connection does; returns False where kubectl reports an error.

        Args:
            since: time in RFC 3339 of the first line; None: from the beginning.
        """
        first = [] if since is None else ["--since-time", since]
        sys.stdout.flush()
        called = subprocess.run([self._program, *self._options, "logs", "--follow", *first, pod], check=False)
        return called.returncode == 0

    def last_lines(self, pod: str, count: int) -> str:
        """The last lines of a pod's log; empty if there are none."""
        try:
            return self._run("logs", "--tail", str(count), pod)
        except PlatformError:
            return ""

    def _run(self, *words: str, seconds: int = _SECONDS) -> str:
        """What a call prints.

        Raises:
            PlatformError: it fails, or does not end.
        """
        try:
            called = subprocess.run(
                [self._program, *self._options, *words], capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            raise PlatformError(
                f"{self.shown(*words)} has not ended in {seconds} s; is the cluster reachable?"
            ) from None
        if called.returncode:
            lines = [line for line in called.stderr.strip().splitlines() if not _LOG_LINE.match(line)]
            reason = " ".join(lines) or f"exit code {called.returncode}"
            if any(text in reason for text in _NO_TRAINER):
                reason += "; install Kubeflow Trainer v2 in the cluster (https://trainer.kubeflow.org)"
            raise PlatformError(f"{self.shown(*words)}: {reason}")
        return called.stdout
