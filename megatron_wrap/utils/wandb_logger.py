"""Metrics to Weights & Biases: online where a key is found, else offline; it never asks and never stops training."""

import importlib.util
import netrc
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_wrap.errors import ConfigError
from megatron_wrap.utils.dist_logger import logger
from megatron_wrap.utils.logger_errors import missing_package, refuse_unwritable

INIT_TIMEOUT_SECONDS = 20
"""How long the start may wait for the server before the run goes offline."""
FINISH_TIMEOUT_SECONDS = 60
"""How long `close` may wait for the last upload; what is left can be sent with `wandb sync`."""


class WandbLogger:
    """One wandb run, its files under `output_dir/wandb`.

    The run is online with WANDB_API_KEY (or WANDB_IDENTITY_TOKEN_FILE, or a `wandb login` in the netrc file) and
    offline without; WANDB_MODE may ask for `offline` or `disabled`. A server that cannot be reached or refuses the key
    costs one warning and the run is recorded offline; `wandb sync` sends it later.

    Args:
        project: wandb project.
        name: display name of the run; None lets wandb choose.
        config: the resolved configuration, shown with the run.
        output_dir: made if missing.
        resume_from: iteration of the checkpoint that the run goes on from; the wandb run of the same folder is
            continued, unless that needs a server out of reach. None: a new wandb run.
        rank: global rank; only rank 0 talks to wandb. Default: the rank that `logger` knows.

    Raises:
        ConfigError: wandb is not installed, or cannot even record offline (folder not writable, illegal project name).
    """

    def __init__(
        self,
        project: str,
        name: str | None,
        config: Mapping[str, Any],
        output_dir: str | Path,
        resume_from: int | None = None,
        rank: int | None = None,
    ) -> None:
        self._run: Any = None
        if (logger.rank if rank is None else rank) != 0:
            return
        spec = importlib.util.find_spec("wandb")
        if spec is None or spec.origin is None:  # without an origin it is only a folder `wandb` that some run left here
            raise missing_package("wandb", "wandb")
        folder = Path(output_dir)
        with refuse_unwritable("wandb files", folder):
            run_id = _run_id(folder, resume_from is not None)
        described: dict[str, Any] = {
            "project": project,
            "name": name,
            "config": dict(config),
            "dir": str(folder),
            "id": run_id,
        }
        if resume_from is not None:
            described["resume"] = "allow"
        mode = _mode()
        if mode == "online":
            try:
                self._run = _start(mode, described)
            except Exception as error:  # failures of the network, the key and the server share no class of their own
                logger.warning_rank_0(f"wandb cannot go online ({_first_line(error)}); the run is recorded offline")
                mode = "offline"
                described["id"] = _run_id(folder, False)  # wandb's service still holds the first one
        if self._run is None:
            try:
                self._run = _start(mode, described)
            except Exception as error:
                raise ConfigError(f"wandb cannot record the run under {folder}: {_first_line(error)}") from error
        if mode != "disabled":
            sync = f"recorded offline; `wandb sync {Path(self._run.dir).parent}` sends it"
            logger.info_rank_0(f"wandb: {self._run.url if mode == 'online' else sync}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the metrics at `step`; after a failure of wandb itself, one warning and nothing more."""
        if self._run is None:
            return
        try:
            self._run.log({key: value for key, value in metrics.items() if key != "iteration"}, step=step)
        except Exception as error:  # a logger's trouble must not stop training
            logger.warning_rank_0(f"wandb stopped recording at iteration {step}: {_first_line(error)}")
            self.close()

    def close(self) -> None:
        """Ends the run, waiting at most `FINISH_TIMEOUT_SECONDS` for uploads; a second call does nothing."""
        run, self._run = self._run, None
        if run is not None:
            try:
                run.finish()
            except Exception as error:
                logger.warning_rank_0(f"wandb did not close cleanly: {_first_line(error)}")


def has_key() -> bool:
    """True where wandb would find credentials without asking: its environment variables or its netrc entry."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    chosen = os.environ.get("NETRC")
    for path in [Path(chosen)] if chosen else [Path("~/.netrc"), Path("~/_netrc")]:
        try:
            entry = netrc.netrc(str(path.expanduser())).authenticators(host)
        except (OSError, RuntimeError, netrc.NetrcParseError):  # RuntimeError: no home folder
            continue
        if entry is not None and entry[2]:
            return True
    return False


def _mode() -> str:
    asked = os.environ.get("WANDB_MODE", "").lower()
    if asked in ("disabled", "offline", "dryrun"):  # dryrun is wandb's old word for offline
        return "disabled" if asked == "disabled" else "offline"
    return "online" if has_key() else "offline"  # without a key, online would ask for one on a terminal


def _start(mode: Any, described: dict[str, Any]) -> Any:
    import wandb

    settings: dict[str, Any] = {"init_timeout": INIT_TIMEOUT_SECONDS, "console": "off", "silent": True}
    if "finish_timeout" in wandb.Settings.model_fields:  # newer than the other settings
        settings["finish_timeout"] = FINISH_TIMEOUT_SECONDS
    return wandb.init(mode=mode, settings=wandb.Settings(**settings), **described)


def _run_id(output_dir: Path, resume: bool) -> str:
    """The wandb id of this folder's run: the recorded one on resume, else a new one, which is recorded."""
    record = output_dir / "wandb" / "run_id"
    if resume and record.is_file() and (recorded := record.read_text(encoding="utf-8").strip()):
        return recorded
    record.parent.mkdir(parents=True, exist_ok=True)
    new = uuid.uuid4().hex[:8]
    record.write_text(new + "\n", encoding="utf-8")
    return new


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
