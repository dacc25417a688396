"""A profile is replaced only by one with at least its evidence, and it stays under another name."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any

import pytest
from dyno import profiles
from dyno.profiles.layers import Layer, profile_files
from dyno_tuner.core.outcome import Outcome
from dyno_tuner.core.protocol import Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.output import replacement
from dyno_tuner.output.diff import apart, compare_profiles
from dyno_tuner.output.replacement import has_less_evidence, is_continued
from dyno_tuner.output.verdict import verdict
from dyno_tuner.record import journal
from dyno_tuner.run.session import Request, Result, run
from dyno_tuner.run.share import row_of
from dyno_tuner.run.tune import Options
from dyno_tuner.targets.simulated.surfaces import Surface, saturating
from dyno_tuner.targets.simulated.target import SimulatedTarget

if TYPE_CHECKING:
    from pathlib import Path

LONG: dict[str, Any] = {"max_trials": 12, "rounds": 2, "max_rounds": 2}
FLAT = dataclasses.replace(saturating(), rates=lambda settings: {"pp": 400.0, "tg": 30.0})
SHORT: dict[str, Any] = {"surface": FLAT, "budget": 14.0}
"""A short tune in which other values lose to the default."""
SHORTER: dict[str, Any] = {"budget": 4.0}
"""No time for the noise."""


def _tune(
    folder: Path, seed: int = 5, *, surface: Surface | str = "saturating", quiet: bool = True,
    resume: bool = False, **options: Any,
) -> Result:  # fmt: skip
    target = SimulatedTarget(surface, seed)
    request = Request(
        "simulated", Options(Workload(pp=64, tg=8), seed=seed, **options), out=folder / "p.yaml",
        quiet=quiet, resume=resume,
    )  # fmt: skip
    return run(request, InlineExecutor(target), target.surface.space())


def test_a_short_tune_leaves_a_proven_profile_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _tune(tmp_path, **LONG)
    proven = first.path.read_bytes()
    short = _tune(tmp_path, quiet=False, **SHORT)
    assert short.outcome.status == "budget"
    assert (tmp_path / "p.yaml").read_bytes() == proven
    assert short.path == tmp_path / "p.yaml.new"
    assert profiles.load_profile(short.path).settings == short.profile.settings
    assert set(short.profile.settings.values()) == {"default"}
    assert profile_files(Layer("user", tmp_path)) == [tmp_path / "p.yaml"]
    said = capsys.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if "p.yaml.new" in line]
    assert len(lines) == 1
    assert f"{tmp_path / 'p.yaml'} stays: it has 3 proven entries, and this tune has none" in lines[0]
    assert "--budget" in lines[0]


def test_what_is_replaced_stays_under_another_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [_tune(tmp_path, seed, **LONG).path.read_bytes() for seed in (5, 6)]
    assert (tmp_path / "p.yaml.1").read_bytes() == before[0]
    capsys.readouterr()
    last = _tune(tmp_path, 7, quiet=False, **LONG)
    said = capsys.readouterr()
    assert f"the profile of an earlier run is kept as {tmp_path / 'p.yaml.2'}" in said.out + said.err
    assert (tmp_path / "p.yaml.2").read_bytes() == before[1]
    assert last.path == tmp_path / "p.yaml"
    assert profiles.load_profile(last.path).provenance == last.profile.provenance
    assert profile_files(Layer("user", tmp_path)) == [tmp_path / "p.yaml"]


def test_a_file_begins_with_its_verdict_and_keeps_the_comments_of_people(tmp_path: Path) -> None:
    result = _tune(tmp_path, **LONG)
    head = [line for line in result.path.read_text().splitlines() if line.startswith("#")]
    assert f"# Verdict: {verdict(result.outcome)}" in head
    # A file of the same profile without comments, or with others, is the same profile.
    for text in (profiles.dumps_profile(result.profile), f"# asked for in #12\n{result.path.read_text()}"):
        result.path.write_text(text)
        written = replacement.write(result.profile, result.path, b"", ["another head"])
        assert (written.path, written.line) == (result.path, "")
        assert result.path.read_text() == text
        assert profiles.load_profile(result.path) == result.profile
    assert not (tmp_path / "p.yaml.1").exists()


def test_comments_of_people_outlive_a_resume(tmp_path: Path) -> None:
    """A resumed run has another command and journal, so it writes the file anew."""
    result = _tune(tmp_path, **LONG)
    book = journal.of_profile(result.path).read_bytes()
    assert result.profile.provenance is not None
    provenance = result.profile.provenance.model_copy(update={"command": "tune --resume"})
    resumed = result.profile.model_copy(update={"provenance": provenance})
    plain = result.path.read_text()
    for text in (f"# asked for in #12\n{plain}", plain.replace("\nsettings:", "\n# for the rack\nsettings:")):
        assert text != plain
        result.path.write_text(text)
        written = replacement.write(resumed, result.path, book)
        (aside,) = tmp_path.glob("p.yaml.[0-9]")
        assert written.line == f"the profile of an earlier run is kept as {aside}"
        assert aside.read_text() == text
        aside.unlink()
    result.path.write_text(plain)
    assert replacement.write(resumed, result.path, book).line == ""
    assert not list(tmp_path.glob("p.yaml.[0-9]"))


def test_comments_change_neither_the_row_nor_the_diff_of_a_profile(tmp_path: Path) -> None:
    result = _tune(tmp_path, **LONG)
    plain = tmp_path / "plain.yaml"
    profiles.save_profile(result.profile, plain)
    assert plain.read_text() != result.path.read_text()
    assert row_of(profiles.load_profile(plain)) == row_of(profiles.load_profile(result.path))
    assert {row.verdict for row in compare_profiles(plain, result.path)} == {"equal"}
    assert apart(plain, result.path) == []


def test_a_damaged_profile_is_replaced_and_kept(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("schema: [")
    assert _tune(tmp_path, **SHORT).path == tmp_path / "p.yaml"
    assert (tmp_path / "p.yaml.1").read_text() == "schema: ["


def test_a_resumed_run_replaces_its_own_profile(tmp_path: Path) -> None:
    first = _tune(tmp_path, budget=25.0)
    again = _tune(tmp_path, resume=True, budget=90.0)
    assert again.profile.settings != first.profile.settings
    replayed = _tune(tmp_path, resume=True, budget=90.0)
    assert first.path == again.path == replayed.path
    assert {p.name for p in tmp_path.glob("p.yaml*")} == {
        "p.yaml",
        "p.yaml.1",
        journal.of_profile(first.path).name,
    }


@pytest.mark.parametrize("older", [False, True])
def test_a_tune_that_judged_nothing_writes_no_profile(
    older: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty file would match exactly and hide the proven profile of the site."""
    site, user = tmp_path / "site", tmp_path / "config" / "dyno" / "profiles"
    for folder in (site, user):
        folder.mkdir(parents=True)
    monkeypatch.setenv("DYNO_SITE_PROFILES", str(site))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    proven = _tune(site, **LONG)
    if older:
        (user / "p.yaml").write_bytes(proven.path.read_bytes())
    short = _tune(user, **SHORTER)
    assert (short.outcome.status, short.path) == ("budget", None)
    kept = f"{user / 'p.yaml'} is unchanged" if older else "no profile was written"
    needed = short.outcome.too_short["needed"]
    assert short.why_none == (
        f"{kept}, because this tune judged no setting; continue with --resume --budget {needed}s"
    )
    assert verdict(short.outcome) == (
        "Nothing was measured: one measurement takes 0.8 s, so a tune of 4 s proves nothing; give at least "
        f"--budget {needed}s."
    )
    assert short.journal.exists()
    assert not (user / "p.yaml.new").exists()
    match = proven.profile.match
    found = profiles.find_profile(match.device, match.model, match.engine)
    assert (found.layer, found.level) == ("user" if older else "site", profiles.Level.EXACT)
    assert found.profile is not None
    assert found.profile.settings == proven.profile.settings
    # The journal goes on as it says, and then there is something to write.
    again = _tune(user, resume=True, budget=10 * needed)
    assert again.path == user / "p.yaml"
    assert again.profile.settings


