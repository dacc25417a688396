from __future__ import annotations

import datetime
import math
from typing import TYPE_CHECKING

import pytest
from conftest_tuner import Simulated
from dyno_tuner.core.errors import TuneError
from dyno_tuner.core.workload import MIXES, Part, Workload, kind_of
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.output import emit
from dyno_tuner.output.emit import Made, profile_of, workload_of
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.run.tune import Options, Tune
from dyno_tuner.space.knobs import Fidelity, Knob
from dyno_tuner.targets.simulated.surfaces import SURFACES, Surface
from dyno_tuner.targets.simulated.target import SimulatedTarget

if TYPE_CHECKING:
    from dyno_tuner.core.protocol import Settings


def test_one_of_each_is_what_it_was() -> None:
    plain = Workload.parse("pp=512,depth=128", Workload(pp=1, tg=9))
    assert (plain.pp, plain.tg, plain.depth, plain.parts) == (512, 9, 128, ())
    assert plain.metrics == ("pp", "tg")
    assert plain.weights == {"pp": 1.0, "tg": 1.0}
    assert plain.label("tg") == "tg9@d128"
    assert plain.to_dict() == {"pp": 512, "tg": 9, "depth": 128}
    assert plain.longest == 640


def test_lists_cross_and_weights_multiply() -> None:
    mix = Workload.parse("pp=512,4096:2,tg=128,depth=0,8192:0.5")
    assert mix.weights == {
        "pp512": 1.0, "pp4096": 2.0, "tg128": 1.0,
        "pp512@d8192": 0.5, "pp4096@d8192": 1.0, "tg128@d8192": 0.5,
    }  # fmt: skip
    assert (mix.pp, mix.tg, mix.depth, mix.longest) == (4096, 128, 8192, 12288)
    assert mix.prompts == (512, 4096, 8192)
    assert [mix.tokens(m) for m in ("pp512", "tg128@d8192", "pp")] == [512, 128, 4096]
    assert mix.part("tg128@d8192").depth == 8192
    with pytest.raises(KeyError):
        mix.part("pp")


@pytest.mark.parametrize(
    "text", ["chat", "rag", "pp=64,128,tg=8", "pp=4096,weight=2; tg=128,depth=4096,32768:3", "tg=8:2"]
)
def test_text_and_plain_data_are_read_back(text: str) -> None:
    mix = Workload.parse(text)
    assert Workload.parse(str(mix)) == mix
    assert Workload.from_dict(mix.to_dict()) == mix
    assert mix.depth <= 32768


def test_named_mixes_say_what_they_are() -> None:
    for name in MIXES:
        assert Workload.parse(name).name == name
    chat, rag = Workload.parse("chat"), Workload.parse("rag")

    def share(mix: Workload, kind: str) -> float:
        return sum(w for m, w in mix.weights.items() if kind_of(m) == kind) / sum(mix.weights.values())

    assert share(chat, "tg") > 0.5 > share(rag, "tg")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("poetry", "cannot read 'poetry': there is no mix of this name; choose from chat, rag"),
        ("", "cannot read"),
        ("pp=0,tg=0", "nothing to measure"),
        ("pp=1,2,x", "'x' is not a whole number"),
        ("1,pp=2", "cannot read '1'"),
        ("pp=1,pp=2", "given twice"),
        ("pp=1:0", "not a weight"),
        ("pp=1:inf,2", "not a weight"),
        ("pp=1,2,weight=a", "not a weight"),
        ("weight=2", "give pp, tg or depth"),
        ("pp=99999999,2", "out of range"),
        ("depth=4,5; pp=1", "measures nothing"),
        (";".join(f"pp={n}" for n in range(1, 80)), "too many"),
    ],
)
def test_what_is_no_workload_is_refused(text: str, words: str) -> None:
    with pytest.raises(TuneError, match=words):
        Workload.parse(text)


def test_parts_of_the_same_name_are_one() -> None:
    mix = Workload.mix([Part("pp", 8, 0, 1.0), Part("pp", 8, 0, 2.0), Part("tg", 4, 0)])
    assert mix.weights == {"pp8": 3.0, "tg4": 1.0}


def _trade(cost: float) -> Surface:
    """A switch that doubles prefill and costs generation."""
    knobs = (Knob("switch", (False, True), False, ordinal=False, fidelity=Fidelity.ROUNDING),)

    def rates(s: Settings) -> dict[str, float]:
        return {"pp": 400.0 * (2.0 if s["switch"] else 1.0), "tg": 30.0 * (cost if s["switch"] else 1.0)}

    return Surface("trade", knobs, rates)


def _tune(surface: Surface, workload: Workload, seed: int = 1) -> Tune:
    space = surface.space()
    recorder = Recorder(
        InlineExecutor(SimulatedTarget(surface, seed)), workload, identity=space.identity, virtual_time=True
    )
    return Tune(recorder, space, Options(workload, seed=seed, max_trials=15))


def test_the_objective_is_the_weighted_geometric_mean_of_ratios() -> None:
    """Rates of prefill are ten times those of generation: in a mean of rates they would drown them."""
    mix = Workload.parse("pp=64,tg=8:3")
    tune = _tune(_trade(0.995), mix)
    outcome = tune.run()
    assert tune._screen is not None
    trial = next(t for t in tune._screen.trials if t.point != tune.space.default)
    assert trial.log_ratio == pytest.approx((math.log(2) + 3 * math.log(0.995)) / 4, abs=0.02)
    assert outcome.settings["switch"] is True
    assert set(outcome.gain) == {"pp64", "tg8"}


def test_a_part_that_falls_is_harm_whatever_the_mean_says() -> None:
    outcome = _tune(_trade(0.8), Workload.parse("pp=64:9,tg=8")).run()
    assert outcome.entries == []


def test_a_mix_is_written_and_read_back() -> None:
    surface = SURFACES["saturating"]()
    mix = Workload.parse("pp=64,tg=8:2,depth=0,32")
    tune = _tune(surface, mix)
    outcome = tune.run()
    made = Made(mix, 1, "tune", None, "m.gguf", datetime.date(2026, 11, 20))
    profile = profile_of(outcome, SimulatedTarget(surface).describe(), made)
    assert workload_of(profile) == mix
    assert profile.evidence is not None
    assert set(profile.evidence.gain) == {"pp64", "tg8", "pp64@d32", "tg8@d32"}
    assert {m for e in profile.settings.values() if e != "default" for m in e.moves} <= {"pp", "tg"}


def test_a_plain_profile_is_read_back() -> None:
    run = Simulated("saturating", 1)
    made = Made(run.options.workload, 1, "tune", None, "m.gguf", datetime.date(2026, 11, 20))
    profile = profile_of(run.outcome, SimulatedTarget(run.surface).describe(), made)
    assert workload_of(profile) == run.options.workload


@pytest.mark.parametrize(
    ("divergence", "written"),
    [(1.3710599007244527e-95, 0.0), (0.0, 0.0), (6.123456e-8, 6.12e-8), (0.00123456, 0.00123)],
)
def test_a_profile_has_as_many_digits_of_a_divergence_as_mean_something(
    divergence: float, written: float
) -> None:
    assert emit._digits(divergence) == written
