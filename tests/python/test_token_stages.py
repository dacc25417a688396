"""The figures of `benchmarks/token_stages.py`, from lines that stand in for those of its program."""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from types import ModuleType

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def stages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("token_stages", BENCHMARKS / "token_stages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def way(name: str, us: float, ahead: bool = True) -> dict[str, Any]:
    return {"way": name, "ahead": ahead, "us": us}


def test_the_cost_of_a_stage_is_its_time_above_that_of_its_bytes(stages: ModuleType) -> None:
    rate = max(
        stages.rates([{"stages": 1, "bytes": 4_000_000}, way("words", 2.0), way("launches", 1.0)]).values()
    )
    assert rate == 4_000_000  # bytes a microsecond, of the fastest way
    lines = [{"stages": 10, "bytes": 40_000_000}, way("words", 30.0), way("counter", 50.0, ahead=False)]
    words, counter = stages.figures(lines, rate)
    assert (words["stage_us"], words["above_bytes_us"]) == (3.0, 2.0)
    assert (counter["stage_us"], counter["above_bytes_us"]) == (5.0, 4.0)
    assert words["of_roofline"] == pytest.approx(1 / 3, abs=1e-3)


def test_the_program_gets_a_line_for_each_stage(stages: ModuleType, tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    told = "import json, sys\nprint(json.dumps([open(sys.argv[1]).read(), sys.argv[2]]))\n"
    binary.write_text(f"#!{sys.executable}\n{told}")
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
    given = stages.run(binary, [(1.5, False), (0, True)], 7, tmp_path)
    assert given == [["1500000 0\n0 1\n", "7"]]


def test_a_program_that_fails_ends_the_measurement(stages: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="error: false ended with 1"):
        stages.run(Path("/bin/false"), [(0, False)], 1, tmp_path)


def test_each_model_has_one_routed_stage_a_layer_or_none(stages: ModuleType) -> None:
    for name, (layers, layer) in stages.LAYERS.items():
        routed = [size for size, is_routed in layer if is_routed]
        assert len(routed) == (0 if name in ("llama-8b", "qwen3-8b") else 1)
        assert len(stages.programs()[name]) == layers * len(layer)


def test_the_program_compiles(stages: ModuleType, tmp_path: Path) -> None:
    if "DYNO_CUDA_BUILD" not in os.environ:
        pytest.skip("`make cuda-check` sets DYNO_CUDA_BUILD where a CUDA toolkit is")
    assert os.access(stages.built(tmp_path, "sm_90a"), os.X_OK)