def test_no_time_to_prove_what_looked_faster_writes_no_profile(tmp_path: Path) -> None:
    """All that was tried looked faster, so no default has won either."""
    short = _tune(tmp_path, budget=16.0)
    (promise,) = short.outcome.promises
    assert short.path is None
    assert short.why_none.endswith(f"; continue with --resume --budget {promise['needed']}s")


def _with(profile: profiles.Profile, status: str, count: int) -> profiles.Profile:
    """`profile` with its first `count` proven entries."""
    provenance = profile.provenance
    assert provenance is not None
    return profile.model_copy(
        update={
            "settings": dict(list(profile.settings.items())[:count]),
            "provenance": provenance.model_copy(update={"status": status}),
        }
    )


def test_which_evidence_is_less(tmp_path: Path) -> None:
    full = _tune(tmp_path, **LONG).profile
    assert replacement.proven(full) == 3

    def less(new: tuple[str, int], old: tuple[str, int]) -> bool:
        return has_less_evidence(_with(full, *new), _with(full, *old))

    for early in ("budget", "interrupted"):
        assert less((early, 1), ("complete", 2))
        assert less((early, 1), ("budget", 2))
        assert not less((early, 2), ("complete", 2))
        assert less((early, 0), ("complete", 0))
        assert not less((early, 0), (early, 0))
    assert not less(("complete", 1), ("complete", 2))
    assert less(("complete", 0), ("budget", 1))
    assert not less(("complete", 0), ("complete", 0))


def _disturbed(profile: profiles.Profile) -> profiles.Profile:
    """`profile`, as if `tune --force` had written it beside other programs."""
    assert profile.evidence is not None
    environment = profiles.Environment(disturbed=True)
    evidence = profile.evidence.model_copy(update={"environment": environment})
    return profile.model_copy(update={"evidence": evidence})


