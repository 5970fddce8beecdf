"""A `kubectl` that records its arguments and plays the life of a TrainJob."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PROGRAM = """#!{python} -ES
import json, sys
from pathlib import Path

folder = Path({folder!r})
with (folder / "calls.jsonl").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
play = json.loads((folder / "play.json").read_text())
words = [word for word in sys.argv[1:] if not word.startswith("--request-timeout=")]
words = words[2:] if words[0] == "--namespace" else words
verb = words[0]
if verb in play["errors"]:
    sys.exit(play["errors"][verb])
looks = (folder / "calls.jsonl").read_text().count('"get", "trainjob"')
scene = play["scenes"][min(looks, len(play["scenes"])) - 1]
if words[:2] == ["get", "trainjob"] and scene["job"] is not None:
    print(json.dumps(scene["job"]))
elif words[:2] == ["get", "pods"]:
    print(json.dumps({{"items": scene["pods"]}}))
elif verb == "logs":
    print(play["logs"].get(words[-1], ""))
"""


class StubKubectl:
    """A program of that name in `folder`.

    Args:
        scenes: the TrainJob and its pods at each look at the TrainJob; the last one stays.
        logs: of pods.
        errors: verb -> what kubectl writes to stderr where it fails.
    """

    def __init__(
        self,
        folder: Path,
        scenes: Sequence[tuple[Any, Sequence[Any]]],
        logs: Mapping[str, str] = {},
        errors: Mapping[str, str] = {},
    ) -> None:
        play = {"scenes": [{"job": job, "pods": pods} for job, pods in scenes], "logs": logs, "errors": errors}
        folder.mkdir(parents=True)
        (folder / "play.json").write_text(json.dumps(play))
        program = folder / "kubectl"
        program.write_text(_PROGRAM.format(python=sys.executable, folder=str(folder)))
        program.chmod(0o755)
        self.folder = folder

    @property
    def calls(self) -> list[list[str]]:
        """The arguments of each call."""
        file = self.folder / "calls.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def train_job(condition: str | None = None) -> dict[str, Any]:
    """A TrainJob that runs, or has ended with a condition."""
    reason = {"type": condition, "status": "True", "reason": "FailedJobs", "message": "jobset failed"}
    return {"status": {"conditions": [reason] if condition else []}}


def pod(index: int, attempt: int, phase: str, code: int | None = None, **state: Any) -> dict[str, Any]:
    """A pod of the node `index`.

    Args:
        code: exit code of its container.
        state: what else its status has.
    """
    container = {"name": "node", "state": {} if code is None else {"terminated": {"exitCode": code, "reason": "Error"}}}
    labels = {
        "batch.kubernetes.io/job-completion-index": str(index),
        "jobset.sigs.k8s.io/restart-attempt": str(attempt),
    }
    return {
        "metadata": {
            "name": f"pod-{index}-{attempt}",
            "labels": labels,
            "creationTimestamp": f"2026-11-24T0{attempt}:00:00Z",
        },
        "status": {"phase": phase, "containerStatuses": [container], **state},
    }
