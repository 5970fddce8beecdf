"""Files of prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_wrap.errors import DataError, special_file


def read_prompts(path: str) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines, each `{"prompt": text or messages}`, `{"messages": [...]}` or a text, which
    becomes `{"prompt": text}`.

    Raises:
        DataError: the file is missing, or a line is something else; the message contains its number.
    """
    if reason := special_file(Path(path).expanduser()):
        raise DataError(reason)
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise DataError(f"{path}: cannot be read ({reason}); give a file of JSON lines") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not JSON ({error})") from error
        row = {"prompt": row} if isinstance(row, str) else row
        prompt = row.get("messages", row.get("prompt")) if isinstance(row, Mapping) else None
        if not prompt or not isinstance(prompt, str | list):
            raise DataError(
                f'{path}:{number}: a line is {{"prompt": text or messages}}, {{"messages": [...]}} or a text, '
                f"not {line[:60]!r}"
            )
        rows.append(dict(row))
    return rows
