"""The line after a tune that says how to use its profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dyno import profiles
from dyno_tuner.output.next_step import next_step

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_profile_that_dyno_finds_needs_no_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    found = profiles.user_folder() / "x.yaml"
    assert next_step(found, "m.gguf", foreign=False) == (
        f"dyno run and dyno serve find this profile; dyno profiles show {found} prints it"
    )


def test_a_profile_elsewhere_is_named_in_the_command(tmp_path: Path) -> None:
    step = next_step(tmp_path / "my x.yaml", "m 1.gguf", foreign=False)
    assert step.startswith(f"dyno serve 'm 1.gguf' --profile '{tmp_path}/my x.yaml'; dyno does not search")


def test_a_profile_of_another_engine_is_exported(tmp_path: Path) -> None:
    step = next_step(tmp_path / "x.yaml", "m.gguf", foreign=True)
    assert step.startswith(f"dyno profiles export {tmp_path}/x.yaml --bin DIR ")


def test_a_profile_beside_the_old_one_has_no_step(tmp_path: Path) -> None:
    assert next_step(tmp_path / "x.yaml.new", "m.gguf", foreign=False) == ""
