from __future__ import annotations

import dataclasses
import datetime
import gzip
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest_tuner import WORKLOAD
from dyno import profiles
from dyno.errors import DeviceError
from dyno_tuner.cli.commands import app
from dyno_tuner.core.errors import TuneError
from dyno_tuner.core.protocol import Measurement, TrialStatus
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.execution.worker import WorkerExecutor
from dyno_tuner.record.history import history
from dyno_tuner.record.journal import encode, load, of_profile, sha256
from dyno_tuner.run import profile_device
from dyno_tuner.run.session import Request, run
from dyno_tuner.run.tune import Options
from dyno_tuner.run.verify import HARMFUL, KEEP, STALE, UNCLEAR, UNSUPPORTED, verify
from dyno_tuner.targets.simulated.surfaces import SimulatedOp, saturating
from dyno_tuner.targets.simulated.target import SimulatedTarget, SimulationNoise
from typer.testing import CliRunner

if TYPE_CHECKING:
    from dyno_tuner.core.protocol import Description

SHIPPED = Path(__file__).resolve().parents[3] / "profiles"


def _surface(tg: float = 1.15, **changes: Any) -> Any:
    op = SimulatedOp("matmul a", "tg", 1.6, lambda settings: {"tg": tg})
    return dataclasses.replace(saturating(), ops=(op,), **changes)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    surface = _surface()
    options = Options(WORKLOAD, seed=1, max_trials=20, rounds=3, max_rounds=3, kernels=True)
    request = Request("m", options, out=tmp_path_factory.mktemp("v") / "p.yaml", quiet=True)
    result = run(request, InlineExecutor(SimulatedTarget(surface, 1)), surface.space())
    assert {e.name for e in result.outcome.entries} >= {"ubatch"}
    assert result.outcome.kernels
    return result.path


def _verify(path: Path, surface: Any, seed: int = 7) -> dict[str, Any]:
    verdicts, gain = verify(
        path, budget=None, quiet=True, executor=InlineExecutor(SimulatedTarget(surface, seed)),
        options={"rounds": 3, "max_rounds": 4},
    )  # fmt: skip
    return {v.entry: v for v in verdicts} | {"gain": gain}


def test_what_still_holds_is_kept(profile: Path) -> None:
    found = _verify(profile, _surface())
    gain = found.pop("gain")
    assert {v.verdict for v in found.values()} == {KEEP}
    assert "kernels.matmul a.m1" in found
    recorded = profiles.load_profile(profile).evidence.gain["tg8"].ratio
    assert gain["tg"].ratio == pytest.approx(recorded, rel=0.05)


def test_noise_over_ten_percent_keeps_nothing(profile: Path) -> None:
    """A busy machine once answered "keep" with a margin of 231 %."""
    noise = SimulationNoise(within=0.6, process=0.6)
    verdicts, _ = verify(
        profile, budget=None, quiet=True, options={"rounds": 3, "max_rounds": 4},
        executor=InlineExecutor(SimulatedTarget(_surface(), 7, noise)),
    )  # fmt: skip
    assert KEEP not in {v.verdict for v in verdicts}
    unclear = [v.reason for v in verdicts if v.verdict == UNCLEAR]
    assert unclear
    assert all(
        "and with noise above 10 % nothing can be proven; stop other programs and verify again" in why
        for why in unclear
    )


@pytest.mark.parametrize(("serving", "verdict"), [(1.0, STALE), (0.8, HARMFUL)])
def test_another_engine_makes_entries_stale_or_harmful(profile: Path, serving: float, verdict: str) -> None:
    found = _verify(profile, _surface(serving))
    assert found["kernels.matmul a.m1"].verdict == verdict
    assert found["settings.ubatch"].verdict == KEEP


def test_a_default_that_caught_up_is_stale_and_a_setting_that_is_gone_unsupported(profile: Path) -> None:
    value = profiles.load_profile(profile).settings["ubatch"].value
    knobs = tuple(
        dataclasses.replace(k, default=value) if k.name == "ubatch" else k for k in _surface().knobs
    )
    assert _verify(profile, _surface(knobs=knobs))["settings.ubatch"].verdict == STALE
    gone = _surface(
        knobs=tuple(k for k in knobs if k.name != "ubatch"),
        rates=lambda s: saturating().rates({"ubatch": 512, **s}),
    )
    assert _verify(profile, gone)["settings.ubatch"].verdict == UNSUPPORTED


def _edited(profile: Path, folder: Path, *changes: tuple[str, str]) -> Path:
    text = profile.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    (folder / "p.yaml").write_text(text)
    return folder / "p.yaml"


