"""The line after a tune that says how to use its profile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from dyno import profiles
from dyno._virtual_devices import parse_virtual_devices
from dyno.devices import Device
from dyno_tuner.output import next_step as module
from dyno_tuner.output.next_step import next_step, same_options

if TYPE_CHECKING:
    from pathlib import Path


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


@pytest.mark.parametrize(
    ("device", "usual", "given", "wanted"),
    [
        ("cpu", "cpu", {}, []),
        ("cpu", "cuda:0", {}, ["--device", "cpu"]),
        ("cuda:0", "cuda:0", {"vram": 8 << 30}, ["--vram", "8192MiB"]),
        ("cuda:1", "cuda:0", {}, ["--device", "cuda:1"]),
        ("cpu:1", "cpu", "cpu:1,link_gbps=8", ["--device", "cpu:1", "--virtual-device", "cpu:1,link_gbps=8"]),
        ("a node of a cluster", "cpu", {}, []),
    ],
)
def test_the_next_command_runs_as_the_tune_did(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, usual: str, given: Any, wanted: list[str]
) -> None:
    monkeypatch.setattr(module, "resolve_device", lambda _: Device(usual, {}))
    placement = {"virtual_devices": parse_virtual_devices([given])} if isinstance(given, str) else given
    profile = profiles.load_profile(next(profiles.shipped_folder().glob("*.yaml")))
    assert profile.provenance is not None
    made = profile.provenance.model_copy(update={"command": "tune m.gguf --set threads=3 --set=numa=off"})
    options = same_options(profile.model_copy(update={"provenance": made}), device, placement)
    assert options == [*wanted, "--set", "threads=3", "--set", "numa=off"]
    step = next_step(tmp_path / "x.yaml", "m.gguf", foreign=False, options=options)
    assert step.startswith(
        f"dyno serve m.gguf --profile {tmp_path}/x.yaml {' '.join(options)}; dyno does not"
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    found = next_step(profiles.user_folder() / "x.yaml", "m.gguf", foreign=False, options=options)
    assert found.startswith(f"dyno run and dyno serve find this profile with {' '.join(options)}; ")
