"""The child process of `worker`, started as `python -m dyno_tuner.execution.worker_main READ_FD WRITE_FD
PARENT_PID`."""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import logging
import os
import signal
import sys
import tempfile
import traceback
from typing import Any

from ..core.errors import TargetFailure, TargetLost, TargetUnusable, TuneError
from ..core.options import MeasurementPolicy
from ..core.protocol import Configuration, OpContext, TrialStatus, Workload
from ..measure.measurement import run_measurement
from ..targets import MODULES

_PR_SET_PDEATHSIG = 1


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, and exit if it already has."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(0)


def make_target(name: str, options: dict[str, Any]) -> Any:
    """Make a target. Raises TargetUnusable."""
    if name not in MODULES:
        raise TargetUnusable(f"no target {name!r}; choose from {', '.join(MODULES)}")
    return importlib.import_module(MODULES[name]).from_options(options)


def _handle(target: Any, request: dict[str, Any]) -> Any:
    method = request["method"]
    if method == "describe":
        return target.describe().to_dict()
    if method == "time_ops":
        ask = request["request"]
        return target.time_ops(
            ask["key"], ask["m"], ask["configs"], threads=ask["threads"], seconds=ask["seconds"],
            depth=ask.get("depth", 0),
        )  # fmt: skip
    if method == "memory":
        where = request.get("where", "device")
        return target.memory(request["settings"], *([where] if where != "device" else []))
    if method == "expected":
        return target.expected(request["settings"], Workload.from_dict(request["workload"]))
    configuration = Configuration.from_dict(request["configuration"])
    if method == "kernel_ops":
        ops = target.kernel_ops(configuration, Workload.from_dict(request["workload"]))
        return [op.to_dict() for op in ops]
    if method == "routing":
        return target.routing(configuration, Workload.from_dict(request["workload"]))
    context = OpContext.from_dict(request["context"])
    if method == "quality":
        return target.quality(configuration, context).to_dict()
    if method == "measurement":
        workload = Workload.from_dict(request["workload"])
        policy = MeasurementPolicy(**request["policy"])
        return run_measurement(target, configuration, workload, request["metrics"], policy, context).to_dict()
    raise ValueError(f"worker: no method {method!r}")


def _answer(target: Any, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": _handle(target, request)}
    except TargetFailure as failure:
        return {"error": "failure", "status": failure.status, "message": failure.message}
    except TargetLost as error:
        return {"error": "lost", "message": str(error)}
    except MemoryError as error:
        return {"error": "failure", "status": TrialStatus.OOM, "message": f"out of memory: {error}"}
    except TuneError as error:
        return {"error": "unusable", "message": str(error)}
    except OSError as error:
        traceback.print_exc()
        return {"error": "unusable", "message": _with_place(error)}
    except Exception as error:  # the parent decides; it keeps our output with the traceback
        traceback.print_exc()
        return {"error": "unusable", "message": f"{type(error).__name__}: {error}"}


def _with_place(error: OSError) -> str:
    """The error with its place: the file, or the folder of temporary files for a write error without a file
    name."""
    said = error.strerror or str(error)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    advice = "; free space there or set TMPDIR" if full else ""
    if error.filename is not None:
        return f"{error.filename}: {said}{advice}"
    return f"{said} (temporary files go to {tempfile.gettempdir()}){advice}"


class _Said(logging.Handler):
    """A log handler that keeps warnings until the next answer, with which the parent gets and shows them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    said = _Said()
    logging.getLogger("dyno.tuner").addHandler(said)
    read_fd, write_fd, parent = (int(a) for a in sys.argv[1:4])
    _die_with(parent)
    target: Any = None
    with os.fdopen(read_fd, "rb") as requests, os.fdopen(write_fd, "wb", buffering=0) as answers:
        for line in requests:
            request = json.loads(line)
            if request["method"] == "close":
                if target is not None:
                    target.close()
                answers.write(b"{}\n")
                return
            if request["method"] == "start":
                try:
                    target = make_target(request["target"], request["options"])
                    answer: dict[str, Any] = {"value": True}
                except (TargetFailure, TargetLost, TuneError, MemoryError) as error:
                    answer = {"error": "unusable", "message": str(error)}
                except Exception as error:
                    traceback.print_exc()
                    answer = {"error": "unusable", "message": f"{type(error).__name__}: {error}"}
            else:
                answer = _answer(target, request)
            if said.lines:
                answer["said"], said.lines = said.lines, []
            answers.write(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
