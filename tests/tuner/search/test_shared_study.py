"""Several tunes in one study of a storage: SQLite here, PostgreSQL in test_postgresql.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optuna
import pytest
import studies
from conftest_tuner import WORKLOAD
from dyno_tuner.core.errors import Interrupted, TuneError
from dyno_tuner.core.options import Options
from dyno_tuner.core.protocol import Workload
from dyno_tuner.core.redaction import redact_text
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.record import journal
from dyno_tuner.run.session import Request, Result, run
from dyno_tuner.search.shared_study import Study, with_driver
from dyno_tuner.targets.simulated.target import SimulatedTarget

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'study.db'}"


def _tune(
    out: Path, url: str | None, *, seed: int = 1, device: dict[str, Any] | None = None, count: int = 1,
    executor: Any = None, surface: str = "saturating", **given: Any,
) -> Result:  # fmt: skip
    options = {"max_trials": 12, "rounds": 2, "max_rounds": 2, "seed": seed}
    options |= {k: given.pop(k) for k in list(given) if k in Options.__dataclass_fields__}
    target = SimulatedTarget(surface, 1, device=device)
    request = Request("simulated", Options(WORKLOAD, **options), out=out, quiet=True, storage=url, **given)
    others = [InlineExecutor(SimulatedTarget(surface, 1, device=device)) for _ in range(count - 1)]
    return run(request, executor or InlineExecutor(target), target.surface.space(), others)


def _words(settings: Any) -> str:
    return " ".join(sorted(f"{k}={v}" for k, v in settings.items()))


def _tried(result: Result, *, beside: bool = False) -> list[str]:
    """What the search has tried; with `beside` also what was tried in the place of its winner."""
    records = journal.load(result.journal).records
    ends = [n for n, r in enumerate(records) if r.get("note") == "screened"]
    searched = records if beside or not ends else records[: ends[0]]
    return [_words(r["settings"]) for r in searched if r.get("note") == "trial"]


def _study(url: str) -> optuna.Study:
    storage = studies.storage(url)
    (name,) = optuna.get_all_study_names(storage)
    return optuna.load_study(study_name=name, storage=storage)


def test_the_second_tune_goes_on_where_the_first_has_been(tmp_path: Path, url: str) -> None:
    first = _tune(tmp_path / "a.yaml", url)
    second = _tune(tmp_path / "b.yaml", url)
    assert len(_tried(first)) == len(_tried(second)) == 11
    assert not set(_tried(first)) & set(_tried(second))
    states = [t.state.name for t in _study(url).trials]
    assert states.count("COMPLETE") == 2 + sum(
        len(_tried(r, beside=True)) for r in (first, second)
    )  # both defaults
    assert "RUNNING" not in states


def test_what_another_machine_has_found_is_proven_here(tmp_path: Path, url: str) -> None:
    """The second tune may try next to nothing, and writes what the first has found: measured by itself."""
    found = _tune(tmp_path / "a.yaml", url, max_trials=40, rounds=3)
    result = _tune(tmp_path / "b.yaml", url, max_trials=2, rounds=3)
    alone = _tune(tmp_path / "c.yaml", None, max_trials=2, rounds=3)
    truth = SimulatedTarget("saturating", 1).surface.truth
    assert truth(result.outcome.settings) >= truth(found.outcome.settings) - 0.02
    assert truth(result.outcome.settings) > truth(alone.outcome.settings) + 0.02
    keys = [str(r.get("key", "")) for r in journal.load(result.journal).records]
    assert any(key.startswith("confirm") for key in keys)


def test_what_failed_on_one_machine_is_not_tried_on_the_next(tmp_path: Path, url: str) -> None:
    first = _tune(tmp_path / "a.yaml", url, surface="faulty", max_trials=40)
    assert first.outcome.failures
    second = _tune(tmp_path / "b.yaml", url, surface="faulty", max_trials=40)
    failed = {_words(f.settings) for f in first.outcome.failures}
    assert not failed & set(_tried(second))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": {"cores": 6}}, "cores"),
        ({"device": {"isa": "avx2"}}, "instruction set"),
        ({"approx_limit": 0.1}, "another approx_limit"),
        ({"held": {"threads": 3}}, "its held"),
    ],
)
def test_a_machine_of_another_kind_is_refused(
    tmp_path: Path, url: str, change: dict[str, Any], said: str
) -> None:
    _tune(tmp_path / "a.yaml", url, study="s")
    before = len(_study(url).trials)
    with pytest.raises(TuneError, match=f"cannot join: .*{said}.*--study"):
        _tune(tmp_path / "b.yaml", url, study="s", **change)
    assert len(_study(url).trials) == before
    assert _tune(tmp_path / "b.yaml", url, study="t", **change).outcome.status == "complete"


def test_other_knobs_and_other_programs_studies_are_refused(tmp_path: Path, url: str) -> None:
    optuna.create_study(storage=studies.storage(url), study_name="mine").add_trial(
        optuna.trial.create_trial(value=1.0, user_attrs={"dyno_kind": {"match": 3}})
    )
    with pytest.raises(TuneError, match="another version of tune"):
        _tune(tmp_path / "a.yaml", url, study="mine")
    _tune(tmp_path / "a.yaml", url, study="s")
    with pytest.raises(TuneError, match="architecture"):  # of the model
        _tune(tmp_path / "b.yaml", url, study="s", surface="faulty")


def test_a_cut_journal_of_a_joint_study_gives_the_same_profile(tmp_path: Path, url: str) -> None:
    _tune(tmp_path / "a.yaml", url)
    whole = _tune(tmp_path / "b.yaml", url)
    data = whole.journal.read_bytes()
    for share in (0.3, 0.7, 0.99):
        whole.journal.write_bytes(data[: int(share * len(data))])
        again = _tune(tmp_path / "b.yaml", url, resume=True)
        assert again.outcome.to_dict() == whole.outcome.to_dict(), share


def test_a_claim_that_nobody_ends_is_forgotten(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tune that was killed leaves a running trial behind; an hour later its point is free again."""

    class Killed(InlineExecutor):
        def measurement(self, *args: Any) -> Any:
            if args[4].key == "screen/t3":
                monkeypatch.setattr(Study, "release", lambda self: "")  # as SIGKILL leaves it
                raise SystemExit
            return super().measurement(*args)

    with pytest.raises(SystemExit):
        _tune(tmp_path / "a.yaml", url, executor=Killed(SimulatedTarget("saturating", 1)))
    monkeypatch.undo()
    left = {_words(t.user_attrs["settings"]) for t in _study(url).trials if t.state.name == "RUNNING"}
    assert len(left) == 3  # the block was not at its end

    def tried(name: str) -> set[str]:
        return set(_tried(_tune(tmp_path / name, url, max_trials=287, patience=1000, sampler="random")))

    assert not tried("b.yaml") & left
    monkeypatch.setattr("dyno_tuner.search.shared_study.FORGOTTEN", 0.0)
    assert tried("c.yaml") >= left


