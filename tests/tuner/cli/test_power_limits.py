"""`tune --power-limits` on a simulated GPU whose speed and power follow its limit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import typer
from dyno import profiles
from dyno_tuner.ab.run import Energy, Run
from dyno_tuner.cli import commands
from dyno_tuner.cli.commands import app
from dyno_tuner.cli.power_limits import AtLimit, best, lines, parse_limits, tune_at_limits
from dyno_tuner.core.errors import DisturbedError, Interrupted, TuneError
from dyno_tuner.core.protocol import Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.measure.machine_monitor import Window
from dyno_tuner.run.session import Request, Result, run
from dyno_tuner.run.tune import Options
from dyno_tuner.space.knobs import Fidelity, Knob
from dyno_tuner.targets.simulated.surfaces import Surface
from dyno_tuner.targets.simulated.target import SimulatedTarget
from typer.testing import CliRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dyno_tuner.core.protocol import Settings


def plain(text: str) -> str:
    """The text of a box, without its frame and line breaks."""
    return " ".join(text.replace("│", " ").split())


WORKLOAD = Workload(pp=64, tg=8)
BUS = "00000000:07:00.0"
SPEED = {700.0: 1.0, 500.0: 0.97, 300.0: 0.6}
POWER = {700.0: 1.0, 500.0: 0.75, 300.0: 0.7}


class Card:
    """The device: its limit scales the true rates and watts of a surface."""

    def __init__(self) -> None:
        self.watts = 700.0
        self.set_to: list[float] = []

    def set(self, watts: float) -> None:
        self.watts = watts
        self.set_to.append(watts)

    def tune(self, request: Request) -> Result:
        at = self.watts
        knobs = (Knob("ubatch", (128, 256, 512), 256, fidelity=Fidelity.ROUNDING),)

        def rates(s: Settings) -> dict[str, float]:
            return {"pp": SPEED[at] * 6 * int(s["ubatch"]) ** 0.7, "tg": SPEED[at] * 30}

        surface = Surface("card", knobs, rates, watts=lambda s: 80 * POWER[at])
        device = {
            "kind": "cuda", "compute_capability": "9.0", "sm_count": 132, "memory_mib": 81_000,
            "power_limit_w": at,
        }  # fmt: skip

        class Gpu(SimulatedTarget):
            def describe(self) -> Any:
                found = super().describe()
                return dataclasses.replace(found, device=device)

        target = Gpu(surface, 7)
        return run(request, InlineExecutor(target), target.surface.space())

    def side(self, watts: float, result: Result) -> Callable[[Workload], Run]:
        """Runs at the limit that is set when they run, with a little noise."""
        noise = iter([0.001, -0.001, 0.0] * 100)

        def measured(workload: Workload) -> Run:
            assert self.watts == watts, "the limit is that of the side"
            jitter = 1 + next(noise)
            rate = 100 * SPEED[watts] * jitter
            joules = 7 * POWER[watts] / SPEED[watts] / jitter
            return Run(
                {m: (rate, rate * 1.001) for m in workload.metrics},
                energy={m: {"gpu": Energy(joules, joules * rate)} for m in workload.metrics},
            )

        return measured


def searched(
    folder: Path, objective: str, card: Card, say: Callable[[str], None] = lambda line: None
) -> list[AtLimit]:
    options = Options(WORKLOAD, seed=1, objective=objective, max_trials=12, rounds=2, max_rounds=2)
    request = Request("simulated", options, device="cuda:0", out=folder / "p.yaml", quiet=True)
    return tune_at_limits(request, [700.0, 500.0, 300.0], card, card.tune, card.side, say)


def test_every_limit_gets_a_profile_of_its_own(tmp_path: Path) -> None:
    card = Card()
    found = searched(tmp_path, "speed", card)
    assert card.set_to[:3] == [700.0, 500.0, 300.0]
    for one in found:
        profile = profiles.load_profile(one.result.path)
        assert profile.match.device.power_limit_w == one.watts  # type: ignore[union-attr]
    assert [one.result.path.name for one in found] == ["p.700w.yaml", "p.500w.yaml", "p.300w.yaml"]


def test_the_best_limit_follows_the_objective(tmp_path: Path) -> None:
    """The lower limit loses 3 % of the speed and saves 23 % of the energy; the lowest one wastes both."""
    fast = searched(tmp_path / "speed", "speed", Card())
    frugal = searched(tmp_path / "energy", "energy", Card())
    assert best(fast).watts == 700.0
    assert best(frugal).watts == 500.0
    told = frugal[1].to_dict("energy")
    assert told["ratio_of"] == "tokens per joule"
    assert told["ratio"]["tg8"]["ratio"] == pytest.approx(0.97 / 0.75, rel=0.01)
    assert told["joules_per_token"]["tg8"]["gpu"][1] < told["joules_per_token"]["tg8"]["gpu"][0]
    said = "\n".join(lines(frugal, "energy", BUS))
    assert "best limit by energy: 500 W" in said
    assert said.endswith(f"to set this limit, run nvidia-smi -i {BUS} -pl 500"), "of this GPU, not of all"
    assert "(worse)" in "\n".join(lines(fast, "speed", BUS))


@pytest.mark.parametrize(
    ("objective", "said"),
    [("speed", "tg8 100.0 and 97.0 t/s (0.97"), ("energy", "tg8 0.143 and 0.185 tokens/J (1.29")],
)
def test_rounds_name_the_unit_of_the_objective(tmp_path: Path, objective: str, said: str) -> None:
    told: list[str] = []
    searched(tmp_path, objective, Card(), told.append)
    assert said in next(line for line in told if line.startswith("round 1:")), told


def test_energy_without_a_counter_is_an_error(tmp_path: Path) -> None:
    class Blind(Card):
        def side(self, watts: float, result: Result) -> Callable[[Workload], Run]:
            return lambda workload: Run({m: (100.0,) for m in workload.metrics})

    with pytest.raises(
        TuneError, match=r"no energy counter could be read.*; profiles written: .*p\.300w\.yaml"
    ):
        searched(tmp_path, "energy", Blind())


def test_a_counter_that_does_not_move_is_an_error(tmp_path: Path) -> None:
    class Still(Card):
        def side(self, watts: float, result: Result) -> Callable[[Workload], Run]:
            none = {"gpu": Energy(0.0, 0.0)}
            return lambda workload: Run(
                {m: (100.0,) for m in workload.metrics}, energy=dict.fromkeys(workload.metrics, none)
            )

    with pytest.raises(
        TuneError, match=r"the energy counter did not change during .*; profiles written: .*p\.300w"
    ):
        searched(tmp_path, "energy", Still())


class Stopped(Card):
    """The second tune is interrupted, and ends as `Tune.run` ends then: with a status."""

    def tune(self, request: Request) -> Result:
        result = super().tune(request)
        if self.watts == 500.0:
            result.outcome.status = "interrupted"
        return result


def test_a_limit_at_which_nothing_was_judged_has_no_profile(tmp_path: Path) -> None:
    """Its comparison runs with the engine's defaults, and no line names a file that is not there."""

    class Short(Card):
        def tune(self, request: Request) -> Result:
            options = dataclasses.replace(request.options, max_trials=0 if self.watts == 700.0 else 12)
            return super().tune(dataclasses.replace(request, options=options))

        def side(self, watts: float, result: Result) -> Callable[[Workload], Run]:
            assert (result.path is None) == (watts == 700.0)
            return super().side(watts, result)

    found = searched(tmp_path, "speed", Short())
    assert best(found).watts == 700.0
    assert found[0].to_dict("speed")["profile"] is None
    assert found[1].to_dict("speed")["profile"] == str(tmp_path / "p.500w.yaml")
    assert (
        "best limit by speed: 700 W, profile none, because no setting was judged at this limit;"
        in lines(found, "speed", BUS)[-1]
    )
    assert not (tmp_path / "p.700w.yaml").exists()


