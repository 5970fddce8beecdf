"""New interpreters by forking the test process, which has imported torch, Megatron-Core and transformers: four to six
seconds of a processor for each process of a run."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import inspect
import logging
import multiprocessing.process
import multiprocessing.util
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

ROOT = Path(__file__).parents[1]
OURS = tuple(str(ROOT / folder) + os.sep for folder in ("tests", "scripts", "examples"))
"""Folders whose modules a program imports for itself."""
COMMAND = Path(sys.executable).with_name("megatron-wrap")
READ_BY_IMPORTS = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_")
"""Beginnings of variables that transformers reads when it is imported."""


@contextlib.contextmanager
def forked_interpreters() -> Iterator[None]:
    """Inside, `subprocess` runs Python programs of this environment (`-c`, `-m`, a script, `megatron-wrap`) in forks of
    the calling process, and so do these programs, such as torchrun's agent its ranks. Their process ids, parents,
    pipes, signals, variables and exit codes are those of new interpreters; only their command line in /proc is not.

    New interpreters are for programs with other variables of READ_BY_IMPORTS than this process or with other options
    than `-u`, and for pip, whose setuptools replaces imported modules.
    """
    real: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    if real.__module__ == __name__:  # a test inside of another context
        yield
        return
    parameters = inspect.signature(real)

    def execute(*arguments: Any) -> None:
        named = dict(parameters.bind(*arguments).arguments)
        words = _words(_without_shell(named))
        if words is None or not _is_forked(named["env"]):
            real(*arguments)
            return
        process = named["self"]
        sys.stdout.flush(), sys.stderr.flush()
        process.pid = os.fork()
        if process.pid == 0:
            _become(words, named)
        process._child_created = True
        process._close_pipe_fds(*(named[name] for name in _PIPES))

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child = real  # type: ignore[attr-defined]


_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _without_shell(named: dict[str, Any]) -> list[str]:
    """The words of a command, also of a line for the shell that only sets variables and starts one program; none of
    other lines."""
    if not named["shell"]:
        return [] if isinstance(named["args"], str | bytes) else [os.fsdecode(word) for word in named["args"]]
    if not isinstance(named["args"], str) or set(named["args"]) & set("|&;<>()$`*?~#\n"):
        return []
    words = shlex.split(named["args"])
    variables = dict(os.environ if named["env"] is None else named["env"])
    while words and words[0].partition("=")[0].isidentifier() and "=" in words[0]:
        name, _, variables[name] = words.pop(0).partition("=")
    named["env"] = variables
    program = shutil.which(words[0], path=variables.get("PATH")) if words else None
    return [program, *words[1:]] if program else []


def _words(command: list[str]) -> list[str] | None:
    """What follows `python`; None: it is no program that a fork can run."""
    if command[:1] == [str(COMMAND)]:
        return command
    if command[:1] != [sys.executable] or len(command) == 1:
        return None
    words = command[2:] if command[1] == "-u" else command[1:]
    runs = words and (words[0] in ("-c", "-m") or not words[0].startswith("-"))
    return command[1:] if runs and words[:2] != ["-m", "pip"] else None


def _is_forked(variables: Any) -> bool:
    if variables is None:
        return True
    names = {os.fsdecode(name) for name in (*variables, *os.environ)}
    return all(variables.get(name) == os.environ.get(name) for name in names if name.startswith(READ_BY_IMPORTS))


def _become(words: list[str], named: dict[str, Any]) -> NoReturn:
    """In the forked process: run the program as a new interpreter would, and exit with its code."""
    code = 1
    try:
        _take_descriptors(named)
        if named["start_new_session"]:
            os.setsid()
        if named["process_group"] not in (None, -1):
            os.setpgid(0, named["process_group"])
        if named["cwd"] is not None:
            os.chdir(named["cwd"])
        if named["env"] is not None:
            os.environ.clear()
            os.environ.update({os.fsdecode(name): os.fsdecode(value) for name, value in named["env"].items()})
        unbuffered = words[0] == "-u"
        _forget_parent(unbuffered)
        if named["preexec_fn"] is not None:
            named["preexec_fn"]()
        code = _exit_code(words[1:] if unbuffered else words)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        if code == -signal.SIGINT:  # as Python ends after an interrupt that nothing handles
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code & 0xFF)


def _take_descriptors(named: dict[str, Any]) -> None:
    for standard, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
        if named[name] not in (-1, standard):
            os.dup2(named[name], standard)
    if not named["close_fds"]:
        return
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in (null, *named["pass_fds"]):
            # not closed: an object of the parent still does that, perhaps when another file has the number
            os.dup2(null, descriptor, inheritable=False)


def _forget_parent(unbuffered: bool) -> None:
    """Give up what a new interpreter has not: pytest's captures and hooks, handlers, children, modules of tests."""
    gc.freeze()
    torch.set_num_threads(1)  # a fork has no other
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    faulthandler.disable()
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", 1 if unbuffered else -1, closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)  # type: ignore[misc]
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    warnings.resetwarnings()
    warnings.showwarning = warnings._showwarning_orig  # type: ignore[attr-defined]
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    multiprocessing.process._children = set()  # type: ignore[attr-defined]
    subprocess._active.clear()  # type: ignore[attr-defined]
    for function in (logging.shutdown, multiprocessing.util._exit_function, weakref.finalize._exitfunc):  # type: ignore[attr-defined]
        atexit.register(function)
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    if tracker is not None:
        tracker._resource_tracker._fd = tracker._resource_tracker._pid = None  # type: ignore[attr-defined]
    sys.meta_path[:] = [finder for finder in sys.meta_path if "pytest" not in type(finder).__module__]
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(OURS):
            del sys.modules[name]


def _exit_code(words: Sequence[str]) -> int:
    """Run `-c PROGRAM`, `-m MODULE` or a script with the words that follow it."""
    kind = words[0] if words[0] in ("-c", "-m") else ""
    program = words[1] if kind else words[0]
    sys.argv = [kind or program, *words[2 if kind else 1 :]]
    first = {"": os.path.dirname(os.path.abspath(program)), "-c": "", "-m": os.getcwd()}[kind]
    others = [path for path in sys.path if path and not f"{path}{os.sep}".startswith(OURS)]
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [first, *(os.path.abspath(path) for path in added if path), *others]
    importlib.invalidate_caches()
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        if kind == "-c":
            exec(compile(program, "<string>", "exec"), sys.modules["__main__"].__dict__)
        elif kind == "-m":
            sys.modules.pop(program, None)
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0
