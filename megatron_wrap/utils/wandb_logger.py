"""Metrics to Weights & Biases: online with an API key, else offline; never prompts and never stops training."""

import contextlib
import importlib.util
import netrc
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_wrap.errors import ConfigError
from megatron_wrap.utils.atomic_write import named_write_errors
from megatron_wrap.utils.dist_logger import logger
from megatron_wrap.utils.logger_errors import WRITABLE, missing_package

INIT_TIMEOUT_SECONDS = 20
"""Longest wait for the server at the start, before the run continues offline."""
FINISH_TIMEOUT_SECONDS = 60
"""Longest wait for the last upload in `close`; `wandb sync` uploads the rest."""


class WandbLogger:
    """One wandb run with its files under `output_dir/wandb`.

    The run is online with WANDB_API_KEY, WANDB_IDENTITY_TOKEN_FILE or a `wandb login` in the netrc file, and offline
    without; WANDB_MODE can be `offline` or `disabled`. If the server cannot be reached or refuses the key, the run logs
    one warning and is recorded offline; `wandb sync` uploads it later.

    Args:
        project: wandb project.
        name: display name of the run; None: wandb chooses.
        config: the resolved configuration, shown with the run.
        output_dir: created if missing.
        resume_from: iteration of the checkpoint from which the run resumes; continues the folder's wandb run unless the
            server cannot be reached. None: a new wandb run.
        rank: global rank; only rank 0 uses wandb. Default: `logger.rank`.

    Raises:
        ConfigError: wandb is not installed, or cannot record offline (folder not writable, invalid project name).
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
        if spec is None or spec.origin is None:  # no origin: not the package but a folder `wandb` of an earlier run
            raise missing_package("wandb", "wandb")
        folder, resumes = Path(output_dir), resume_from is not None
        with named_write_errors(folder / "wandb", WRITABLE):
            run_id = _run_id(folder, resumes)
        arguments = {"project": project, "name": name, "config": dict(config), "dir": str(folder), "id": run_id}
        arguments |= {"resume": "allow"} if resumes else {}
        chosen = _mode()
        for mode in ("online", "offline") if chosen == "online" else (chosen,):
            try:
                self._run = _start(mode, arguments)
                break
            except Exception as error:  # errors of the network, the key and the server have no common class
                if mode != "online":
                    raise ConfigError(f"wandb cannot record the run under {folder}: {_first_line(error)}") from error
                logger.warning_rank_0(f"wandb cannot go online ({_first_line(error)}); recording the run offline")
                arguments["id"] = _run_id(folder, False)  # wandb's service still uses the first id
        if mode != "disabled":
            sync = f"recorded offline; `wandb sync {Path(self._run.dir).parent}` uploads it"
            logger.info_rank_0(f"wandb: {self._run.url if mode == 'online' else sync}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics at `step`; after an error of wandb, log one warning and stop recording."""
        if self._run is None:
            return
        try:
            self._run.log({key: value for key, value in metrics.items() if key != "iteration"}, step=step)
        except Exception as error:  # errors of a logger must not stop training
            logger.warning_rank_0(f"wandb stopped recording at iteration {step}: {_first_line(error)}")
            self.close()

    def close(self) -> None:
        """Finish the run, waiting at most `FINISH_TIMEOUT_SECONDS` for uploads; a second call does nothing."""
        run, self._run = self._run, None
        if run is not None:
            try:
                run.finish()
            except Exception as error:
                logger.warning_rank_0(f"wandb did not close cleanly: {_first_line(error)}")


def has_key() -> bool:
    """Whether wandb finds credentials without a prompt: in environment variables or the netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    for path in [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]:
        with contextlib.suppress(OSError, RuntimeError, netrc.NetrcParseError):  # RuntimeError: no home folder
            entry = netrc.netrc(os.path.expanduser(path)).authenticators(host)
            if entry is not None and entry[2]:
                return True
    return False


def _mode() -> str:
    mode = os.environ.get("WANDB_MODE", "").lower()
    if mode in ("disabled", "offline", "dryrun"):  # dryrun is wandb's old name for offline
        return "disabled" if mode == "disabled" else "offline"
    return "online" if has_key() else "offline"  # without a key, online mode prompts for one on a terminal


def _start(mode: Any, arguments: dict[str, Any]) -> Any:
    import wandb

    settings = wandb.Settings(
        init_timeout=INIT_TIMEOUT_SECONDS, finish_timeout=FINISH_TIMEOUT_SECONDS, console="off", silent=True
    )
    return wandb.init(mode=mode, settings=settings, **arguments)


def _run_id(output_dir: Path, resume: bool) -> str:
    """The wandb id of this folder's run: on resume the stored one, else a new one, which is stored."""
    record = output_dir / "wandb" / "run_id"
    if resume and record.is_file() and (stored := record.read_text(encoding="utf-8").strip()):
        return stored
    record.parent.mkdir(parents=True, exist_ok=True)
    new = uuid.uuid4().hex[:8]
    record.write_text(new + "\n", encoding="utf-8")
    return new


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