def test_entries_that_cannot_be_read_are_unsupported_and_the_others_measured(
    profile: Path, tmp_path: Path
) -> None:
    changed = _edited(
        profile, tmp_path, ("  ubatch: ", "  ubach: "),
        ("  threads:", "  mmq_id_max_tokens: {value: 128}\n  threads:"), ("{value: 4,", "{value: 4.5,"),
        ("    m1: {", "    m0: {variant: other}\n    m1: {"),
    )  # fmt: skip
    found = _verify(changed, _surface())
    gain = found.pop("gain")
    unsupported = {e: v.reason for e, v in found.items() if v.verdict == UNSUPPORTED}
    assert set(unsupported) == {
        "settings.ubach", "settings.mmq_id_max_tokens", "settings.threads", "kernels.matmul a.m0"
    }  # fmt: skip
    assert "ubatch" in unsupported["settings.ubach"]
    assert "cpu" in unsupported["settings.mmq_id_max_tokens"]
    assert {e for e, v in found.items() if v.verdict == KEEP} == {
        "settings.threads_batch", "kernels.matmul a.m1"
    }  # fmt: skip
    assert gain["tg"].ratio > 1.1
    assert (
        CliRunner().invoke(app, ["verify", str(_edited(profile, tmp_path, ("label:", "lable:")))]).exit_code
        == 1
    )


def test_one_bad_kernel_does_not_condemn_its_group(profile: Path, tmp_path: Path) -> None:
    another = '\n  "matmul b":\n    m1: {variant: other, group: kernels_tg, ratio: 1.1'
    # Its entry's braces are closed before the other kernel, which takes the rest of its line.
    text = "group: kernels_tg"
    another = f'{text}}}\n  "matmul b":\n    m1: {{variant: other, ratio: 1.1, {text}'
    group = (text, another)
    changed = _edited(profile, tmp_path, group)
    for fault, verdict in ((TrialStatus.INVALID, UNSUPPORTED), (TrialStatus.CRASH, HARMFUL)):
        surface = _surface()
        bad = SimulatedOp("matmul b", "tg", 1.2, lambda settings: {"tg": 1.0}, fault=fault)
        found = _verify(changed, dataclasses.replace(surface, ops=(*surface.ops, bad)))
        assert found["kernels.matmul b.m1"].verdict == verdict
        assert found["kernels.matmul a.m1"].verdict == KEEP
        assert "measured without kernels.matmul b.m1" in found["kernels.matmul a.m1"].reason
        assert found["settings.ubatch"].verdict == KEEP


def test_a_setting_that_is_gone_does_not_condemn_its_group(profile: Path, tmp_path: Path) -> None:
    grouped = ("moves: pp}", "moves: pp, group: g1}")
    changed = _edited(profile, tmp_path, grouped, grouped)
    gone = _surface(
        knobs=tuple(k for k in _surface().knobs if k.name != "ubatch"),
        rates=lambda s: saturating().rates({"ubatch": 512, **s}),
    )
    found = _verify(changed, gone)
    assert found["settings.ubatch"].verdict == UNSUPPORTED
    assert found["settings.threads_batch"].verdict == KEEP


