"""Which CUDA kernels a build has: csrc/cmake/cuda_instances.py decides, and the engine's contract knows."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from dyno import _core
from one_unit import one_unit
from ops.cases import all_cases

if TYPE_CHECKING:
    from ops.harness import Case

ROOT = Path(__file__).resolve().parents[2]
SELECT = ROOT / "csrc" / "cmake" / "cuda_instances.py"
HOPPER = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}


def write_profile(
    folder: Path,
    kernels: Any,
    kind: str = "cuda",
    types: dict[str, float] | None = None,
    model: dict[str, Any] | None = None,
) -> str:
    path = folder / "profile.yaml"
    match = {"device": {"kind": kind}, **({"model": {**(model or {}), "types": types}} if types else {})}
    path.write_text(json.dumps({"schema": 1, "match": match, "kernels": kernels}))
    return str(path)


def select(folder: Path, profile: str, architectures: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SELECT), "--select", "all", "--profile", profile]
    command += ["--architectures", architectures]
    return subprocess.run(
        [*command, "--csrc", str(ROOT / "csrc"), "--output", str(folder / "ops")],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("kernels", "kind", "message"),
    [
        ({}, "cpu", "was made for a device of kind cpu"),
        ({"matmull q4_0 n=1 k=32": {}}, "cuda", "no op family 'matmull'; nearest: matmul"),
        ({"matmul q4_k} n=1": {}}, "cuda", "no kernels for type q4_k}; nearest: q4_k"),
        ({"matmul q4_0 n=1": {"m1": {"variant": "streem"}}}, "cuda", "does not exist; nearest: stream"),
        (
            {"matmul q4_0 n=1": {"m1": {"variant": "gemm", "rows": 4}}},
            "cuda",
            "gemm of matmul runs on another device",
        ),
        (
            {"matmul q4_0 n=1": {"m1": {"variant": "mma", "rows": 4}}},
            "cuda",
            "parameters of mma are tokens, warps, not rows",
        ),
        (
            {"matmul q4_0 n=1": {"m1": {"variant": "mma", "tokens": 48, "warps": 4}}},
            "cuda",
            "is not an instance of",
        ),
        (
            {"sample n_vocab=1": {"m1": {"variant": "heap", "grain": 64}}},
            "cuda",
            "heap of sample runs on another device",
        ),
        (
            {"sample n_vocab=1": {"m1": {"variant": "blocks", "blocks": 48}}},
            "cuda",
            "is not an instance of",
        ),
        ([1], "cuda", "kernels: a mapping is expected, not list"),
    ],
)
def test_a_profile_that_cannot_be_built(tmp_path: Path, kernels: Any, kind: str, message: str) -> None:
    done = select(tmp_path, write_profile(tmp_path, kernels, kind))
    assert done.returncode == 1
    assert message in done.stderr
    assert not (tmp_path / "ops").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a profile"),
        (b"schema: 2", "is not a profile"),
        (b"[1, 2", "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_profile(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "profile.yaml"
    if content is not None:
        path.write_bytes(content)
    done = select(tmp_path, str(path))
    assert done.returncode == 1
    assert message in done.stderr
    assert "profile.yaml" in done.stderr


@pytest.mark.parametrize(
    ("architectures", "entry", "kept"),
    [
        ("90a", {}, 0),
        ("90a-real", {}, 0),
        ("75;90a", {}, 4),
        ("", {}, 4),
        ("90a", {"variant": "mma", "tokens": 64, "warps": 4}, 1),
        ("90a", {"variant": "half_mma", "tokens": 64, "warps": 4}, 4),  # its kernels are of mma
    ],
)
def test_a_build_for_hopper_alone_has_no_products_of_older_chips(
    tmp_path: Path, architectures: str, entry: dict[str, Any], kept: int
) -> None:
    named = {"matmul q4_k n=1 k=256": {"m1": entry}} if entry else {}
    done = select(tmp_path, write_profile(tmp_path, named, types={"Q4_K": 1.0}), architectures)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "ops" / "left_out.inc").read_text()
    left = set(re.findall(r'^\{"mma", \{([\d, ]+)\}, 0\},$', text, re.MULTILINE))
    assert len({"16, 4", "32, 4", "64, 4", "64, 8"} - left) == kept
    assert ('{"flash", {64}, 0},' in text) == architectures.startswith("90a")
    variants = (tmp_path / "ops" / "left_out_variants.inc").read_text()
    found = re.findall(r'^\{"mma", (.*)\},$', variants, re.MULTILINE)
    hopper = architectures.startswith("90a")
    types = {0: "0", 1: "type_bit(DType::q4_k)", 4: "type_bit(DType::f16)"}
    assert found == ([types[kept]] if hopper else [])


# ---- chips ----


@pytest.fixture(scope="module")
def left_out_on_hopper(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[Any, ...]]:
    """The variants and parameters that a build for 90a alone can leave out."""
    folder = tmp_path_factory.mktemp("hopper")
    command = [sys.executable, str(SELECT), "--select", "minimal", "--architectures", "90a"]
    command += ["--csrc", str(ROOT / "csrc"), "--output", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    rows = re.findall(
        r'^\{"(\w+)", \{([\d, ]*)\}, 0\},$', (folder / "left_out.inc").read_text(), re.MULTILINE
    )
    left = {(variant, *map(int, params.split(","))) for variant, params in rows}
    assert {("mma", 64, 4), ("half_mma", 64, 8), ("flash", 64), ("wgmma", 16, 8)} <= left
    return left


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.family + ":" + case.id)
def test_no_default_on_hopper_is_left_out(case: Case, left_out_on_hopper: set[tuple[Any, ...]]) -> None:
    paths: list[dict[str, str]] = [{}]
    if case.family in ("matmul", "matmul_id", "up_gate", "moe_up_gate"):
        paths += [
            {"path": p, "compute": c} for p in ("matvec", "mmq", "dequantize") for c in ("f16", "bf16", "f32")
        ]
    for m in (case.desc["m"], 1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 200, 512, 4096):
        for path in paths:
            desc = {**case.desc, "m": m, **path}
            if _core.ops.candidates(case.family, desc, HOPPER, "legal"):
                chosen = _core.ops.default_config(case.family, desc, HOPPER)
                assert tuple(chosen.values()) not in left_out_on_hopper, desc


# ---- weight types ----


def built_types(folder: Path) -> tuple[set[str], set[tuple[str, str]], str]:
    """Types with kernels, pairs that share a launch, and the profile that left out others."""
    text = (folder / "built_types.inc").read_text()
    types = re.findall(r"^DYNO_BUILT_(?:FLOAT|QUANT|GPU)\((\w+)\)", text, re.MULTILINE)
    pairs = re.findall(r"^DYNO_BUILT_MIXED\((\w+), (\w+)\)", text, re.MULTILINE)
    (profile,) = re.findall(r'^DYNO_BUILT_FOR\("(.*)"\)', text, re.MULTILINE)
    return set(types), set(pairs), profile


@pytest.mark.parametrize(
    ("types", "kept"),
    [
        ({"Q8_0": 0.9, "F16": 0.1}, {"q8_0", "f16"}),
        ({"IQ4_KS": 0.6, "IQ5_K": 0.2, "Q6_0": 0.2}, {"q4_16", "q8_16", "q8_0"}),
        ({"Q4_0_R8": 0.5, "IQ2_XXS_R4": 0.5}, {"q4_0", "q4_16"}),
        ({"IQ6_K": 0.5, "NVFP4": 0.5}, {"f16"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_types_that_a_gpu_reads_as_others(tmp_path: Path, types: dict[str, float], kept: set[str]) -> None:
    done = select(tmp_path, write_profile(tmp_path, {}, types=types))
    assert done.returncode == 0, done.stderr
    assert built_types(tmp_path / "ops")[0] == {"f32", *kept}


def test_every_type_of_files_is_read_as_the_engine_reads_it() -> None:
    """So a new type cannot be forgotten."""
    spec = importlib.util.spec_from_file_location("cuda_instances", SELECT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # its dataclasses look their module up
    spec.loader.exec_module(script)
    types = script.read_types(ROOT / "csrc")
    known = {t["name"]: t for t in _core.tensor_types()}
    seen = set()
    for name, known_type in known.items():
        kernels = known_type["kernels"]
        if kernels == "no kernels":
            assert types.on_gpu(name) is None
            continue
        if known_type["plain"] in known:
            kernels = known[known_type["plain"]]["kernels"]
        named = re.search(r"on a GPU as (\w+)$", kernels)
        if named or known_type["plain"] in known:
            assert types.on_gpu(name) == (named[1] if named else known_type["plain"]), name
        else:  # a row of an interleaved form, which no file holds
            assert types.on_gpu(name) in types.kernels, name
        seen.add(types.on_gpu(name))
    assert {"f16", "f32", "q4_0", "q4_16", "q6_k", "q8_0", "q8_16"} <= seen


def test_kernels_that_are_named_keep_their_type(tmp_path: Path) -> None:
    named = {"matmul q5_k n=1 k=256": {"m1": {"variant": "stream", "warps": 4, "stripes": 1}}}
    done = select(tmp_path, write_profile(tmp_path, named, types={"Q4_K": 1.0}))
    assert done.returncode == 0, done.stderr
    assert built_types(tmp_path / "ops")[:2] == ({"f32", "q4_k", "q5_k"}, {("q4_k", "q5_k")})


@pytest.mark.parametrize(
    ("name", "written"),
    [("modèle 🚀.yaml", "modèle 🚀.yaml"), ('a"b.yaml', r"a\"b.yaml"), ("b\udcff.yaml", "b?.yaml")],
)
def test_every_name_of_a_profile_compiles(tmp_path: Path, compiler: str, name: str, written: str) -> None:
    profile = Path(write_profile(tmp_path, {}, types={"Q4_K": 1.0})).rename(tmp_path / name)
    done = select(tmp_path, str(profile))
    assert done.returncode == 0, done.stderr
    assert built_types(tmp_path / "ops")[2] == written
    source = tmp_path / "name.cpp"
    source.write_text(
        '#define DYNO_BUILT_FOR(profile) const char* name = profile;\n#include "ops/built_types.inc"\n'
    )
    words = [compiler, "-fsyntax-only", f"-I{tmp_path}", str(source)]
    compiled = subprocess.run(words, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr


def test_a_model_with_an_unknown_type(tmp_path: Path) -> None:
    done = select(tmp_path, write_profile(tmp_path, {}, types={"Q4_KK": 1.0}))
    assert done.returncode == 1
    assert "match.model.types: no weight type Q4_KK; nearest: Q4_K" in done.stderr


SAYS = """\
matmul q4_k held
matmul f32 held
matmul q5_k left out
matmul q5_k on a cpu held
qkv q4_k q4_k q6_k held
qkv q4_k q5_k q6_k left out
qkv q4_k q4_k q8_0 left out
qkv q4_k q4_k without a third held
mla_expand q6_k q8_0 left out
mla_expand q8_0 q6_k left out
mla_expand q6_k f32 held
kv_store of a q8_0 cache held
attention of a q8_0 cache held
norm held
type q6_k built
type q8_0 this build has no GPU kernels for weights of type q8_0: GGML_CUDA_PROFILE=profile.yaml left all \
but f32, q4_k, q6_k out. Build without GGML_CUDA_PROFILE, or with a profile of this model
type q8_0 for a chip without code built
type q8_0 on a cpu built
direct with heads of 128 held
direct with heads of 64 left out
rows with heads of 64 held
rows with heads of 512 left out
routing left out
heads of 128 built
heads of 64 this build has no GPU kernels for heads of up to 64: GGML_CUDA_PROFILE=profile.yaml left such \
groups out, and kept heads of 65 to 128, latent attention, linear attention, short convolutions. \
Build without GGML_CUDA_PROFILE, or with a profile of this model
heads of 64 with exact numerics built
experts of a chip without code built
experts on a cpu built
experts this build has no GPU kernels for mixtures of experts: GGML_CUDA_PROFILE=profile.yaml left such \
groups out, and kept heads of 65 to 128, latent attention, linear attention, short convolutions. \
Build without GGML_CUDA_PROFILE, or with a profile of this model
a launch: [ops] this build has no GPU kernels for heads of up to 64
"""

# A model with latents and without experts.
GROUPED = {"architecture": "kimi-linear", "experts": 0}
SIZES = {
    "default": [
        "m1 attention heads=4 kv_heads=1 dk=576 dv=512 k=f16 v=f16 v_in_k",
        "m64 attention heads=4 kv_heads=4 dk=128 dv=128 k=f16 v=f16",
    ]
}


def test_the_contract_knows_the_types_and_groups_of_the_build(tmp_path: Path, compiler: str) -> None:
    profile = write_profile(tmp_path, SIZES, types={"Q4_K": 0.8, "Q6_K": 0.2}, model=GROUPED)
    done = select(tmp_path, profile)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("no kernels for heads_64, heads_192, heads_256, heads_512, experts\n")
    core = (
        "allowed_cpus",
        "control_groups",
        "cpu_caches",
        "cpu_info",
        "cpu_limits",
        "dtype",
        "numa_topology",
        "text",
    )
    sources = [
        ROOT / "tests/build/built_types.cpp",
        *(ROOT / f"csrc/ops/{n}.cpp" for n in ("contract", "op")),
    ]
    sources += [ROOT / f"csrc/core/{name}.cpp" for name in core]
    program = tmp_path / "built_types"
    macros = ["-DDYNO_HAVE_CUDA=1", "-DDYNO_HAVE_ISA_portable=1", '-DDYNO_CUDA_ARCHITECTURES="90a"']
    includes = [f"-I{ROOT / 'csrc'}", f"-I{tmp_path}"]
    command = [compiler, "-std=c++20", "-pthread", *macros, *includes, *one_unit(tmp_path, sources)]
    built = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout == SAYS
