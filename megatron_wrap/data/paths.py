"""Messages for data files that are not there: the nearest name in the folder, or the part of the path that exists."""

import difflib
from pathlib import Path


def missing_path_message(path: str | Path, kind: str) -> str:
    """One sentence for a `path` that does not exist; `kind` says what was looked for, such as "data file"."""
    wanted = Path(path).expanduser()
    folder = wanted.parent
    if not folder.is_dir():
        while not folder.is_dir() and folder != folder.parent:
            folder = folder.parent
        there = "the working directory" if str(folder) == "." else str(folder)
        return f"{path}: no such {kind}; of its path only {there} exists{_sample_data_hint(wanted)}"
    names = sorted(entry.name for entry in folder.iterdir())
    near = difflib.get_close_matches(wanted.name, names, n=1)
    if near:
        return f"{path}: no such {kind}; did you mean {folder / near[0]}?"
    listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "nothing"
    return f"{path}: no such {kind}; {folder} holds {listed}{_sample_data_hint(wanted)}"


def _sample_data_hint(path: Path) -> str:
    # The example's folder is git-ignored, so a fresh clone names files in it that nobody has made yet.
    if "generated" in path.parts:
        return "; `python examples/data/build.py` makes the example's data"
    return ""
