"""The names of the tuner's command: `tune`, which other packages install too, and `dyno-tune`."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from dyno import info

ROOT = Path(__file__).resolve().parents[3]


def test_both_names_start_the_same_function() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = ("tune", "dyno-tune")
    first, second = (EntryPoint(name, project["scripts"][name], "console_scripts").load() for name in names)
    assert first is second


@pytest.mark.parametrize("name", ["tune", "dyno-tune"])
def test_help_and_completion_use_the_name_that_was_typed(name: str) -> None:
    code = f"import sys; from dyno_tuner.entry import main; sys.argv[0] = '/some where/{name}'; main()"
    shown = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert shown.split()[:2] == ["Usage:", name]
    variable = f"_{name.upper().replace('-', '_')}_COMPLETE"
    environment = {**os.environ, variable: "complete_bash", "COMP_WORDS": f"{name} hist", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout.split(), done.stderr) == (["history"], "")


def test_the_package_is_the_command_too() -> None:
    """Where the scripts of an environment are not on the PATH."""
    done = subprocess.run(
        [sys.executable, "-m", "dyno_tuner", "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[0] == "Usage:"
    assert "--model" in done.stdout


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ("#!/x/bin/python\nfrom ray.tune.cli.scripts import cli\nsys.exit(cli())\n", True),
        ("#!/x/bin/python\nfrom dyno_tuner.entry import main\nsys.exit(main())\n", False),
        (None, False),
    ],
)
def test_info_names_a_foreign_tune(
    script: str | None, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's package also installs a script `tune`; where it replaces dyno's, the user has to know."""
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "tune"
    if script is not None:
        path.write_text(script, encoding="utf-8")
        path.chmod(0o755)
    facts = info.collect("cpu")
    assert facts["foreign_tune"] == (str(path) if named else None)
    lines = [line for line in info.text(facts).splitlines() if line.startswith("tune ")]
    line = f"tune              {path} is another program; use dyno-tune or dyno tune"
    assert lines == ([line] if named else [])
