"""Checks that the file names in another file stay in its folder."""

from __future__ import annotations

import os
from pathlib import Path


def leaves_folder(folder: str | os.PathLike[str], name: str) -> str | None:
    """The reason why a name does not denote a file or folder in `folder`, as text; None if it does.

    It must be relative and without `..`, and a symbolic link must point into the folder. In the cache of the Hugging
    Face hub, the files of a snapshot are links to `blobs`, beside its folder `snapshots`.
    """
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or "\0" in name:
        return f"names {name!r}, which is outside its folder"
    if not any(os.path.islink(os.path.join(folder, *parts[: end + 1])) for end in range(len(parts))):
        return None
    root = Path(os.path.abspath(folder))
    target = Path(os.path.realpath(root / name))  # Path.resolve raises at a link to itself
    parents = {*root.parents, *root.resolve().parents}
    caches = [parent.parent / "blobs" for parent in parents if parent.name == "snapshots"]
    if any(target.is_relative_to(permitted.resolve()) for permitted in (root, *caches)):
        return None
    return f"names {name!r}, which is a link to {target}, outside its folder"
