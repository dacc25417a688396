"""`tune verify` as a job of a CI system: JUnit XML, `--since`, and flags that a new image has lost."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from typing import TYPE_CHECKING, Any

import pytest
from dyno import profiles
from dyno_tuner.cli.commands import app
from dyno_tuner.core.intervals import Estimate
from dyno_tuner.run.junit import Suite, junit
from dyno_tuner.run.verify import KEEP, STALE, Verdict
from fake_engines import DATA, fake
from typer.testing import CliRunner

if TYPE_CHECKING:
    from pathlib import Path

GAIN = Estimate(1.2, 1.1, 1.3, 9)


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["verify", *words])
    said = "" if isinstance(done.exception, SystemExit | None) else str(done.exception)
    return done.exit_code, done.output + said


def profile_of(engine: str, command: str, path: Path) -> Path:
    profiles.save_profile(
        profiles.Profile.model_validate({
            "schema": 1, "label": "a test",
            "match": {
                "device": {"kind": "cpu", "isa": "avx2", "cores": 2, "memory_mib": 1000},
                "model": {"architecture": "llama", "layers": 1, "embedding": 8, "types": {"F32": 1.0}},
                "engine": {"name": engine, "version": "1", "ops_revision": 1},
            },
            "settings": {"ubatch": {"value": 64}},
            "provenance": {"tuner": "1", "date": "2026-11-20", "command": command},
        }), path)  # fmt: skip
    return path


def test_an_entry_is_a_test_that_fails_unless_it_is_kept() -> None:
    verdicts = [
        Verdict("settings.ubatch", KEEP, "still gains", 1.2, GAIN),
        Verdict("settings.threads", STALE, "gains <nothing> & more\x00\x1b", 1.1),
    ]
    text = junit(Suite("profiles/p \x07.yaml", 3.25, verdicts, {"pp512": GAIN}))
    root = ElementTree.fromstring(text)
    (suite,) = root
    assert {k: suite.get(k) for k in ("tests", "failures", "errors", "skipped", "time")} == {
        "tests": "2", "failures": "1", "errors": "0", "skipped": "0", "time": "3.2",
    }  # fmt: skip
    kept, stale = suite.findall("testcase")
    assert kept.find("failure") is None
    failure = stale.find("failure")
    assert failure is not None
    assert failure.get("type") == "stale"
    assert failure.get("message") == "gains <nothing> & more\ufffd\ufffd; recorded 1.100 ×"
    (gain,) = suite.findall("properties/property")
    assert (gain.get("name"), gain.get("value")) == ("gain pp512", "1.2000 [1.1000, 1.3000]")


def test_a_profile_without_entries_passes() -> None:
    (case,) = ElementTree.fromstring(junit(Suite("p.yaml", 0.0))).iter("testcase")
    assert list(case) == []


def test_a_newer_profile_is_skipped(tmp_path: Path) -> None:
    path, out = profile_of("dyno", "tune", tmp_path / "p.yaml"), tmp_path / "v.xml"
    code, output = run(str(path), "--since", "2026-11-20", "--junit", str(out))
    assert (code, output) == (
        0,
        "skipped: the profile was measured on 2026-11-20, which is not before 2026-11-20\n",
    )
    assert ElementTree.parse(out).getroot().get("skipped") == "1"
    code, output = run(str(path), "--since", "2026-11-19", "--json")
    assert (code, json.loads(output)["entries"]) == (0, [])


def test_an_older_profile_is_measured_and_an_error_is_in_the_xml(tmp_path: Path) -> None:
    path, out = profile_of("dyno", "tune", tmp_path / "p.yaml"), tmp_path / "v.xml"
    code, output = run(str(path), "--since", "2026-11-21", "--junit", str(out))
    assert code == 1
    assert "give --model" in output
    root = ElementTree.parse(out).getroot()
    assert (root.get("errors"), root.get("skipped")) == ("1", "0")
    (error,) = root.iter("error")
    assert "give --model" in str(error.get("message"))


@pytest.mark.parametrize("words", [["--since", "today"], ["--junit", "/nonexistent-folder/v.xml"]])
def test_wrong_words_are_usage_errors(tmp_path: Path, words: list[str]) -> None:
    assert run(str(profile_of("dyno", "tune", tmp_path / "p.yaml")), *words)[0] == 2


def test_a_folder_in_place_of_the_xml_is_refused_before_anything_runs(tmp_path: Path) -> None:
    code, output = run(str(profile_of("dyno", "tune", tmp_path / "p.yaml")), "--junit", str(tmp_path))
    assert code == 1
    assert f"--junit {tmp_path} is a folder; give a file" in output
    assert "give --model" not in output


def test_flags_that_a_new_image_lost_are_named_before_anything_runs(tmp_path: Path) -> None:
    folder = fake(tmp_path / "b", "llama.cpp-0c1e570")
    own = "llama-server --no-mmap --mmap -dio -ub 64 --ubatch-sise 2"
    line = f"tune --engine llama.cpp --bin {folder} -m m.gguf -- {own}"
    path, out = profile_of("llama.cpp", line, tmp_path / "p.yaml"), tmp_path / "v.xml"
    code, output = run(str(path), "--bin", str(folder), "--json", "--junit", str(out))
    assert code == 1, output
    entries: list[dict[str, Any]] = json.loads(output)["entries"]
    assert [e["entry"] for e in entries] == [
        "flag --no-mmap",
        "flag --mmap",
        "flag -dio",
        "flag --ubatch-sise",
    ]
    assert {e["verdict"] for e in entries} == {"unsupported"}
    assert "replaced by -lm none" in entries[0]["reason"]
    assert "replaced by -lm mmap" in entries[1]["reason"]  # its most similar flag is --mmproj
    assert "replaced by -lm dio" in entries[2]["reason"]
    assert "the most similar flag is --ubatch-size" in entries[3]["reason"]
    calls = [json.loads(line)["args"] for line in (folder / "calls.jsonl").read_text().splitlines()]
    assert all("--help" in args or "--version" in args for args in calls), calls
    assert ElementTree.parse(out).getroot().get("failures") == "4"


def test_a_flag_that_the_help_lists_as_removed_is_lost(tmp_path: Path) -> None:
    """llama.cpp goes on listing a few removed flags, and ends when it gets one."""
    folder = fake(tmp_path / "b", "llama.cpp-0c1e570")
    line = f"tune --engine llama.cpp --bin {folder} -m m.gguf -- llama-server -md d.gguf --draft-max 8"
    path = profile_of("llama.cpp", line, tmp_path / "p.yaml")
    code, output = run(str(path), "--bin", str(folder), "--json")
    assert code == 1
    (entry,) = json.loads(output)["entries"]
    assert entry["entry"] == "flag --draft-max"
    assert "removed: use --spec-draft-n-max or --spec-ngram-mod-n-max" in entry["reason"]


def test_a_flag_that_the_help_keeps_silent_about_is_asked_for(tmp_path: Path) -> None:
    """ik_llama.cpp takes older flags that its help no longer lists; the binary tells, not the help."""
    folder = fake(tmp_path / "b", "ik_llama.cpp-3848")
    unlisted = (DATA / "ik_llama.cpp-3848.unlisted").read_text().split()
    silent = next(n for n in unlisted if n.startswith("-"))
    line = f"tune --engine ik_llama.cpp --bin {folder} -m m.gguf -- llama-server {silent} --gone-flag 3"
    path = profile_of("ik_llama.cpp", line, tmp_path / "p.yaml")
    code, output = run(str(path), "--bin", str(folder), "--json")
    assert code == 1
    assert [e["entry"] for e in json.loads(output)["entries"]] == ["flag --gone-flag"]


def test_flags_that_the_image_has_are_not_named(tmp_path: Path) -> None:
    folder = fake(tmp_path / "b", "llama.cpp-0c1e570")
    line = f"tune --engine llama.cpp --bin {folder} -m m.gguf -- llama-server -ub 64 -ngl -1 --port 80"
    path = profile_of("llama.cpp", line, tmp_path / "p.yaml")
    code, output = run(str(path), "--bin", str(folder))
    assert code == 1
    assert "unsupported" not in output
    assert "give --model" in output
