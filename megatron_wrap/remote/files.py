"""Files of object stores and of Hugging Face repositories, through fsspec."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from megatron_wrap.errors import ConfigError
from megatron_wrap.hidden_secrets import hide_secrets
from megatron_wrap.nearest_names import did_you_mean
from megatron_wrap.utils.dist_logger import logger
from megatron_wrap.utils.file_lock import locked

T = TypeVar("T")

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub"}
"""Scheme of a URL -> the package that reads it."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(?=.)")
_S3_OPTIONS = {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 2}}}
_THREADS = 4
ATTEMPTS = 5
_VERSION_KEYS = ("ETag", "etag", "blob_id", "size", "LastModified", "last_modified", "updated", "mtime")
"""Fields of fsspec's `info` that identify a version of a file in different file systems."""
_REPOSITORIES = {"datasets": "dataset", "spaces": "space", "models": "model"}


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL."""
    return _URL.match(os.fspath(path)) is not None


def cache_folder() -> Path:
    """Folder of the copies of remote files: MEGATRON_WRAP_CACHE, else `megatron_wrap` in the user's cache folder."""
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "megatron_wrap")
    return Path(os.environ.get("MEGATRON_WRAP_CACHE") or default).expanduser()


class RemoteFolder:
    """A folder of an object store (`s3://`, `gs://`) or of a Hugging Face repository (`hf://`); it need not exist yet.

    Names of files are relative to the folder. Every method raises the errors of the store's package.

    Raises:
        ConfigError: the URL has an unknown scheme or credentials, or the package is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._files = _file_system(url)
        self._root = str(self._files._strip_protocol(self.url)).rstrip("/")

    @property
    def has_commits(self) -> bool:
        """Whether files are written by commits, each of which becomes visible as a whole."""
        return self.url.startswith("hf://")

    def sizes(self) -> dict[str, int]:
        """Name of each file below the folder -> its size in bytes."""
        self._files.invalidate_cache()
        try:
            listed = self._files.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        entries = {self._files._strip_protocol(path): entry for path, entry in listed.items()}
        prefix = self._root + "/"
        return {path[len(prefix) :]: int(entry["size"]) for path, entry in entries.items() if path.startswith(prefix)}

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is none."""
        try:
            return self._files.cat_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return None

    def download(self, names: Iterable[str], folder: Path) -> None:
        """Copy files into a local folder, under their names."""

        def copy(name: str) -> None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with_retries(lambda: self._files.get_file(f"{self._root}/{name}", str(folder / name)), f"{self.url}/{name}")

        names = list(names)
        outside = next((name for name in names if ".." in Path(name).parts or name.startswith("/")), None)
        if outside is not None:
            raise ConfigError(f"{self.url} contains {outside!r}, which is outside of it; use another folder")
        _in_parallel(copy, names)

    def upload(self, files: Mapping[str, Path], sent: Callable[[str], None]) -> None:
        """Write files in parallel; not where `has_commits`.

        Args:
            files: name -> the local file.
            sent: called with the name of each file that is written.
        """

        def copy(name: str) -> None:
            self._files.makedirs(f"{self._root}/{name}".rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(files[name]), f"{self._root}/{name}")
            sent(name)

        _in_parallel(copy, files)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file; not where `has_commits`."""
        self._files.makedirs(self._root, exist_ok=True)
        self._files.pipe_file(f"{self._root}/{name}", content)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files one at a time; not where `has_commits`."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(f"{self._root}/{name}")

    def commit(self, files: Mapping[str, Path | bytes], removed: Iterable[str], message: str) -> None:
        """Write and remove files of a Hugging Face repository in one commit. A private repository is created if there
        is none. Large files that the repository already contains are not sent again."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        kind, repository, revision, folder = _hub_address(self.url)
        api, prefix = HfApi(), f"{folder}/" if folder else ""
        api.create_repo(repository, repo_type=kind, private=True, exist_ok=True)
        added = [
            CommitOperationAdd(prefix + name, content if isinstance(content, bytes) else str(content))
            for name, content in files.items()
        ]
        deleted = [CommitOperationDelete(prefix + name) for name in removed]
        api.create_commit(
            repository,
            [*added, *deleted],
            commit_message=message,
            repo_type=kind,
            revision=revision,
            num_threads=_THREADS,
        )


