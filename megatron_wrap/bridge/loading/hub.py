"""Downloads from the Hugging Face hub; each one writes a line to the log."""

from __future__ import annotations

import json
import os
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from megatron_wrap.config import RunConfig, load_run_config
from megatron_wrap.config.hugging_face import CONFIG_FILES, NotDownloaded, resolve_folder
from megatron_wrap.errors import ConfigError
from megatron_wrap.utils.dist_logger import logger

T = TypeVar("T")


def read_run(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """`load_run_config`; if the run names a hub id that is not in the local cache, download its configuration files.

    Raises:
        ConfigError: see `load_run_config`; or the hub does not provide the repository.
    """
    return with_downloads(lambda: load_run_config(path, overrides))


def read_run_content(content: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """`read_run` of a configuration that is not in a file.

    Raises:
        ConfigError: as `read_run`.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-wrap-") as folder:
        path = Path(folder, "run.yaml")
        path.write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML
        return read_run(path, overrides)


def with_downloads(read: Callable[[], T]) -> T:
    """The result of `read`, which reads a configuration; if it needs a hub id that is not in the local cache, download
    the configuration files of that id and call `read` again.

    Raises:
        ConfigError: raised by `read`; or the hub does not provide the repository.
    """
    try:
        return read()
    except NotDownloaded as missing:
        download(missing.repo_id, CONFIG_FILES)
    return read()


def local_folder(path_or_id: str, patterns: Sequence[str]) -> Path:
    """The local folder of a path or a hub id; files of a hub id that the cache lacks are downloaded.

    Args:
        patterns: which files of a hub repository are needed.

    Raises:
        ConfigError: no such folder, or the hub does not provide the repository.
    """
    if os.path.isdir(os.path.expanduser(path_or_id)):
        return Path(path_or_id).expanduser()
    with suppress(NotDownloaded):
        resolve_folder(path_or_id)  # raises for what is no hub id either
    # the cache may contain the configuration and lack the weights; snapshot_download fetches only missing files
    return download(path_or_id, patterns)


def download(repo_id: str, patterns: Sequence[str]) -> Path:
    """Download the files of a hub repository that the local cache lacks.

    Raises:
        ConfigError: the hub does not provide the repository.
    """
    from huggingface_hub import snapshot_download

    logger.info_rank_0(f"downloading {repo_id} from the Hugging Face hub ({', '.join(patterns)})")
    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(patterns)))
    except Exception as error:  # the hub, the network and the cache raise different exceptions
        reason = textwrap.shorten(str(error), 200, placeholder=" ...") or type(error).__name__
        raise ConfigError(
            f"no folder {repo_id!r} is here, and the Hugging Face hub did not provide it ({reason}); "
            "give the path of a folder that is here"
        ) from None
