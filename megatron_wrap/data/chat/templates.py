"""Renders a conversation with a chat template as transformers does, in a process with limits of time and memory.

A template is a program from a model's folder. It may never end, or compute a text of any size within a single C
function, which only the kernel can stop.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Callable
from functools import lru_cache
from multiprocessing.connection import Connection, Pipe
from typing import Any, TypeVar

from megatron_wrap.data.chat import text_tokens
from megatron_wrap.data.chat.text_tokens import Span
from megatron_wrap.errors import ConfigError, DataError
from megatron_wrap.utils.pools.processes import become_worker, forking

MAX_RENDER_SECONDS = 30.0
"""Computing time in seconds of all renderings of one row, each of its turns included."""
MAX_RENDER_BYTES = 1 << 29
"""Bytes by which the process may grow during one rendering."""
MAX_STOPPED_IN_A_ROW = 5
"""Number of successive rows whose renderings are stopped before the template is blamed instead of the rows."""
_PARENT_CHECK_SECONDS = 1.0
Result = TypeVar("Result")


class TemplateLimitError(DataError):
    """A chat template takes too much time or memory for a conversation."""


def rendered(
    template: str, conversation: list[dict[str, Any]], with_spans: bool, **variables: Any
) -> tuple[str, list[Span]]:
    """The conversation as text, and the spans of the template's generation blocks if `with_spans`. Called in `bounded`.

    Args:
        variables: more arguments of transformers' `render_jinja_template`.

    Raises:
        TemplateLimitError: the rendering exceeds a limit, or has more than MAX_CHARACTERS characters.
        ValueError: the template rejects the conversation.
    """
    # Not apply_chat_template, which returns the generation blocks only as a token mask. With tokenizers that trim white
    # space, the mask covers the rest of the conversation if the last character of a block is in no token.
    arguments = {"conversations": [conversation], "chat_template": template, "return_assistant_tokens_mask": with_spans}
    text, spans = _renderer(os.getpid()).render({**arguments, **variables})
    if len(text) > text_tokens.MAX_CHARACTERS:
        raise TemplateLimitError(
            f"the chat template renders more than {text_tokens.MAX_CHARACTERS:,} characters for this conversation; "
            "correct the template, or divide the conversation"
        )
    return text, spans


def bounded(work: Callable[[], Result]) -> Result:
    """Run `work()`, the renderings of one row, within the limits; in any thread, one row of a process at a time.

    Raises:
        TemplateLimitError: they take longer than MAX_RENDER_SECONDS of computing time, or one takes more memory than
            MAX_RENDER_BYTES.
        ConfigError: MAX_STOPPED_IN_A_ROW calls in a row did so, so no row is at fault.
    """
    return _renderer(os.getpid()).row(work)


@lru_cache(maxsize=1)
def _renderer(process: int) -> _Renderer:
    """The renderer of this process; a forked process does not use its parent's."""
    return _Renderer()


class _Renderer:
    """A forked process that renders; the kernel ends it at the limits, and the next row gets another one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: tuple[int, Connection] | None = None
        self._is_new_row = True
        self._stopped_in_a_row = 0

    def row(self, work: Callable[[], Result]) -> Result:
        """See `bounded`."""
        with self._lock:
            self._is_new_row = True
            stopped_before, self._stopped_in_a_row = self._stopped_in_a_row, 0
            try:
                return work()
            except _Stopped:
                count = self._stopped_in_a_row = stopped_before + 1
        excess = (
            f"the chat template takes more than {MAX_RENDER_SECONDS:g} s of computing time or "
            f"{MAX_RENDER_BYTES >> 20} MiB of memory for"
        )
        if count >= MAX_STOPPED_IN_A_ROW:
            raise ConfigError(f"{excess} each of {count} conversations in a row; correct it")
        raise TemplateLimitError(f"{excess} this conversation; correct the template or the conversation")

    def render(self, arguments: dict[str, Any]) -> tuple[str, list[Span]]:
        """See `rendered`."""
        process, connection = self._child = self._child or _fork()
        seconds, self._is_new_row = MAX_RENDER_SECONDS if self._is_new_row else None, False
        answer = None
        try:
            connection.send((seconds, MAX_RENDER_BYTES, arguments))
            answer = connection.recv()
        except (EOFError, ConnectionError):
            raise _Stopped from None
        finally:
            if answer is None:  # also after Ctrl-C, or values that cannot be sent: a later answer is of no later call
                self._child = None
                connection.close()
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)
        text, spans, error = answer
        if error is not None:
            raise ValueError(error)
        return text, spans


class _Stopped(BaseException):
    """A rendering was stopped at a limit. It is no Exception, so that no handler takes it for an error of the
    template."""


def _fork() -> tuple[int, Connection]:
    from transformers.utils import chat_template_utils

    connection, of_child = Pipe()
    parent = os.getpid()
    with forking():
        process = os.fork()
        if process == 0:
            try:
                connection.close()
                _serve(of_child, parent, chat_template_utils.render_jinja_template)
            finally:
                os._exit(1)
    of_child.close()
    return process, connection


def _serve(connection: Connection, parent: int, render: Callable[..., Any]) -> None:
    """Answer each request with the text, the spans and the error, until the parent ends or closes its end; return if
    there is not enough memory."""
    become_worker()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    while True:
        while not connection.poll(_PARENT_CHECK_SECONDS):
            if os.getppid() != parent:  # processes that were forked later have copies of its end
                return
        seconds, num_bytes, arguments = connection.recv()
        if seconds is not None:
            signal.setitimer(signal.ITIMER_PROF, seconds)
        _limit_memory(num_bytes)
        answer: tuple[str, list[Span], str | None]
        try:
            texts, spans = render(**arguments)
            answer = texts[0], [(begin, end) for begin, end in (spans or [[]])[0]], None
        except MemoryError:
            return
        except Exception as error:  # a template is a program and can raise jinja's and Python's errors
            answer = "", [], str(error) or type(error).__name__
        connection.send(answer)


def _limit_memory(num_bytes: int) -> None:
    """Let the process grow by so many bytes. Linux only; elsewhere nothing happens."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm", "rb") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + num_bytes, resource.RLIM_INFINITY))
