"""Reads a small JSON file that was written elsewhere: config.json, an index of weights, adapter_config.json."""

import json
import os
from pathlib import Path
from typing import Any

from megatron_wrap.config.reading.yaml_nodes import shown_path
from megatron_wrap.errors import ConfigError, MegatronWrapError, special_file

MAX_BYTES = 1 << 28
"""Largest size of a file. The index of the weights of the largest models has about 10 MiB."""


def read_json(path: Path, advice: str, error_type: type[MegatronWrapError] = ConfigError) -> Any:
    """The content of a JSON file.

    Args:
        advice: the end of the message about a damaged file.
        error_type: class of the errors.

    Raises:
        MegatronWrapError: an `error_type`: the file is missing, a folder, pipe or device, larger than MAX_BYTES, or is
            not JSON.
    """
    shown = shown_path(path)
    if reason := special_file(path):
        raise error_type(reason)
    try:
        if (size := os.path.getsize(path)) > MAX_BYTES:
            raise error_type(f"{shown}: {size:,} bytes, more than the {MAX_BYTES:,} that are read; {advice}")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise error_type(f"{shown}: cannot be read ({error.strerror or error}); {advice}") from error
    except ValueError as error:
        raise error_type(f"{shown}: not JSON ({error}); {advice}") from error
    except RecursionError as error:
        raise error_type(f"{shown}: not JSON (nested too deeply); {advice}") from error
