"""Rendering of chat templates in a separate process, with limits of time, memory and output."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

from dyno._locks import for_one_call
from dyno.errors import ChatError, NotInstalledError

__all__ = ["Limits", "Renderer"]

_START_S = 60.0
"""Seconds for Python to start and import the template engine, before it reads any hostile text."""


@dataclass(frozen=True)
class Limits:
    """The limits of one rendering. If it exceeds one, the process ends and an error is raised."""

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    """Address space of the process, including Python itself."""
    max_chars: int = 16 << 20
    """Maximum length of the prompt in characters."""


class Renderer:
    """A rendering process, started at the first request and kept for later ones.

    Args:
        limits: Limits of each rendering.

    Raises:
        ChatError: From `render`: the template is wrong, refuses the messages or exceeds a limit.
        NotInstalledError: From `render`: jinja2 is not installed.
        PlanError: From `render`: a signal handler calls it during another rendering of its thread.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None

    def render(self, request: dict[str, Any], name: str) -> dict[str, Any]:
        """The worker's answer to `request`; see `dyno.chat._worker.answer`.

        Args:
            request: The request without `max_chars`.
            name: Name of the template, for messages.
        """
        try:
            line = json.dumps({**request, "max_chars": self._limits.max_chars}).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatError(f"[chat] messages and tools must be plain JSON values: {error}") from error
        if (
            os.getpid() != self._pid
        ):  # a forked child has copies of the parent's pipes, and possibly of its held lock
            self._lock, self._process, self._pid = threading.RLock(), None, os.getpid()
        with for_one_call(self._lock, "chat template"):
            try:
                process = self._process or self._start()
                reply = self._exchange(process, line, self._limits.seconds)
            except BaseException:  # including interrupts: an unread answer must not be taken for the next one
                self.close()
                raise
            if reply is None:
                self.close()
                raise ChatError(
                    f"[chat] the template {name} did not end within {self._limits.seconds:g} s; "
                    "pass another one with --chat-template FILE"
                )
            if not reply:
                self.close()
                raise ChatError(
                    f"[chat] the template {name} ended the process that rendered it "
                    f"({self._limits.memory_bytes >> 20} MiB of memory at most); pass another one with "
                    "--chat-template FILE"
                )
        return dict(json.loads(reply))

    def close(self) -> None:
        """End the process. The next request starts another one."""
        process, self._process = self._process, None
        if process is not None and self._end is not None:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        import importlib.util

        if importlib.util.find_spec("jinja2") is None:
            raise NotInstalledError("chat templates need jinja2, which is missing: pip install jinja2")
        code = (
            f"import sys; sys.path[:] = {[p for p in sys.path if p]!r}; from dyno.chat._worker import main; "
            f"main({self._limits.memory_bytes}, {self._limits.seconds})"
        )
        process = subprocess.Popen(
            [sys.executable, "-P", "-I", "-X", "utf8", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Ctrl-C at the terminal is for the caller, also while this process starts.
            start_new_session=True,
            # The environment is empty, so a template cannot read secrets from it.
            env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
        )
        self._process = process
        self._end = weakref.finalize(self, _end, process, os.getpid())
        if self._exchange(process, b"", _START_S) != b"ready\n":
            self.close()
            raise ChatError("[chat] the process that renders chat templates did not start")
        return process

    @staticmethod
    def _exchange(process: subprocess.Popen[bytes], request: bytes, seconds: float) -> bytes | None:
        """Send one line and read one: None after `seconds`, empty if the process has ended."""
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + seconds
        given, taken = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(given, False)
        os.set_blocking(taken, False)
        rest, reply = memoryview(request), bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(taken, selectors.EVENT_READ)
            if rest:
                selector.register(given, selectors.EVENT_WRITE)
            while not reply.endswith(b"\n"):
                left = max(deadline - time.monotonic(), 0.0)
                ready = selector.select(left)
                if not ready and left == 0:  # an answer that has arrived counts as in time
                    return None
                for key, _ in ready:
                    if key.fd == given:
                        try:
                            rest = rest[os.write(given, rest) :]
                        except BrokenPipeError:
                            return b""
                        if not rest:
                            selector.unregister(given)
                        continue
                    piece = os.read(taken, 1 << 16)
                    if not piece:
                        return b"" if left > 0 else None  # the process ends itself if it takes too long
                    reply += piece
        return bytes(reply)


def _end(process: subprocess.Popen[bytes], pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child must not end the process of its parent
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()
