"""Programs in processes forked from the test process. It has imported torch and Megatron-Core, which takes a new
interpreter five seconds of a processor."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from typing import NoReturn

COMMAND = "import sys; from megatron_wrap.cli.main import main; sys.exit(main(sys.argv[1:]))"
"""The program of `megatron-wrap WORDS...`."""


def run_forked(
    program: str, *words: object, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the text of a program; returns its exit code and what it printed.

    Args:
        words: `sys.argv` after the first.
        variables: environment variables besides those of this process.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = os.fork()
        if process == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.environ.update(variables or {})
            _run(program, [str(word) for word in words])
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        out.seek(0)
        err.seek(0)
        printed, errors = out.read().decode(), err.read().decode()
    return subprocess.CompletedProcess(program, code, printed, errors)


def _run(program: str, words: list[str]) -> NoReturn:
    code = 1
    try:
        sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", closefd=False) for descriptor in (1, 2))
        sys.argv = ["-c", *words]
        exec(compile(program, "<forked>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
