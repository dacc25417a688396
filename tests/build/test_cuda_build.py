"""A CUDA build on a machine without a GPU: it imports, says so, and knows which kernels it holds.

`make cuda-check` names the build folder in DYNO_CUDA_BUILD: for 75 and 90a, with GGML_CUDA_INSTANCES=minimal.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCTS = ("matmul", "matmul_id", "up_gate", "moe_up_gate")
HOPPER = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}
AMPERE = {"kind": "cuda", "compute_capability": 86, "sm_count": 84, "shared_per_block_bytes": 101_376}


@pytest.fixture(scope="module")
def build() -> Path:
    if "DYNO_CUDA_BUILD" not in os.environ:
        pytest.skip("no CUDA build: `make cuda-check` makes one and sets DYNO_CUDA_BUILD")
    return ROOT / os.environ["DYNO_CUDA_BUILD"]


@pytest.fixture(scope="module")
def module(build: Path) -> Path:
    (found,) = (build / "csrc" / "bindings").glob("_core*.so")
    return found


@pytest.fixture(scope="module")
def environment(module: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A package of this tree's Python and the build's module, and no GPU on any machine."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "dyno").mkdir()
    for path in (ROOT / "python" / "dyno").iterdir():
        if path.suffix != ".so":
            (folder / "dyno" / path.name).symlink_to(path)
    (folder / "dyno" / module.name).symlink_to(module)
    return {**os.environ, "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": "-1"}


def python(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ask(environment: dict[str, str], expression: str) -> Any:
    """The value of an expression over `ops` in the CUDA build."""
    return json.loads(
        python(environment, "-c", f"import json; from dyno._core import ops; print(json.dumps({expression}))")
    )


def optional_instances(family: str) -> list[dict[str, Any]]:
    """What variants.def lets a build leave out, read here independently of the build."""
    text = (ROOT / "csrc" / "ops" / family / "variants.def").read_text()
    params = {
        m[1]: re.findall(r"\w+", m[2]) for m in re.finditer(r"DYNO_VARIANT\((\w+), cuda, \w+(.*)\)", text)
    }
    found = []
    for match in re.finditer(r"DYNO_OPTIONAL\((\w+), ([\d, ]+)\)", text):
        values = [int(v) for v in match[2].split(",")]
        found.append({"variant": match[1], **dict(zip(params[match[1]], values, strict=True))})
    return found


def test_info_says_what_was_built_and_that_there_is_no_gpu(environment: dict[str, str]) -> None:
    facts = json.loads(python(environment, "-m", "dyno", "info", "--json"))
    switches = facts["build"]["switches"]
    assert switches["GGML_CUDA"] == "ON"
    assert switches["CMAKE_CUDA_ARCHITECTURES"] == "75;90a"
    assert switches["GGML_CUDA_INSTANCES"] == "minimal"
    assert [device["kind"] for device in facts["devices"]] == ["cpu"]
    assert "no GPU" in facts["no_cuda_reason"]
    text = python(environment, "-m", "dyno", "info")
    assert f"cuda: none, {facts['no_cuda_reason']}" in text


def test_info_tells_what_the_link_cost(environment: dict[str, str], module: Path) -> None:
    report = json.loads(python(environment, "-m", "dyno", "info", "--json"))["build"]["links"]
    assert report["module_link"]["bytes"] == module.stat().st_size
    assert report["module_link"]["peak_process_mib"] > 0
    assert 0 < report["device_code_bytes"] < module.stat().st_size
    assert "device code" in python(environment, "-m", "dyno", "info")


@pytest.mark.parametrize("family", PRODUCTS)
@pytest.mark.parametrize("device", [HOPPER, AMPERE], ids=["hopper", "ampere"])
def test_candidates_and_supports_know_what_was_compiled(
    environment: dict[str, str], family: str, device: dict[str, Any]
) -> None:
    experts = {"experts": 16, "used": 4} if family in ("matmul_id", "moe_up_gate") else {}
    desc = {"type": "q4_k", "layout": "gpu", "act": "f32", "m": 256, "n": 768, "k": 2048, **experts}
    call = f"{family!r}, {desc!r}, {device!r}"
    legal = ask(environment, f"ops.candidates({call}, 'legal')")
    compiled = ask(environment, f"ops.candidates({call}, 'compiled')")
    left_out = [config for config in legal if config not in compiled]
    optional = [c for c in optional_instances(family) if device is HOPPER or c["variant"] != "wgmma"]
    assert optional
    assert sorted(map(str, left_out)) == sorted(map(str, optional))
    supports = f"ops.supports({family!r}, {desc!r}, config, {device!r})"
    for ok, why in ask(environment, f"[{supports} for config in {left_out!r}]"):
        assert not ok
        assert "is not in this build" in why
        assert "GGML_CUDA_INSTANCES=all" in why
    assert ask(environment, f"[{supports} for config in {compiled!r}]") == [[True, ""]] * len(compiled)


def test_the_module_holds_the_kernels_it_says(module: Path) -> None:
    """Names of kernels lie in the module for their registration."""
    tiles = {
        (m[1].decode(), int(m[2]), int(m[3]))
        for m in re.finditer(
            rb"gemm_(mma|wgmma)_kernelILNS\d*_5DTypeE\d+ELi(\d+)ELi(\d+)E", module.read_bytes()
        )
    }
    optional = {
        (c["variant"], c["tokens"], c["warps"]) for c in optional_instances("matmul") if "tokens" in c
    }
    assert tiles
    assert not tiles & optional
    assert ("mma", 64, 4) in tiles


def test_selection_over_all_shapes(environment: dict[str, str]) -> None:
    """Every default is compiled, every candidate supported: the sweeps of tests/ops, asked of this build."""
    python(
        environment,
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu"),
        *(
            "tests/ops/test_contract_gpu.py",
            "tests/ops/test_gpu_layout.py",
            "tests/ops/test_few_rows_defaults.py",
        ),
    )