def test_an_interrupted_tune_ends_all(tmp_path: Path) -> None:
    card = Stopped()
    with pytest.raises(
        Interrupted, match=r"interrupted in the tune at 500 W; profiles written: .*p\.700w\.yaml"
    ):
        searched(tmp_path, "speed", card)
    assert card.set_to == [700.0, 500.0], "no further limit is set"


@pytest.mark.parametrize("runs", [2, 12], ids=["before two rounds", "after two rounds"])
def test_an_interrupted_comparison_ends_all(tmp_path: Path, runs: int) -> None:
    left = iter(range(runs))

    class Cut(Card):
        def side(self, watts: float, result: Result) -> Callable[[Workload], Run]:
            measured = super().side(watts, result)

            def counted(workload: Workload) -> Run:
                if next(left, None) is None:
                    raise KeyboardInterrupt
                return measured(workload)

            return counted

    card = Cut()
    with pytest.raises(Interrupted, match="interrupted in the comparison of 500 W with 700 W"):
        searched(tmp_path, "speed", card)
    assert 300.0 not in card.set_to[3:], "no further comparison begins"


class Limit:
    """The setter of limits of a card, as the command uses it."""

    before = 650.0

    def __init__(self, card: Card) -> None:
        self.card = card
        self.set_back: list[float] = []

    def check(self, watts: list[float]) -> None:
        assert watts == [500.0, 300.0]

    def set(self, watts: float) -> None:
        self.card.set(watts)

    def __enter__(self) -> Limit:
        return self

    def __exit__(self, *error: object) -> None:
        self.set_back.append(self.card.watts)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    """A GPU with a power limit for the whole command, which has no GPU."""
    made = Limit(Card())

    class Device:
        info: ClassVar = {"pci_bus_id": BUS}

    def of(bus: str) -> Limit:
        assert bus == BUS
        return made

    monkeypatch.setattr(commands, "devices_of", lambda *words: ["cuda:0"])
    monkeypatch.setattr("dyno.devices.resolve_device", lambda name: Device)
    monkeypatch.setattr("dyno_tuner.measure.power_limit.PowerLimit", of)
    return made