def test_a_disturbed_profile_replaces_no_proven_one(tmp_path: Path) -> None:
    full = _tune(tmp_path, **LONG).profile
    assert has_less_evidence(_disturbed(full), full)
    assert not has_less_evidence(full, _disturbed(full))
    assert not has_less_evidence(_disturbed(full), _disturbed(full))
    assert not has_less_evidence(_disturbed(_with(full, "complete", 0)), _with(full, "complete", 0))
    written = replacement.write(_disturbed(full), tmp_path / "p.yaml", b"")
    assert written.path == tmp_path / "p.yaml.new"
    assert "its gains are proven, and other programs disturbed this tune" in written.line
    assert "tune again when no other program runs" in written.line


def test_a_disturbed_profile_without_gains_replaces_no_proven_one_of_a_near_device(tmp_path: Path) -> None:
    """The runtime would take the old one, as the nearest, and it lies under the same name."""
    full = _tune(tmp_path, **LONG).profile
    near = {"device": full.match.device.model_copy(update={"memory_mib": 2 * full.match.device.memory_mib})}
    old = full.model_copy(update={"match": full.match.model_copy(update=near)})
    nothing = full.model_copy(update={"settings": dict.fromkeys(full.settings, "default")})
    assert has_less_evidence(_disturbed(nothing), old)
    assert not has_less_evidence(nothing, old), "a quiet machine has shown that the defaults are best here"
    assert not has_less_evidence(_disturbed(full), old), "the gains were seen here"
    assert not has_less_evidence(_disturbed(nothing), _disturbed(old))
    other = {"model": full.match.model.model_copy(update={"layers": full.match.model.layers + 1})}
    stranger = full.model_copy(update={"match": full.match.model_copy(update=other)})
    assert not has_less_evidence(_disturbed(nothing), stranger)


def test_a_run_that_tried_less_does_not_replace_one_that_tried_more(tmp_path: Path) -> None:
    """Both proved nothing, and the second one only measured the default."""
    first = _tune(tmp_path, **SHORT)
    tried = first.profile.model_copy(update={"settings": {"ubatch": "default"}})
    nothing = first.profile.model_copy(update={"settings": {}})
    assert has_less_evidence(nothing, tried)
    assert not has_less_evidence(tried, nothing)
    assert not has_less_evidence(tried, tried)
    path = tmp_path / "q.yaml"
    replacement.write(tried, path, b"")
    written = replacement.write(nothing, path, b"")
    assert written.path == tmp_path / "q.yaml.new"
    assert f"{path} stays: it has tried 1 settings, and this tune 0" in written.line
    assert profiles.load_profile(path).settings == {"ubatch": "default"}


@pytest.mark.parametrize("part", ["device", "model", "engine"])
def test_evidence_for_something_else_holds_nothing_back(part: str, tmp_path: Path) -> None:
    full = _tune(tmp_path, **LONG).profile
    none = _with(full, "budget", 0)
    assert has_less_evidence(none, full)
    match = full.match
    other = {
        "device": {"cores": getattr(match.device, "cores", 1) + 1},
        "model": {"layers": match.model.layers + 1},
        "engine": {"ops_revision": match.engine.ops_revision + 1},
    }[part]
    changed = match.model_copy(update={part: getattr(match, part).model_copy(update=other)})
    assert not has_less_evidence(none, full.model_copy(update={"match": changed}))


def test_a_run_is_told_from_another_by_its_journal(tmp_path: Path) -> None:
    first = _tune(tmp_path, **LONG)
    data = first.journal.read_bytes()
    assert first.profile.evidence is not None
    assert first.profile.evidence.journal == f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert is_continued(first.profile, data)
    assert is_continued(first.profile, data + b"further\n")
    assert not is_continued(first.profile, data[:-1])
    assert not is_continued(first.profile.model_copy(update={"evidence": None}), data)


def _outcome(**fields: Any) -> Outcome:
    return Outcome({}, {}, searched=["ubatch", "threads"], **fields)


def test_a_default_is_written_only_of_what_was_judged() -> None:
    promise = {"settings": {"ubatch": 2048}, "ratio": 1.2}
    assert _outcome().judged == ["ubatch", "threads"]
    # If rounds have refuted a promise, the default is a result.
    assert _outcome(promises=[promise]).judged == ["ubatch", "threads"]
    assert _outcome(promises=[{**promise, "needed": 60}]).judged == ["threads"]
    assert _outcome(promises=[promise], unproven=True).judged == ["threads"]
    assert _outcome(promises=[{"kernels": 2, "ratio": 1.1, "needed": 60}]).judged == ["ubatch", "threads"]
    assert _outcome(missed=promise).judged == ["threads"]
    assert _outcome(promises=[promise], unproven=True, left_open=["ubatch", "threads"]).judged == []


@pytest.mark.parametrize("budget", [14.0, 16.0])  # 17 s prove it
def test_no_default_stands_beside_no_time_to_prove_it(budget: float, tmp_path: Path) -> None:
    result = _tune(tmp_path, budget=budget)
    outcome = result.outcome
    assert outcome.unproven
    assert "ubatch" in outcome.searched
    assert "ubatch" not in result.profile.settings
    assert set(result.profile.settings) == set(outcome.searched) - {"ubatch"}
