"""`check_file` and the generated files: problems are found, what is not checked is said, nothing is stale."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from dyno.profiles import check_file, generate, has_errors, loads_profile
from dyno.profiles._reference import EXAMPLE
from dyno.profiles.schema import KernelEntry
from dyno.settings import SETTINGS

ROOT = Path(__file__).resolve().parents[2]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    return path


class FakeOps(types.SimpleNamespace):
    """The interface of `dyno._core.ops`, with one family whose `rows` must divide n."""

    def __init__(self, device: str = "cuda") -> None:
        super().__init__(device=device, asked=[])

    def families(self) -> list[str]:
        return ["matmul"]

    def variants(self, family: str) -> list[dict[str, Any]]:
        return [{"name": "matvec", "device": self.device, "params": ["warps", "rows"]}]

    def parse_key(self, key: str, tokens: int) -> tuple[str, dict[str, Any]]:
        family, *rest = key.split(" ")
        if family != "matmul":
            raise ValueError(f"unknown op family '{family}'")
        return family, {"m": tokens, "key": rest}

    def supports(
        self, family: str, desc: dict[str, Any], config: dict[str, Any], device: Any
    ) -> tuple[bool, str]:
        self.asked.append((desc["m"], device["kind"], config["variant"]))
        if config["variant"] != "matvec":
            return False, f"no variant {config['variant']!r}"
        return (desc["m"] <= 8, "" if desc["m"] <= 8 else "matvec takes at most 8 tokens")


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> FakeOps:
    fake = FakeOps()
    core = types.ModuleType("dyno._core")
    core.ops = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dyno._core", core)
    return fake


def test_a_good_file_has_no_problems(ops: FakeOps, cuda_text: str, tmp_path: Path) -> None:
    assert check_file(write(tmp_path, cuda_text)) == []
    assert ops.asked == [(1, "cuda", "matvec"), (8, "cuda", "matvec")]  # both ends of the range


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("matvec", "matvek", "no variant 'matvek'"),
        ("m1-8", "m1+", "with 65536 tokens: matvec takes at most 8 tokens"),
        ('"matmul q4', '"matmull q4', "unknown op family 'matmull'"),
    ],
)
def test_kernels_are_asked_of_the_op_families(
    ops: FakeOps, cuda_text: str, tmp_path: Path, old: str, new: str, words: str
) -> None:
    path = write(tmp_path, cuda_text.replace(old, new))
    problems = check_file(path)
    assert has_errors(problems)
    assert str(problems[0]).startswith(f"{path}:12: kernels.matmul")
    assert words in str(problems[0])


def test_what_cannot_be_checked_is_said(
    monkeypatch: pytest.MonkeyPatch, ops: FakeOps, cuda_text: str, tmp_path: Path
) -> None:
    path = write(tmp_path, cuda_text)
    ops.device = "cpu"
    (problem,) = check_file(path)
    assert str(problem).startswith(f"{path}:12: note: kernels.matmul")
    assert "not checked: this build has no matmul kernels for cuda devices" in problem.message
    monkeypatch.setitem(sys.modules, "dyno._core", None)  # as where nothing was compiled
    (problem,) = check_file(path)
    assert "not checked: no compiled engine here" in problem.message
    assert not has_errors([problem])


def test_odd_entries_are_warnings(ops: FakeOps, cuda_text: str, tmp_path: Path) -> None:
    text = cuda_text.replace("value: 4096, default: 512", "value: 512, default: 512")
    text = text.replace("ratio: 1.40, ci95: [1.39, 1.41], moves: pp, group: g1", "ratio: 0.9, moves: pp")
    problems = check_file(write(tmp_path, text))
    assert not has_errors(problems)
    assert {problem.message for problem in problems} == {
        "value 512 is the default; write `default`",
        "ratio 0.9 is slower than the default",
        "is alone in group 'g1'",
    }


def test_broken_files_are_errors_with_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "schema: 1\nlabel: x\nmatsh: {}\n")
    problems = check_file(path)
    assert has_errors(problems)
    assert f"{path}:3: matsh: unknown key; did you mean 'match'?" in map(str, problems)
    (problem,) = check_file(tmp_path / "none.yaml")
    assert str(problem) == f"{tmp_path / 'none.yaml'}: cannot be read: No such file or directory"


@pytest.mark.skipif(not (ROOT / "profiles" / "profile.schema.json").is_file(), reason="not a source tree")
def test_generated_files_are_fresh() -> None:
    assert generate.stale(ROOT) == []


def test_generating_and_checking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--root", str(tmp_path)]) == 2  # no source tree
    (tmp_path / "pyproject.toml").write_text("")
    assert generate.main(["--root", str(tmp_path), "--check"]) == 1
    assert not (tmp_path / "profiles").exists()
    assert generate.main(["--root", str(tmp_path)]) == 0
    assert generate.main(["--root", str(tmp_path), "--check"]) == 0
    schema = tmp_path / "profiles" / "profile.schema.json"
    schema.write_text(schema.read_text().replace('"ubatch"', '"u_batch"'))
    capsys.readouterr()
    assert generate.main(["--root", str(tmp_path), "--check"]) == 1
    assert '+        "ubatch": {' in capsys.readouterr().out


def test_the_json_schema_knows_every_setting_and_key() -> None:
    schema = generate.json_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert set(schema["properties"]["settings"]["properties"]) == set(SETTINGS)
    assert schema["properties"]["settings"]["additionalProperties"] is False
    assert set(schema["required"]) == {"schema", "label", "match"}
    for name, definition in schema["$defs"].items():
        closed = definition.get("additionalProperties")
        assert closed is False or (name == "KernelEntry" and closed["type"] == "integer"), name


def test_the_example_of_the_reference_page_is_a_profile(tmp_path: Path) -> None:
    assert loads_profile(EXAMPLE).label.startswith("NVIDIA H200")
    page = generate.reference_page()
    for name in SETTINGS:
        assert f"`{name}`" in page


def test_profiles_of_the_tree_pass_the_check() -> None:
    for path in sorted((ROOT / "profiles").glob("*.yaml")):
        assert not has_errors(check_file(path)), path


def test_no_parameter_of_a_kernel_has_the_name_of_a_key() -> None:
    """Both stand side by side in an entry, so one of them would be lost."""
    root = Path(__file__).resolve().parents[2]
    found = {
        name
        for path in root.glob("csrc/ops/*/variants.def")
        for names in re.findall(r"^DYNO_VARIANT\(\w+, \w+, \w+((?:, \w+)*)\)", path.read_text(), re.MULTILINE)
        for name in re.findall(r"\w+", names)
    }
    assert {"tokens", "splits", "group_size"} <= found
    assert not found & set(KernelEntry.keys())
    for name in found:
        assert KernelEntry.model_validate({"variant": "any", name: 3}).params == {name: 3}