class Watch:
    """The watch over a machine: in the fourth window the GPU is too hot."""

    opened: ClassVar[list[tuple[str, bool]]] = []

    def __init__(self, bus: str, *, host_weights: bool) -> None:
        self.opened.append((bus, host_weights))
        self.windows = 0

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is held."""

    @contextlib.contextmanager
    def window(self) -> Iterator[Window]:
        self.windows += 1
        window = Window()
        hot = self.windows == 4
        window.add({"throttle_reasons": 0x40 if hot else 0, "power_limit_w": 500.0, "temperature_c": 90})
        yield window


def test_rounds_between_limits_are_watched(
    limit: Limit, trained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tune measures a process on a throttled GPU again at the same limit, and tells what it saw."""
    runs: list[tuple[float, dict[str, Any]]] = []
    noise = iter([0.001, -0.001, 0.0] * 100)

    class Side:
        def __init__(self, name: str, model: str, **given: Any) -> None:
            self.name, self.settings = name, given["settings"]

        def run(self, workload: Workload) -> Run:
            assert self.name == f"{limit.card.watts:g} W"
            runs.append((limit.card.watts, self.settings))
            rate = 100 * SPEED[limit.card.watts] * (1 + next(noise)) if limit.card.watts in SPEED else 1.0
            return Run({m: (rate, rate) for m in workload.metrics})

    def tune(request: Request) -> Result:
        options = Options(WORKLOAD, seed=1, max_trials=2, rounds=2, max_rounds=2)
        return limit.card.tune(dataclasses.replace(request, options=options, device="cuda:0"))

    waited: list[float] = []
    monkeypatch.setattr(Watch, "opened", [])
    monkeypatch.setattr("dyno_tuner.measure.machine_monitor.Machine", Watch)
    monkeypatch.setattr("dyno_tuner.ab.dyno_side.DynoSide", Side)
    monkeypatch.setattr("dyno_tuner.run.session.run", tune)
    monkeypatch.setattr(commands.time, "sleep", waited.append)
    words = ["--gpu", "0", "--workload", "pp=64,tg=8", "--out", str(tmp_path / "p.yaml"), "--json"]
    argv = ["--model", str(trained_model), "--power-limits", "300,500", "--ctx", "256", *words]
    done = CliRunner().invoke(app, argv)
    assert done.exit_code == 0, done.output
    assert Watch.opened == [(BUS, True)]
    # The load that decides nothing, then 500, 300, 300, 500, of which the third was measured twice.
    assert [watts for watts, _ in runs[:6]] == [500.0, 500.0, 300.0, 300.0, 300.0, 500.0]
    assert len(waited) == 1
    assert "the GPU is throttled (hardware thermal slowdown)" in done.stderr
    assert all(settings["ctx"] == 256 for _, settings in runs), "the context is that of the tunes"
    assert json.loads(done.stdout)["machine"]["throttled"] == 1
    assert limit.set_back


def test_a_machine_that_stays_busy_ends_the_comparison(tmp_path: Path) -> None:
    class Busy(Card):
        def side(self, watts: float, result: Result) -> Callable[[Workload], Run]:
            def measured(workload: Workload) -> Run:
                raise DisturbedError("the machine did not become quiet in 30 s: others used 2 cores")

            return measured

    with pytest.raises(
        DisturbedError, match=r"others used 2 cores; stop these .*; profiles written: .*p\.300w\.yaml"
    ):
        searched(tmp_path, "speed", Busy())


