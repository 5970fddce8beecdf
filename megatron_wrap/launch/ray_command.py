"""`--launcher ray`: a run under Ray Train with the console and the exit codes of a run without it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_wrap.bridge.loading.hub import read_run
from megatron_wrap.config.schema.derived import output_dir, processes_needed
from megatron_wrap.launch.ray import require_ray, trainer
from megatron_wrap.parallel.interrupts import INTERRUPTED, RESUME
from megatron_wrap.parallel.stop_requests import SIGNALS, STOP_FILE, say_received

_FOLLOW_SECONDS = 0.2
_STORE_BYTES = 200 * 2**20
"""Object store of a cluster that is started for one run, which puts nothing into it."""


def run_under_ray(
    config: str,
    overrides: Sequence[str] = (),
    *,
    script: Sequence[str] | None = None,
    num_workers: int | tuple[int, int] | None = None,
    max_failures: int = 3,
) -> int:
    """Run a configuration in the cluster of RAY_ADDRESS, else in one on this node that lasts as long as the run.

    Shows what rank 0 prints; `OUTPUT_DIR/logs` has the output of every rank. A signal lets the run save after its step
    and end, as without Ray; the second one ends it at once.

    Args:
        script: a script of the user and its arguments, run in each worker in place of `wrap.fit()`.
        num_workers, max_failures: as of `trainer`.

    Returns:
        The exit code: 0, 1 after too many failures, 75 or 130 after a signal.

    Raises:
        MegatronWrapError: the configuration is wrong, also where only the workers see it.
    """
    require_ray()
    run = read_run(config, overrides)
    workers = num_workers or processes_needed(run)
    _connect(workers[1] if isinstance(workers, tuple) else workers)
    folder = Path(os.path.abspath(output_dir(run)))
    prepared = trainer(
        config,
        overrides,
        script=script,
        num_workers=workers,
        max_failures=max_failures,
        logs=str(folder / "logs"),
    )
    return _Followed(prepared, folder).exit_code()


def _connect(workers: int) -> None:
    import ray

    if ray.is_initialized():
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if "RAY_ADDRESS" in os.environ:
        ray.init(**quiet)
    else:
        cpus = max(workers, os.cpu_count() or 1)
        ray.init("local", num_cpus=cpus, include_dashboard=False, object_store_memory=_STORE_BYTES, **quiet)


class _Followed:
    """A trainer at work in a thread, while this one shows the log of rank 0 and receives signals."""

    def __init__(self, prepared: Any, folder: Path) -> None:
        self._trainer, self._stop, self._log = prepared, folder / STOP_FILE, folder / "logs" / "rank_0.log"
        self._signal: int | None = None
        self._outcome: Any = None

    def exit_code(self) -> int:
        """Wait for the end."""
        shown = self._log.stat().st_size if self._log.exists() else 0
        before = {number: signal.signal(number, self._received) for number in SIGNALS}
        # Ray's own handler of SIGINT, which saves nothing, is installed in a main thread only
        thread = threading.Thread(target=self._fit, daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_FOLLOW_SECONDS)
                shown = self._show(shown)
                if self._signal is not None:
                    with contextlib.suppress(OSError):  # a run that begins removes it
                        self._stop.touch()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self._signal is not None:
                with contextlib.suppress(OSError):
                    self._stop.unlink()
        return self._code()

    def _fit(self) -> None:
        try:
            self._outcome = self._trainer.fit()
        except BaseException as error:
            self._outcome = error

    def _show(self, shown: int) -> int:
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(shown)
            text = log.read()
            sys.stderr.buffer.write(text)
            sys.stderr.flush()
            return shown + len(text)
        return shown

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            os._exit(128 + number)  # Ray ends the workers with their driver
        self._signal = number
        say_received(number)

    def _code(self) -> int:
        import ray.train

        if isinstance(self._outcome, ray.train.TrainingFailedError):
            failures = getattr(self._outcome, "worker_failures", {})
            rank, cause = min(failures.items(), default=("", self._outcome))
            line = (str(cause).strip().splitlines() or [type(cause).__name__])[-1].strip()
            where = f"worker {rank}: " if failures else ""
            sys.stderr.write(f"error: {where}{type(cause).__name__}: {line}; logs: {self._log.parent}\n")
            return 1
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        if self._signal is not None:
            return INTERRUPTED if self._signal == signal.SIGINT else RESUME
        value = self._outcome.return_value
        return int(value.get("exit_code", 0)) if isinstance(value, dict) else 0
