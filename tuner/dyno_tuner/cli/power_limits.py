"""`tune --power-limits`: a tune at each power limit, and then a comparison of the limits."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import typer

from ..ab.compare import FASTER, SAME, SLOWER, Compared, Options, compare
from ..core.errors import DisturbedError, Interrupted, TuneError
from ..core.options import ENERGY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ..ab.compare import Metric
    from ..ab.run import Run
    from ..core.protocol import Workload
    from ..run.session import Request, Result

MOST = 8
COMPARE_SHARE = 0.25  # share of the budget for the comparison of limits
LEAST_SECONDS = 60.0  # seconds of a tune; a shorter one measures hardly more than the noise and the answers


def parse_limits(text: str) -> list[float]:
    """Watts of a list such as `400,500,600`, from the highest to the lowest.

    Raises:
        typer.BadParameter: It is not such a list, or has only one limit, or more than eight.
    """
    if not re.fullmatch(r"[0-9]{1,5}(,[0-9]{1,5})*", text):
        raise typer.BadParameter(
            f"--power-limits {text!r} is not a list of watts; write, for example, --power-limits 400,500,600"
        )
    found = sorted({float(word) for word in text.split(",")}, reverse=True)
    if len(found) < 2:
        raise typer.BadParameter(
            f"--power-limits {text} is a single limit; give at least two to compare, or set one limit with "
            "nvidia-smi -pl"
        )
    if len(found) > MOST:
        raise typer.BadParameter(f"--power-limits names {len(found)} limits; give at most {MOST}")
    return found


def check_options(watts: Sequence[float], budget: float, given: Mapping[str, bool]) -> None:
    """Refuse options that cannot be combined with power limits.

    Args:
        budget: Total seconds.
        given: By option that the comparison of limits would ignore: whether it is given.

    Raises:
        typer.BadParameter: Such an option is given, or the budget is too short.
    """
    for option, is_there in given.items():
        if is_there:
            raise typer.BadParameter(
                f"{option} cannot be combined with --power-limits: the comparison of the limits would "
                "ignore it"
            )
    needed = math.ceil(LEAST_SECONDS * len(watts) / (1 - COMPARE_SHARE))
    if budget < needed:
        raise typer.BadParameter(
            f"--budget is {budget:g} s, but tunes at {len(watts)} power limits and their comparison need "
            f"{needed} s; give a longer budget or fewer limits"
        )


class Limit(Protocol):
    """The protocol of a setter of power limits; `measure.power_limit.PowerLimit` implements it."""

    def set(self, watts: float) -> None: ...


@dataclass(frozen=True)
class AtLimit:
    """A tune at one power limit, and the comparison of its profile with the one of the highest limit."""

    watts: float
    result: Result
    compared: Compared | None = None
    """The comparison with the highest limit; None for the highest limit itself."""

    def to_dict(self, objective: str) -> dict[str, Any]:
        found = self.compared
        return {
            "watts": self.watts, "profile": None if self.result.path is None else str(self.result.path),
            "outcome": self.result.outcome.to_dict(),
            "ratio_of": "tokens per joule" if objective == ENERGY else "tokens per second",
            "ratio": {} if found is None else {n: m.to_dict() for n, m in found.metrics.items()},
            "joules_per_token": {} if found is None else {
                n: {source: [a.joules_per_token, b.joules_per_token] for source, (a, b) in by.items()}
                for n, by in found.energy.items()
            },
        }  # fmt: skip


def tune_at_limits(
    request: Request, watts: Sequence[float], limit: Limit, tune: Callable[[Request], Result],
    side: Callable[[float, Result], Callable[[Workload], Run]], say: Callable[[str], None],
) -> list[AtLimit]:  # fmt: skip
    """Tune at each limit, and compare each profile at its limit with the one of the highest limit.

    The key of a profile includes the limit, so each limit has its own profile.

    Args:
        watts: The limits, from the highest to the lowest.
        tune: Runs one tune.
        side: Gives the measuring side of one profile. It starts after its limit is set.
        say: Receives a line about each step.

    Raises:
        Interrupted: Ctrl-C or SIGTERM ended a tune or a comparison. No further limit is set.
        DisturbedError: The machine did not become quiet.
    """
    budget = request.options.budget
    shares = None if budget is None else budget * (1 - COMPARE_SHARE) / len(watts)
    results: list[tuple[float, Result]] = []
    for one in watts:
        say(f"power limit {one:g} W")
        options = dataclasses.replace(request.options, budget=shares)
        at_limit = dataclasses.replace(request, options=options, out=_out(request.out, one))
        with _ends_all(f"interrupted in the tune at {one:g} W", results):
            limit.set(one)
            result = tune(at_limit)
            results.append((one, result))
            if result.outcome.status == "interrupted":  # the tune itself has caught the signal
                raise KeyboardInterrupt
    found = [AtLimit(*results[0])]
    energy = request.options.objective == ENERGY
    left = None if budget is None else budget * COMPARE_SHARE / max(1, len(watts) - 1)
    for one, result in results[1:]:
        say(f"comparing {one:g} W with {watts[0]:g} W")
        sides = {"A": (watts[0], side(*results[0])), "B": (one, side(one, result))}
        options_ = Options(
            request.options.workload, budget=left, seed=request.options.seed,
            unit="tokens/J" if energy else "t/s",
        )  # fmt: skip

        def measure(name: str, sides: Mapping[str, Any] = sides) -> Run:
            at, run = sides[name]
            limit.set(at)
            try:
                done: Run = run(request.options.workload)
            except DisturbedError as error:
                raise DisturbedError(f"{error}; stop these programs, or give --force") from error
            return _by_energy(done) if energy else done

        with _ends_all(f"interrupted in the comparison of {one:g} W with {watts[0]:g} W", results):
            compared = compare(measure, options_, say)
            if compared.interrupted:
                raise KeyboardInterrupt
        found.append(AtLimit(one, result, compared))
    return found


@contextlib.contextmanager
def _ends_all(message: str, results: Sequence[tuple[float, Result]]) -> Iterator[None]:
    """End all steps if one is interrupted, with a message about the written profiles.

    Raises:
        Interrupted: The step was interrupted.
        DisturbedError: The machine did not become quiet during the step.
        TuneError: The step failed.
    """
    try:
        yield
    except (KeyboardInterrupt, Interrupted) as error:
        raise Interrupted(
            f"{message}; {_written(results)}. The same command starts from the beginning"
        ) from error
    except DisturbedError as error:
        raise DisturbedError(f"{error}; {_written(results)}") from error
    except TuneError as error:
        raise TuneError(f"{error}; {_written(results)}") from error


def _written(results: Sequence[tuple[float, Result]]) -> str:
    paths = ", ".join(str(result.path) for _, result in results if result.path is not None)
    return f"profiles written: {paths}" if paths else "no profile was written"


def _out(out: Path | None, watts: float) -> Path | None:
    return None if out is None else out.with_name(f"{out.stem}.{watts:g}w{out.suffix}")


def _by_energy(run: Run) -> Run:
    """The result of a process as tokens per joule, over all sources together.

    Raises:
        TuneError: No counter could be read.
    """
    rates = {}
    for metric in run.rates:
        by = run.energy.get(metric, {})
        if not by:
            raise TuneError(f"--objective energy: no energy counter could be read for {metric}")
        joules = sum(e.joules_per_token for e in by.values())
        if joules <= 0:
            raise TuneError(f"--objective energy: the energy counter did not change during {metric}")
        rates[metric] = (1 / joules,)
    return dataclasses.replace(run, rates=rates)


def best(found: Sequence[AtLimit]) -> AtLimit:
    """The limit with the largest gain over the highest one and without a loss; the highest one if there is
    none."""

    def gain(one: AtLimit) -> float:
        assert one.compared is not None
        product = 1.0
        for metric in one.compared.metrics.values():
            product *= metric.ratio.ratio
        return product

    better = [one for one in found[1:] if one.compared is not None and one.compared.verdict == FASTER]
    return max(better, key=gain, default=found[0])


_BETTER = {FASTER: "better", SLOWER: "worse", SAME: "no difference"}


def _words(metric: Metric) -> str:
    return f"{metric.ratio} ({_BETTER[metric.verdict]})"


def lines(found: Sequence[AtLimit], objective: str, bus: str) -> list[str]:
    """The limits in words, the highest first.

    Args:
        bus: PCI bus id of the GPU. Without it, `nvidia-smi` would change all GPUs.
    """
    unit = "tokens per joule" if objective == ENERGY else "tokens per second"
    told = [f"{found[0].watts:g} W: the highest limit; the other limits are compared with it"]
    for one in found[1:]:
        assert one.compared is not None
        ratios = ", ".join(f"{name} {_words(m)}" for name, m in one.compared.metrics.items())
        told.append(f"{one.watts:g} W: {unit}: {ratios}")
    chosen = best(found)
    profile = chosen.result.path or "none, because no setting was judged at this limit"
    told.append(
        f"best limit by {objective}: {chosen.watts:g} W, profile {profile}; to set this limit, run "
        f"nvidia-smi -i {bus} -pl {chosen.watts:g}"
    )
    return told
