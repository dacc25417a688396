"""A profile is written whatever was measured and whatever text came from outside: the run is never lost."""

from __future__ import annotations

import dataclasses
import datetime
import math
from pathlib import Path
from typing import Any

import pytest
from conftest_tuner import Simulated
from dyno import profiles
from dyno_tuner import __version__
from dyno_tuner.core.intervals import Estimate
from dyno_tuner.output import emit
from dyno_tuner.targets.simulated.target import SimulatedTarget


@pytest.fixture(scope="module")
def run() -> Simulated:
    """One tune that has proven something."""
    found = Simulated("saturating", 1)
    assert found.outcome.entries
    return found


def made(run: Simulated, **changes: Any) -> emit.Made:
    date = datetime.date(2026, 11, 20)
    return dataclasses.replace(emit.Made(run.options.workload, 1, "tune", None, "m.gguf", date), **changes)


def written(run: Simulated, outcome: Any = None, **changes: Any) -> profiles.Profile:
    description = SimulatedTarget(run.surface).describe()
    profile = emit.profile_of(outcome or run.outcome, description, made(run, **changes))
    return profiles.loads_profile(profiles.dumps_profile(profile))


def test_every_measure_has_its_margin(run: Simulated) -> None:
    evidence = written(run, dataclasses.replace(run.outcome, margin={"pp": 0.0123, "tg": 0.06})).evidence
    assert evidence is not None
    assert evidence.noise is not None
    assert evidence.noise.by_measure == {"pp64": 0.0123, "tg8": 0.06}
    assert evidence.noise.margin == 0.06


def test_answers_that_nobody_compared_are_not_those_of_the_default(run: Simulated) -> None:
    def quality(outcome: Any) -> profiles.Quality:
        evidence = written(run, outcome).evidence
        assert evidence is not None
        assert evidence.quality is not None
        return evidence.quality

    default = run.outcome.default_quality
    assert default is not None
    whole = quality(run.outcome)
    assert whole.mean_kld is not None
    unknown = quality(dataclasses.replace(run.outcome, quality=None))
    assert (unknown.mean_kld, unknown.tokens, unknown.top1) == (None, None, None)
    assert unknown.default_mean_kld == whole.default_mean_kld
    nothing = quality(dataclasses.replace(run.outcome, quality=None, entries=[], kernels=[]))
    assert nothing.mean_kld == nothing.default_mean_kld, "it is the default"


@pytest.mark.parametrize(
    ("low", "high", "ci95"),
    [
        (-0.5, 3.0, (1e-4, 3.0)),
        (0.0, math.inf, (1e-4, 1e6)),
        (1e-9, 1e9, (1e-4, 1e6)),
        (math.nan, 3.0, None),
    ],
)
def test_an_interval_beyond_what_a_profile_holds_loses_no_run(
    run: Simulated, low: float, high: float, ci95: tuple[float, float] | None
) -> None:
    entry = run.outcome.entries[0]
    wild = Estimate(2.0, low, high, 3)
    outcome = dataclasses.replace(
        run.outcome,
        entries=[dataclasses.replace(entry, estimate=wild), *run.outcome.entries[1:]],
        gain=dict.fromkeys(run.outcome.gain, wild),
    )
    setting = written(run, outcome).settings[entry.name]
    assert isinstance(setting, profiles.SettingEntry)
    assert (setting.value, setting.ratio, setting.ci95) == (entry.value, 2.0, ci95)


def test_a_ratio_that_is_no_number_is_left_out(run: Simulated) -> None:
    nothing = Estimate(math.nan, math.nan, math.nan, 0)
    outcome = dataclasses.replace(run.outcome, gain=dict.fromkeys(run.outcome.gain, nothing))
    evidence = written(run, outcome).evidence
    assert evidence is not None
    assert evidence.gain == {}


@pytest.mark.parametrize("name", ["a\u00a0b.gguf", "a\u3000b.gguf", "a\udcffb.gguf", "a\x1b[2Jb.gguf"])
def test_any_file_name_can_be_written(run: Simulated, name: str) -> None:
    provenance = written(run, model_file=name, command=f"tune --model {name}").provenance
    assert provenance is not None
    assert provenance.model_file is not None
    assert provenance.model_file.startswith("a")
    assert provenance.model_file.isprintable()
    assert provenance.model_file.endswith("b.gguf")