def test_a_profile_of_a_gpu_names_the_machine_that_it_needs(
    trained_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice to use the CPU instead would be wrong: its entries are for a GPU."""

    def none(_: str) -> None:
        raise DeviceError("[device] 'cuda': this build has no CUDA engine; use the device cpu, or build one")

    monkeypatch.setattr(profile_device, "resolve_device", none)
    shipped = SHIPPED / "h200-qwen3-8b-q8_0.yaml"  # with an entry to verify
    with pytest.raises(TuneError) as caught:
        verify(shipped, str(trained_model))
    assert str(caught.value).startswith("the profile (NVIDIA H200 · ")
    assert "is for cuda devices, and none can be used here: 'cuda': this build has no" in str(caught.value)
    assert "use the device cpu" not in str(caught.value)


def test_wrong_answers_and_crashes_are_harmful(profile: Path) -> None:
    changed = _verify(profile, _surface(kld=lambda s: 0.02 if s["ubatch"] != 512 else 1e-6))
    assert changed["settings.ubatch"].verdict == HARMFUL
    assert "answers" in changed["settings.ubatch"].reason
    crash = _verify(profile, _surface(fault=lambda s: TrialStatus.CRASH if s["ubatch"] != 512 else None))
    assert crash["settings.ubatch"].verdict == HARMFUL
    assert crash["kernels.matmul a.m1"].verdict == KEEP
    refused = _verify(profile, _surface(fault=lambda s: TrialStatus.INVALID if s["ubatch"] != 512 else None))
    assert refused["settings.ubatch"].verdict == UNSUPPORTED


def test_one_foreign_kill_makes_no_entry_harmful(profile: Path) -> None:
    killed = []

    class Killed(InlineExecutor):
        def measurement(self, *args: Any) -> Any:
            if args[4].key == "runs/full":
                killed.append(args[4].process)
                return Measurement(TrialStatus.OOM, message="SIGKILL")
            return super().measurement(*args)

    verdicts, _ = verify(
        profile, budget=None, quiet=True, executor=Killed(SimulatedTarget(_surface(), 7)),
        options={"rounds": 3, "max_rounds": 4},
    )  # fmt: skip
    assert len(killed) == 1
    assert {v.verdict for v in verdicts} == {KEEP}


@pytest.mark.parametrize(
    ("kills", "settles", "verdict"), [(2, True, STALE), (99, True, UNCLEAR), (99, False, KEEP)]
)
def test_a_rest_that_others_have_killed_keeps_no_entry(
    profile: Path, kills: int, settles: bool, verdict: str
) -> None:
    """The u-batch gains nothing any more, and the profile without it is killed in the rounds. If it runs
    behind them, it is measured again; if it does not, the u-batch is needed."""
    killed = []
    surface = dataclasses.replace(_surface(), rates=lambda s: saturating().rates({**s, "ubatch": 512}))

    class Killed(InlineExecutor):
        def measurement(self, configuration: Any, *args: Any) -> Any:
            key = args[3].key
            rest = configuration.settings["ubatch"] == 512 and configuration.kernels
            runs = settles and "/settle" in key
            if rest and key.startswith("verify/") and len(killed) < kills and not runs:
                killed.append(key)
                return Measurement(TrialStatus.OOM, message="SIGKILL")
            return super().measurement(configuration, *args)

    verdicts, _ = verify(
        profile, budget=None, quiet=True, executor=Killed(SimulatedTarget(surface, 7)),
        options={"rounds": 3, "max_rounds": 4},
    )  # fmt: skip
    found = {v.entry: v for v in verdicts}["settings.ubatch"]
    assert len(killed) >= 2
    assert found.verdict == verdict, found.reason
    assert found.proven == (verdict == KEEP)


def test_a_budget_that_ends_before_a_second_comparison_keeps_the_first(profile: Path) -> None:
    """The rest without the u-batch is killed in each round, and no time is left when it is tried again."""
    budget, keys = 2000.0, list[str]()

    class Killed(InlineExecutor):
        def measurement(self, configuration: Any, *args: Any) -> Any:
            keys.append(args[3].key)
            rest = configuration.settings["ubatch"] == 512 and configuration.kernels
            if not rest or not keys[-1].startswith("verify/"):
                return super().measurement(configuration, *args)
            seconds = budget if "/settle" in keys[-1] else 1.0
            return Measurement(TrialStatus.OOM, message="SIGKILL", seconds=seconds)

    verdicts, gain = verify(
        profile, budget=budget, quiet=True, executor=Killed(SimulatedTarget(_surface(), 7)),
        options={"rounds": 3, "max_rounds": 4},
    )  # fmt: skip
    assert any("/settle" in key for key in keys)
    assert not any(key.startswith("verify/again/") for key in keys), "the test's budget is too long"
    found = {v.entry: v for v in verdicts}
    assert found["settings.ubatch"].verdict == UNCLEAR
    assert "a third try did not decide whether it runs" in found["settings.ubatch"].reason
    assert {v.verdict for e, v in found.items() if e != "settings.ubatch"} == {KEEP}
    assert gain["tg"].ratio > 1.1


def test_the_budget_bounds_what_an_engine_may_take(profile: Path) -> None:
    """An engine whose every measurement takes a minute, in a worker that is killed for it."""
    options = {"surface": "saturating", "seed": 1, "pace": 600.0}
    executor = WorkerExecutor("simulated", options)
    real = executor.describe

    def describe() -> Description:  # of an engine whose time is waited for
        return dataclasses.replace(real(), virtual_time=False)

    executor.describe = describe  # type: ignore[method-assign]
    try:
        with pytest.raises(TuneError, match=r"budget of 3 s ended during a measurement.*--budget"):
            verify(profile, budget=3.0, quiet=True, executor=executor)
    finally:
        executor.close()


def test_a_model_that_is_not_there_is_asked_for(profile: Path) -> None:
    with pytest.raises(TuneError, match="--model"):
        verify(profile)
    for words in (
        ["--model", "absent.gguf"],
        ["absent.gguf"],
    ):  # also without the option, as in `tune x.gguf`
        missing = CliRunner().invoke(app, ["verify", str(profile), *words])
        assert str(missing.exception) == "model absent.gguf: the file does not exist"
    swapped = CliRunner().invoke(app, ["verify", "absent.gguf"])
    assert (swapped.exit_code, "PROFILE is missing" in swapped.output) == (2, True), swapped.output


def test_history_lists_journals_with_their_gain(profile: Path, tmp_path: Path) -> None:
    book = profile.with_name(profile.name + ".journal.jsonl")
    (past,) = history([profile.parent])
    assert past.status == "complete"
    assert past.model == "simulated saturating"
    assert past.gain["tg"] > 1.1
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / f"{book.name}.gz").write_bytes(gzip.compress(book.read_bytes()))
    assert [row.gain for row in history([packed])] == [past.gain]
    (tmp_path / "cut.journal.jsonl").write_bytes(book.read_bytes()[: book.stat().st_size // 2])
    (tmp_path / "other.journal.jsonl").write_text("not one\n")
    shown = CliRunner().invoke(app, ["history", str(tmp_path), "--json"])
    assert sorted(row["status"] for row in json.loads(shown.stdout)) == ["complete", "unfinished"]
    assert "1." in CliRunner().invoke(app, ["history", str(profile.parent)]).stdout


def test_dates_of_the_history_are_those_of_the_runs(profile: Path, tmp_path: Path) -> None:
    book = of_profile(profile)
    copied = tmp_path / "p.yaml.journal.jsonl"
    copied.write_bytes(book.read_bytes())
    for path in (book, copied):
        os.utime(path, (10**9, 10**9))
    assert [row.date for row in history([profile.parent])] == [row.date for row in history([tmp_path])]
    records = load(book).records
    begun = next(n for n, r in enumerate(records) if r.get("note") == "begun")
    last = max(r["t"] for r in records if "op" in r)
    records[begun]["date"] = "2026-03-01T10:00:00+00:00"
    copied.write_bytes(b"".join(encode(r) for r in records))
    end = datetime.datetime(2026, 3, 1, 10, tzinfo=datetime.UTC) + datetime.timedelta(seconds=last)
    assert [row.date for row in history([tmp_path])] == [end.isoformat(timespec="seconds")]
    # Continued an hour later: what was recorded before had its own time.
    records += [
        {"note": "begun", "date": "2026-03-01T12:00:00+00:00"},
        {**records[-2], "op": "x", "t": last + 60},
    ]
    copied.write_bytes(b"".join(encode(r) for r in records))
    assert [row.date for row in history([tmp_path])] == ["2026-03-01T12:01:00+00:00"]
    # One that does not tell: the day of its own profile, and of no other.
    copied.write_bytes(b"".join(encode(r) for r in records if r.get("note") != "begun"))
    assert [row.date for row in history([tmp_path])] == [""]
    text = profile.read_text()
    old, made = profiles.load_profile(profile).evidence, profiles.load_profile(profile).provenance
    assert made is not None
    assert old is not None
    assert old.journal is not None
    (tmp_path / "p.yaml").write_text(text.replace(old.journal, f"sha256:{sha256(copied)}"))
    assert [row.date for row in history([tmp_path])] == [str(made.date)]


@pytest.mark.parametrize("command", ["tune --model 'm.gguf", 'tune -m "a'])
def test_a_command_that_no_shell_can_read_is_no_crash(profile: Path, tmp_path: Path, command: str) -> None:
    """A profile holds a cut command, or one that somebody has edited."""
    made = profiles.load_profile(profile)
    assert made.provenance is not None
    odd = made.provenance.model_copy(update={"command": command, "model_file": None})
    path = tmp_path / "p.yaml"
    profiles.save_profile(made.model_copy(update={"provenance": odd}), path)
    with pytest.raises(TuneError, match="give --model"):
        verify(path, quiet=True)


def test_a_verification_holds_what_the_tune_held(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = profiles.load_profile(profile)
    engine = profiles.EngineIdentity(name="dyno", version="0.2.0", ops_revision=1)
    assert made.provenance is not None
    command = "tune --model m.gguf --set threads=3 --set cpu_repack=off -- llama-server --set x=1"
    made = made.model_copy(
        update={
            "match": made.match.model_copy(update={"engine": engine}),
            "provenance": made.provenance.model_copy(update={"command": command}),
        }
    )
    profiles.save_profile(made, tmp_path / "p.yaml")
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(64))
    asked: dict[str, Any] = {}

    def started(_: str, options: dict[str, Any]) -> None:
        asked.update(options)
        raise TuneError("the rest is not of interest")

    monkeypatch.setattr("dyno_tuner.run.verify.WorkerExecutor", started)
    monkeypatch.setattr("dyno_tuner.run.verify.check_model", lambda _: None)
    with pytest.raises(TuneError, match="not of interest"):
        verify(tmp_path / "p.yaml", str(tmp_path / "m.gguf"))
    assert asked["settings"] == {"threads": 3, "cpu_repack": False}
