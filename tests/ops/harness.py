"""What a case of the contract suite is, and how one is run: outputs between guards, errors in one number."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from dyno import _core
from dyno.errors import UnsupportedError
from numpy.typing import NDArray

GUARD_BYTES = 256
GUARD = 0xA5


@dataclass(frozen=True)
class Case:
    """One op on given inputs, with what it must give.

    make(rng) returns (args, outputs, check): `args` for _core.ops.run without the outputs, `outputs` the
    initial contents of the arrays that the op writes, and check(outputs), which raises AssertionError when
    they are wrong.
    """

    family: str
    desc: dict[str, Any]
    make: Callable[[np.random.Generator], tuple[dict[str, Any], dict[str, NDArray[Any]], Check]]
    label: str = ""
    id: str = field(init=False, default="")

    def __post_init__(self) -> None:
        key = _core.ops.op_key(self.family, self.desc).replace(" ", "-")
        parts = [key, f"m={self.desc['m']}", self.label]
        object.__setattr__(self, "id", "-".join(part for part in parts if part))


Check = Callable[[dict[str, NDArray[Any]]], None]


def nmse(got: NDArray[Any], want: NDArray[Any]) -> float:
    """Sum of squared errors over the sum of squared deviations of the reference from its mean."""
    want = np.asarray(want, np.float64)
    error = float(np.sum((np.asarray(got, np.float64) - want) ** 2))
    spread = float(np.sum((want - want.mean()) ** 2)) if want.size > 1 else float(np.sum(want**2))
    return error / spread if spread > 0 else error


_more: contextvars.ContextVar[Iterator[float] | None] = contextvars.ContextVar("more", default=None)
_wanted: contextvars.ContextVar[list[NDArray[np.float64]] | None] = contextvars.ContextVar(
    "wanted", default=None
)


@contextlib.contextmanager
def allowing(more: Iterable[float]) -> Iterator[None]:
    """Within it, each expect_close allows in turn one of `more` beyond its own limit: see ops.rounding."""
    token = _more.set(iter(more))
    try:
        yield
    finally:
        _more.reset(token)


def recorded(check: Check, outputs: dict[str, NDArray[Any]]) -> list[NDArray[np.float64]]:
    """What a check would compare `outputs`, as they are before a launch, with: the references alone."""
    wanted: list[NDArray[np.float64]] = []
    token = _wanted.set(wanted)
    try:
        check(outputs)
    finally:
        _wanted.reset(token)
    return wanted


def expect_close(got: NDArray[Any], want: NDArray[Any], limit: float) -> None:
    """NMSE below `limit`; the message names the worst element."""
    wanted, more = _wanted.get(), _more.get()
    if wanted is not None:
        wanted.append(np.array(want, np.float64))
        return
    limit += 0.0 if more is None else next(more)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    value = nmse(got, want)
    worst = np.unravel_index(int(np.argmax(np.abs(got - want))), want.shape) if want.size else ()
    detail = f"worst at {tuple(int(i) for i in worst)}: {got[worst]} instead of {want[worst]}"
    assert value < limit, f"NMSE {value:.3g}, allowed {limit:.3g}; {detail}"


def expect_zeros(got: NDArray[Any], what: str) -> None:
    """Every element is 0; nothing to compare where answers are only recorded."""
    assert _wanted.get() is not None or not got.any(), f"{what} are not zeros"


def guarded(initial: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """A copy of `initial` in the middle of a buffer of guard bytes, and that buffer."""
    buffer = np.full(initial.nbytes + 2 * GUARD_BYTES, GUARD, np.uint8)
    inner = buffer[GUARD_BYTES : GUARD_BYTES + initial.nbytes].view(initial.dtype).reshape(initial.shape)
    inner[...] = initial
    return inner, buffer


def launch(
    case: Case,
    config: dict[str, Any] | None,
    args: dict[str, Any],
    outputs: dict[str, NDArray[Any]],
    *,
    threads: int = 1,
    isa: str = "auto",
    device: str = "cpu",
    captured: bool = False,
    sm_count: int = 0,
) -> dict[str, NDArray[Any]]:
    """Runs the op with its outputs between guards, checks the guards and returns copies of the outputs."""
    inner: dict[str, NDArray[Any]] = {}
    buffers: dict[str, NDArray[np.uint8]] = {}
    for name, initial in outputs.items():
        inner[name], buffers[name] = guarded(initial)
    before = {name: value.copy() for name, value in args.items() if isinstance(value, np.ndarray)}
    _core.ops.run(
        case.family,
        case.desc,
        config,
        {**args, **inner},
        threads=threads,
        isa=isa,
        device=device,
        captured=captured,
        sm_count=sm_count,
    )
    for name, buffer in buffers.items():
        assert (buffer[:GUARD_BYTES] == GUARD).all(), f"{name}: bytes before it were overwritten"
        assert (buffer[-GUARD_BYTES:] == GUARD).all(), f"{name}: bytes after it were overwritten"
    for name, value in before.items():
        np.testing.assert_array_equal(args[name], value, err_msg=f"input {name} was changed")
    return {name: array.copy() for name, array in inner.items()}


def isas() -> list[str]:
    """Instruction sets whose kernels this machine can run."""
    runnable = []
    probe = {
        "logits": np.zeros(1, np.float32),
        "uniform": np.zeros(1, np.float32),
        "out": np.zeros(1, np.int32),
    }
    for name in ("portable", "avx2", "avx512_vnni"):
        try:
            _core.ops.run("sample", {"n_vocab": 1}, None, probe, isa=name)
        except UnsupportedError:
            continue
        runnable.append(name)
    return runnable