def test_joules_behind_a_context_are_not_compared(limit: Limit, trained_model: Path) -> None:
    argv = ["--model", str(trained_model), "--power-limits", "300,500", "--gpu", "0", "--objective", "energy"]
    done = CliRunner().invoke(app, [*argv, "--workload", "pp=64,tg=8,depth=64"])
    assert done.exit_code == 2, done.output
    assert "cannot measure a workload with depth" in plain(done.output)
    assert limit.card.set_to == []


@pytest.mark.parametrize("caught", [True, False], ids=["in the tune", "outside of it"])
def test_an_interrupt_sets_the_limit_back_and_exits_with_130(
    caught: bool, limit: Limit, trained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def tune(request: Request) -> Result:
        if not caught:
            raise KeyboardInterrupt
        options = Options(WORKLOAD, seed=1, max_trials=2, rounds=2, max_rounds=2)
        result = limit.card.tune(dataclasses.replace(request, options=options, device="cuda:0"))
        result.outcome.status = "interrupted"
        return result

    monkeypatch.setattr("dyno_tuner.run.session.run", tune)
    words = ["--gpu", "0", "--workload", "pp=64,tg=8", "--out", str(tmp_path / "p.yaml"), "--quiet"]
    argv = ["tune", "--model", str(trained_model), "--power-limits", "300,500", *words]
    monkeypatch.setattr("sys.argv", argv)
    usual = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            commands.main()
    finally:
        signal.signal(signal.SIGTERM, usual)
    said = capsys.readouterr().err
    assert ended.value.code == 130, said
    assert "interrupted in the tune at 500 W" in said
    assert "--resume" not in said, "several tunes have none"
    assert (limit.card.set_to, limit.set_back) == ([500.0], [500.0])


def test_limits_are_read_from_the_highest() -> None:
    assert parse_limits("400,600,500,600") == [600.0, 500.0, 400.0]
    for text in ("", "400;500", "-1", "4e2", ",".join(str(n) for n in range(100, 109))):
        with pytest.raises(typer.BadParameter, match="--power-limits"):
            parse_limits(text)
    for text in ("400", "400,400"):
        with pytest.raises(typer.BadParameter, match="give at least two to compare"):
            parse_limits(text)


@pytest.mark.parametrize(
    "words",
    [["--vram", "4G"], ["--ram", "4G"], ["--text", "x.txt"], ["--storage", "sqlite:///x.db"],
     ["--virtual-device", "4G"], ["--workload", "serve:pp=64"]],
)  # fmt: skip
def test_what_the_comparison_of_limits_would_ignore_is_refused(words: list[str], trained_model: Path) -> None:
    done = CliRunner().invoke(app, ["--model", str(trained_model), "--power-limits", "400,500", *words])
    assert done.exit_code == 2
    assert "cannot be combined with --power-limits: the comparison of the limits" in plain(done.output)
    assert words[0] in plain(done.output)


def test_a_budget_has_to_be_long_enough_for_every_limit(trained_model: Path) -> None:
    words = ["--model", str(trained_model), "--device", "cpu", "--power-limits", "300,400,500"]
    short = CliRunner().invoke(app, [*words, "--budget", "239"])
    assert short.exit_code == 2
    assert "--budget is 239 s, but tunes at 3 power limits and their comparison need 240 s" in plain(
        short.output
    )
    long = CliRunner().invoke(app, [*words, "--budget", "240"])
    assert "--power-limits needs a GPU, but the device is cpu" in plain(long.output), "the budget is enough"


@pytest.mark.parametrize(
    "words", [["--engine", "llama.cpp", "--bin", "/tmp"], ["--resume"], ["--layers", "2"], ["--gpu", "0,1"]]
)
def test_words_that_do_not_go_with_limits(words: list[str], trained_model: Path) -> None:
    done = CliRunner().invoke(app, ["--model", str(trained_model), "--power-limits", "400,500", *words])
    assert done.exit_code == 2
    assert "--power-limits tunes dyno several times on one GPU" in " ".join(
        done.output.replace("│", " ").split()
    )


def test_a_cpu_has_no_power_limit_to_set(trained_model: Path) -> None:
    words = ["--model", str(trained_model), "--device", "cpu", "--power-limits", "400,500"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "--power-limits needs a GPU, but the device is cpu" in " ".join(
        done.output.replace("│", " ").split()
    )