def test_a_long_command_is_kept_whole(run: Simulated) -> None:
    rules = [f'-ot "blk.{n}.ffn_.*_exps=CPU"' for n in range(60)]
    command = f"tune --model m.gguf --engine llama.cpp -- {' '.join(rules)}"
    assert len(command) < profiles.MAX_COMMAND
    provenance = written(run, command=command).provenance
    assert provenance is not None
    assert provenance.command == command
    endless = written(run, command=command * 40).provenance
    assert endless is not None
    assert endless.command is not None
    assert len(endless.command) == profiles.MAX_COMMAND


def test_profiles_name_the_version_of_the_tuner_that_made_them(run: Simulated) -> None:
    """A tuner that ran from its sources wrote 0.0.0."""
    new = written(run).provenance
    assert new is not None
    assert new.tuner == __version__
    assert tuple(map(int, __version__.split(".")[:2])) > (0, 0)
    shipped = sorted((Path(__file__).parents[3] / "profiles").glob("*.yaml"))
    assert shipped
    for path in shipped:
        provenance = profiles.load_profile(path).provenance
        assert provenance is not None
        assert tuple(map(int, str(provenance.tuner).split(".")[:2])) > (0, 0), path.name


def comments(run: Simulated, engine: str = "dyno", **changes: Any) -> list[str]:
    profile = written(run, **changes)
    match = profile.match.model_copy(
        update={"engine": profile.match.engine.model_copy(update={"name": engine})}
    )
    return emit.comments_of(profile.model_copy(update={"match": match}), "Prompts 1.50 × as fast.")


def test_the_head_of_a_file_says_what_it_is_and_how_it_is_used(run: Simulated) -> None:
    lines = comments(run, command="tune --model m.gguf --budget 2m")
    assert lines[1:3] == ["Made by: tune --model m.gguf --budget 2m", "Verdict: Prompts 1.50 × as fast."]
    assert any("--profile THIS_FILE" in line for line in lines)
    assert any("tune verify THIS_FILE" in line for line in lines)
    assert all("\n" not in line and len(line) <= 150 for line in lines)


def test_the_head_of_a_file_names_the_command_that_takes_it(run: Simulated) -> None:
    def use(profile: profiles.Profile, **given: Any) -> str:
        (line,) = [x for x in emit.comments_of(profile, "Prompts 1.50 × as fast.", **given) if "Use: " in x]
        return line

    plain = written(run)
    plain = plain.model_copy(
        update={"match": plain.match.model_copy(
            update={"engine": plain.match.engine.model_copy(update={"name": "dyno"})}
        )}
    )  # fmt: skip
    command = "Use: dyno run --model MODEL.gguf --profile THIS_FILE"
    assert use(plain) == f"{command} (without --profile, dyno takes it only from your profile folder)"
    assert use(plain, searched=False) == command
    made = plain.provenance
    assert made is not None
    fixed = made.model_copy(
        update={"command": "tune --set threads=3 --set=numa=off -- llama-server --set x=1"}
    )
    held = plain.model_copy(update={"provenance": fixed})
    assert use(held, searched=False) == f"{command} --set threads=3 --set numa=off"
    device = plain.match.device.model_copy(update={"virtual": "link_gbps=8 memory_mib=4096"})
    virtual = plain.model_copy(update={"match": plain.match.model_copy(update={"device": device})})
    assert use(virtual, searched=False) == f"{command} and the --virtual-device of the tune"
    assert plain.evidence is not None
    load = plain.evidence.workload.model_copy(update={"name": "serve:concurrency=4"})
    served = plain.model_copy(update={"evidence": plain.evidence.model_copy(update={"workload": load})})
    assert use(served, searched=False) == command.replace("dyno run", "dyno serve")


@pytest.mark.parametrize("engine", ["llama.cpp", "ik_llama.cpp"])
def test_the_profile_of_another_engine_names_its_export(run: Simulated, engine: str) -> None:
    lines = comments(run, engine)
    assert any("dyno profiles export THIS_FILE" in line for line in lines)
    assert not any("--profile" in line for line in lines)


def test_the_head_of_a_forced_profile_says_that_the_machine_was_busy(run: Simulated) -> None:
    quiet = comments(run)
    outcome = dataclasses.replace(run.outcome, conditions={"disturbed": True})
    busy = emit.comments_of(written(run, outcome), "Prompts 1.50 × as fast.")
    assert not any("Other programs" in line for line in quiet)
    assert any("Other programs" in line for line in busy)
