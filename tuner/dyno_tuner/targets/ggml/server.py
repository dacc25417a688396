"""Measurements of llama-server (llama.cpp, ik_llama.cpp) under the load of HTTP clients."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import tempfile
import time
from typing import IO, TYPE_CHECKING

from ...core.errors import TargetFailure, TargetUnusable
from ...core.protocol import TrialStatus
from ...measure.served_load import Figures, HttpClient, LoadError, drive, figures
from .process import Finished, _die_with_parent, judge, resident_peak
from .spelling import spell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ...core.protocol import Value
    from ...core.serve_load import ServedLoad
    from .help import Help

__all__ = ["BATCH", "DRAFT", "ITS_OWN", "SEQUENCES", "own_defaults", "served", "server_words"]

SEQUENCES = 4
"""Slots that llama-server opens if it chooses their number."""
BATCH = 2048
"""Default logical batch of llama-server, in tokens per step."""
DRAFT = 48
"""Maximum length of an n-gram draft, in tokens."""
ITS_OWN = frozenset({"sequences", "batch", "kv_unified", "spec", "spec_max"})
"""Settings that only a server has."""
_END = 60.0  # seconds in which a server ends that has cut off an answer
_LOOK = 0.05  # seconds between two looks at a server that starts


def own_defaults(help_: Help, batch: int) -> dict[str, Value]:
    """The settings of `ITS_OWN` that this llama-server has, with its defaults.

    Args:
        batch: logical batch of the user's command line, or the default.
    """
    slots, unified = help_.get("-np"), help_.get("-kvu")
    count = slots.default if slots is not None else ""
    found: dict[str, Value] = {
        "sequences": int(count) if count.isdigit() and int(count) else SEQUENCES,
        "batch": batch,
    }
    if unified is not None:
        found["kv_unified"] = unified.default.lower() in ("enabled", "true", "1")
    if help_.has("--spec-type"):
        found |= {"spec": "off", "spec_max": DRAFT}
    return found


def server_words(
    settings: Mapping[str, Value], load: ServedLoad, engine: str, help_: Help,
    op_ids: Mapping[str, int] | None, cuda: Mapping[str, str] | None,
) -> tuple[list[str], dict[str, str | None]]:  # fmt: skip
    """The words and variables that pass settings to llama-server.

    Slots share the context, so it is the number of slots times the length of a request.

    Raises:
        NoSpelling: as in `spell`.
    """
    rest = dict(settings)
    sequences = int(rest.pop("sequences", SEQUENCES))
    batch = max(int(rest.pop("batch", BATCH)), int(rest.get("ubatch", 1)))
    spelled = spell(rest, engine, help_, bench=False, batch=batch, op_ids=op_ids, cuda=cuda)
    words = list(_without(spelled.all_args(), "-b"))
    each = load.pp + load.tg + 8  # servers of these engines reserve a few positions
    return [*words, "-b", str(batch), "-np", str(sequences), "-c", str(sequences * each)], spelled.env


def _without(words: Sequence[str], flag: str) -> Iterator[str]:
    """Words without a flag and its value."""
    given = iter(words)
    for word in given:
        if word == flag:
            next(given, None)
        else:
            yield word


@contextlib.contextmanager
def _server(
    command: Sequence[str], environment: Mapping[str, str | None], deadline: float, folder: str,
    ended: Callable[[Finished], None],
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:  # fmt: skip
    """A context manager for a server that is ready; gives its address and process. At the end it calls
    `ended` with the output of the process.

    Raises:
        TargetFailure: the server ended by itself, or was not ready within `deadline` seconds.
        TargetUnusable: the server cannot be started.
    """
    merged = {n: v for n, v in {**os.environ, **environment}.items() if v is not None}
    port = _free_port()
    with tempfile.TemporaryFile() as out:
        begun = time.monotonic()
        try:
            child = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)], env=merged, stdin=subprocess.DEVNULL,
                stdout=out, stderr=out, preexec_fn=_die_with_parent, cwd=folder,
            )  # fmt: skip
        except OSError as error:
            raise TargetUnusable(f"{command[0]} cannot be started: {error.strerror or error}") from error
        try:
            while not _is_ready(port):
                if child.poll() is not None:
                    judge(_finished(out, time.monotonic() - begun, child.returncode))
                    raise TargetFailure(TrialStatus.CRASH, "llama-server ended before it was ready")
                if time.monotonic() - begun > deadline:
                    raise TargetFailure(
                        TrialStatus.TIMEOUT, f"llama-server was not ready within {deadline:.0f} s"
                    )
                time.sleep(_LOOK)
            try:
                yield f"http://127.0.0.1:{port}", child
            except LoadError as error:
                if _ends(child, cut_off=error.__cause__ is not None):
                    judge(_finished(out, time.monotonic() - begun, child.returncode))
                raise TargetFailure(TrialStatus.CRASH, f"llama-server: {error}") from error
        finally:
            child.kill()
            child.wait()
            ended(_finished(out, time.monotonic() - begun, child.returncode))


def _ends(child: subprocess.Popen[bytes], *, cut_off: bool) -> bool:
    """Whether a server has ended. If it `cut_off` an answer, it may still write a core."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_END if cut_off else 0)
    return child.returncode is not None


def _finished(out: IO[bytes], seconds: float, code: int) -> Finished:
    out.seek(0)
    return Finished("", out.read().decode(errors="replace"), seconds, code)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def served(
    command: Sequence[str], environment: Mapping[str, str | None], load: ServedLoad,
    prompts: Sequence[Sequence[Sequence[int]]], *, deadline: float, folder: str,
    ended: Callable[[Finished], None],
) -> tuple[list[Figures], float | None]:  # fmt: skip
    """Measure several loads on one server, after one warm-up request.

    Args:
        command: command of the server with its settings, without an address.
        environment: variables to set; None unsets one.
        load: load of the clients.
        prompts: prompts of each load.
        deadline: seconds in which the server must be ready.
        folder: working folder.
        ended: called with the output of the process after its end.

    Returns:
        The figures of each load, and the peak resident memory in MiB.

    Raises:
        TargetFailure: the server ended, or refused a request.
    """
    found = []
    with _server(command, environment, deadline, folder, ended) as (address, child):
        client = HttpClient(address)
        client(prompts[0][0][::-1], 2)
        for each in prompts:
            timings = drive(load, each, client)
            if (short := min(timing.tokens for timing in timings)) < load.tg:
                raise TargetFailure(
                    TrialStatus.INVALID, f"llama-server wrote {short} of {load.tg} tokens of an answer"
                )
            found.append(figures(timings))
        return found, resident_peak(child.pid)