def test_ctrl_c_gives_back_what_was_claimed(tmp_path: Path, url: str) -> None:
    class Stopped(InlineExecutor):
        def measurement(self, *args: Any) -> Any:
            if args[4].key == "screen/t3":
                raise KeyboardInterrupt
            return super().measurement(*args)

    with pytest.raises(Interrupted):
        _tune(tmp_path / "a.yaml", url, executor=Stopped(SimulatedTarget("saturating", 1)))
    trials = _study(url).trials
    assert "RUNNING" not in [t.state.name for t in trials]
    released = [t for t in trials if t.user_attrs.get("dyno_released")]
    assert len(released) == 3  # two measured and not yet settled, one under way
    resumed = _tune(tmp_path / "a.yaml", url, resume=True)
    assert resumed.outcome.status == "complete"
    complete = sum(t.state.name == "COMPLETE" for t in _study(url).trials)
    assert complete == 1 + len(_tried(resumed, beside=True))


def test_a_storage_that_is_lost_does_not_end_the_run(tmp_path: Path, url: str) -> None:
    class Dropped(InlineExecutor):
        def measurement(self, *args: Any) -> Any:
            if args[4].key == "screen/t3":
                (tmp_path / "study.db").write_bytes(b"no database")
            return super().measurement(*args)

    result = _tune(tmp_path / "a.yaml", url, executor=Dropped(SimulatedTarget("saturating", 1)))
    assert result.outcome.status == "complete"
    assert len(_tried(result)) == 11
    notes = [r["message"] for r in journal.load(result.journal).records if r.get("note") == "storage"]
    assert len(notes) == 1
    assert "continues alone" in notes[0]