def fetch_file(url: str) -> Path:
    """The local copy of a remote file; one process downloads it, others wait. A changed file gets a new copy.

    Raises:
        ConfigError: see `RemoteFolder`; or the file is missing or cannot be read.
    """
    files = _file_system(url)
    try:
        information = with_retries(lambda: files.info(url), url)
    except Exception as error:
        raise ConfigError(f"{url}: {describe(error)}; give the URL of a file that this machine can read") from None
    if information.get("type") == "directory":
        raise ConfigError(f"{url} is a folder; name its files, one source each")
    version = [url, *(str(information.get(key)) for key in _VERSION_KEYS)]
    folder = cache_folder() / "files" / hashlib.sha256("\n".join(version).encode()).hexdigest()[:32]
    target = folder / url.rstrip("/").rpartition("/")[2]
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock", f"downloads {url}"):
        if target.is_file():
            return target
        logger.info_all_ranks(f"downloading {url} to {folder}")
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
            copy = Path(temporary, "file")
            try:
                with_retries(lambda: files.get_file(url, str(copy)), url)
            except Exception as error:
                raise ConfigError(f"{url} cannot be downloaded: {describe(error)}; try again") from None
            size = information.get("size")
            if size is not None and copy.stat().st_size != size:
                raise ConfigError(f"{url}: {copy.stat().st_size} of {size} bytes were received; try again")
            shutil.move(copy, target)
    return target


def with_retries(action: Callable[[], T], name: str, attempts: int = ATTEMPTS) -> T:
    """The result of `action`, which is called up to `attempts` times, with growing pauses. Errors about missing or
    forbidden files are raised at once."""
    for attempt in range(1, attempts):
        try:
            return action()
        except (FileNotFoundError, PermissionError, IsADirectoryError):
            raise
        except Exception as error:  # stores raise different exceptions
            logger.warning_all_ranks(f"{name}: {describe(error)}; attempt {attempt} of {attempts}")
            time.sleep(0.5 * 2**attempt)
    return action()


def describe(error: BaseException) -> str:
    """An error of a store in one line, without secrets."""
    text = " ".join(str(error).split())[:300]
    return hide_secrets(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _in_parallel(action: Callable[[str], None], names: Iterable[str]) -> None:
    """Call `action` for each name in a few daemon threads; raises the first error once all have ended."""
    left, lock = iter(list(names)), threading.Lock()
    errors: list[Exception] = []

    def work() -> None:
        while not errors:
            with lock:
                name = next(left, None)
            if name is None:
                return
            try:
                action(name)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _file_system(url: str) -> Any:
    match = _URL.match(url)
    scheme = match[1].lower() if match else ""
    shown = re.sub(r"//[^/@]*:[^/@]*@", "//", url)
    if scheme not in _PACKAGES:
        hint = did_you_mean(scheme, _PACKAGES)
        raise ConfigError(f"{shown}: remote folders and files begin with s3://, gs:// or hf://{hint}")
    if urlsplit(url).password is not None:
        raise ConfigError(
            f"{shown}: the URL contains credentials; remove them, and set them as the store's own tools read them "
            "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN)"
        )
    import fsspec

    options = _S3_OPTIONS if scheme == "s3" else {}
    try:
        return fsspec.filesystem(scheme, use_listings_cache=False, **options)
    except ImportError:
        raise ConfigError(
            f"{shown} needs the package {_PACKAGES[scheme]}, which is not installed: "
            f"pip install 'megatron-wrap[remote]'"
        ) from None


def _hub_address(url: str) -> tuple[str, str, str | None, str]:
    """Kind, id, revision and folder of `hf://[datasets/|spaces/]org/name[@revision][/folder]`."""
    parts = url.removeprefix("hf://").split("/")
    kind = _REPOSITORIES.get(parts[0])
    parts = parts[1:] if kind else parts
    if len(parts) < 2:
        raise ConfigError(f"{url}: give hf://ORGANIZATION/NAME/FOLDER, or hf://datasets/ORGANIZATION/NAME/FOLDER")
    name, _, revision = parts[1].partition("@")
    return kind or "model", f"{parts[0]}/{name}", revision or None, "/".join(parts[2:])