def test_several_devices_and_several_machines(tmp_path: Path, url: str) -> None:
    results = [_tune(tmp_path / f"{n}.yaml", url, count=2, max_trials=17) for n in range(2)]
    assert not set(_tried(results[0])) & set(_tried(results[1]))
    assert all(len(_tried(r)) == 16 for r in results)


def test_keys_are_not_used_twice_where_others_have_claimed_all(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run would find the result of the last operation in the place of both."""
    from dyno_tuner.search.screen import Screen

    real = Screen.also

    def twice(self: Screen, points: Any) -> None:
        with monkeypatch.context() as taken:
            taken.setattr(self, "_claimed", lambda point: False)
            real(self, points)
            real(self, points)

    monkeypatch.setattr(Screen, "also", twice)
    records = journal.load(_tune(tmp_path / "a.yaml", url).journal).records
    keys = [(r["key"], r["process"]) for r in records if "op" in r]
    assert len(keys) == len(set(keys))


def test_passwords_are_not_shown() -> None:
    assert redact_text("postgresql+psycopg2://me:s3cr:t@host/db") == "postgresql+psycopg2://me:***@host/db"
    for secret in ("s3/cr:t", "s3 cret"):
        assert redact_text(f"postgresql://me:{secret}@host/db") == "postgresql://me:***@host/db"
    in_query = "--storage=postgresql://host/db?user=me&password=s3cret&sslmode=require"
    assert redact_text(in_query) == in_query.replace("s3cret", "***")
    for same in ("sqlite:///tune.db", "postgresql://me@host/db?host=/tmp/x:y@z", "--out"):
        assert redact_text(same) == same


def test_the_driver_that_is_installed_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"psycopg"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in there else None)
    assert with_driver("postgresql://me@host/db?a=b://c") == "postgresql+psycopg://me@host/db?a=b://c"
    for same in ("postgresql+asyncpg://me@host/db", "sqlite:///tune.db"):
        assert with_driver(same) == same
    there.add("psycopg2")
    assert with_driver("postgresql://host/db") == "postgresql+psycopg2://host/db"
    there.clear()
    with pytest.raises(ImportError, match="pip install psycopg2-binary"):
        with_driver("postgresql://host/db")


def test_a_driver_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TuneError, match=r"storage postgresql://.*: no driver .* pip install"):
        _tune(tmp_path / "a.yaml", "postgresql://me@host/db")


def test_what_differs_from_the_study_is_said(tmp_path: Path, url: str) -> None:
    _tune(tmp_path / "a.yaml", url, study="s")
    target = SimulatedTarget("saturating", 1)
    request = Request(
        "simulated", Options(Workload(128, 8), approx_limit=0.5), out=tmp_path / "b.yaml", quiet=True,
        storage=url, study="s",
    )  # fmt: skip
    with pytest.raises(TuneError, match="begun for something else, so this tune cannot join") as told:
        run(request, InlineExecutor(target), target.surface.space())
    assert "its workload is pp=64,tg=8,depth=0, here pp=128,tg=8,depth=0" in str(told.value)
    assert "another approx_limit (None, here 0.5)" in str(told.value)
    assert "machine" not in str(told.value)
