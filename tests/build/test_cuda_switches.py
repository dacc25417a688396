"""Every CUDA switch shows what it changed, in the commands that a build would run.

Needs a toolkit and no GPU. Switches that do not meet are set together, because configuring takes seconds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    Configure = Callable[..., Any]

ROOT = Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc", path=os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin")))
QUICK = "--Ofast-compile=max"
EXACT, CHIP, FAST = "norm_rows.cu", "gemm_wgmma_q4_0.cu", "gemm_mma_q4_0.cu"


@pytest.fixture
def cuda(configure: Configure) -> Configure:
    """configure(), for 90a and with the toolkit of this machine."""
    if NVCC is None:
        assert "DYNO_CUDA_BUILD" not in os.environ, "a CUDA build was made, but its toolkit is not found"
        pytest.skip("no CUDA toolkit: nvcc is neither on the PATH nor in /usr/local/cuda")

    def run(**switches: str) -> Any:
        given = {"DYNO_NVCC": NVCC, "GGML_CUDA": "ON", "CMAKE_CUDA_ARCHITECTURES": "90a", **switches}
        return configure(**given)

    return run


def works(built: Any) -> Any:
    assert built.ok, built.output
    return built


def units(built: Any) -> list[list[str]]:
    """Commands of the CUDA sources."""
    return [command for name, command in built.commands.items() if name.endswith(".cu.o")]


def sources(built: Any) -> list[Path]:
    return [Path(command[command.index("-c") + 1]) for command in units(built)]


def macros(built: Any) -> set[str]:
    """What CUDA sources and host sources of one library see."""
    both = [*units(built), *(c for n, c in built.commands.items() if "dyno_host.dir" in n)]
    found = [{word for word in command if word.startswith("-DDYNO_CUDA")} for command in both]
    assert all(words == found[0] for words in found), "host and device code see different macros"
    return found[0]


def test_defaults(cuda: Configure) -> None:
    built = works(cuda())
    assert len(units(built)) > 40
    for command in units(built):
        assert "--compress-mode=size" in command
        assert any("sm_90a" in word for word in command)
        assert not {"-use_fast_math", "-rdc=true", "--Werror=all-warnings", QUICK} & set(command)
    assert "-DDYNO_CUDA_GRAPHS=1" in macros(built)
    assert not macros(built) & {"-DDYNO_CUDA_F16=1", "-DDYNO_CUDA_FORCE_BF16=1"}
    assert "-dlink" not in built.link_commands()


TOGETHER = {
    "GGML_CUDA_USE_GRAPHS": "OFF",
    "GGML_CUDA_F16": "ON",
    "GGML_CUDA_FORCE_BF16": "ON",
    "GGML_CUDA_FAST_MATH": "ON",
    "GGML_CUDA_COMPRESSION_MODE": "balance",
    "GGML_CUDA_INSTANCES": "minimal",
    "CMAKE_CUDA_ARCHITECTURES": "80;86-virtual;89-real;90a",
    "DYNO_WERROR": "ON",
}


@pytest.fixture
def together(cuda: Configure) -> Any:
    pytest.importorskip("nanobind", reason="configuring the module needs nanobind (in the test extra)")
    return works(cuda(**TOGETHER, DYNO_BUILD_PYTHON="ON", Python_EXECUTABLE=sys.executable))


def test_switches_that_are_macros(cuda: Configure, together: Any) -> None:
    assert "-DDYNO_CUDA_GRAPHS=1" not in macros(together)
    assert {"-DDYNO_CUDA_F16=1", "-DDYNO_CUDA_FORCE_BF16=1"} <= macros(together)
    assert "-DDYNO_CUDA_FORCE_BF16=1" in macros(works(cuda(GGML_CUDA_IQK_FORCE_BF16="ON")))
    sources = [
        p.read_text() for p in (ROOT / "csrc").rglob("*.*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"}
    ]
    for macro in ("DYNO_CUDA_GRAPHS", "DYNO_CUDA_F16", "DYNO_CUDA_FORCE_BF16"):
        assert any(re.search(rf"\b{macro}\b", text) for text in sources), f"nothing reads {macro}"


def test_architectures(together: Any) -> None:
    for command in units(together):
        codes = re.findall(r"arch=(compute_\w+),code=\[?([\w,]+)\]?", " ".join(command))
        assert {arch for arch, _ in codes} == {"compute_80", "compute_86", "compute_89", "compute_90a"}
        made = {code for _, several in codes for code in several.split(",")}
        assert made == {"sm_80", "compute_80", "compute_86", "sm_89", "sm_90a"}
    assert any("80,86-virtual,89-real,90a" in word for word in macros(together))


def test_a_build_that_sees_no_gpu_prints_which_code_chips_run_and_the_cost_of_more(cuda: Configure) -> None:
    blind = works(cuda(CMAKE_CUDA_ARCHITECTURES="native", DYNO_NVIDIA_SMI="/no/such/program"))
    assert "75,90a" in " ".join(macros(blind))
    assert "intermediate code for 75 on all chips but Hopper" in blind.output
    assert re.search(r"CMAKE_CUDA_ARCHITECTURES with .* core-seconds and .* MB", blind.output)
    chosen = works(cuda())
    assert "intermediate code for" not in chosen.output


def test_fast_math_spares_what_serves_exact_numerics(together: Any) -> None:
    for name in (EXACT, "type_kernels_q4_0.cu", "attention_rows.cu"):
        assert all("-use_fast_math" not in command for command in together.of(name))
    for name in (FAST, CHIP, "flash_head_128.cu"):
        assert all("-use_fast_math" in command for command in together.of(name))


def test_compression_and_warnings(together: Any) -> None:
    for command in units(together):
        assert "--compress-mode=balance" in command
        assert {"--Werror=all-warnings", "-Xcompiler=-Werror"} <= set(command)


def test_a_path_that_is_forced(cuda: Configure) -> None:
    mmq = works(cuda(GGML_CUDA_FORCE_MMQ="ON"))
    assert "-DDYNO_CUDA_FORCE_MMQ=1" in macros(mmq)
    # Nothing that is compiled needs cuBLAS, which such a module is not linked with.
    sources = [
        word for command in mmq.commands.values() for word in command if word.endswith((".cpp", ".cu"))
    ]
    assert len(sources) > 100
    assert not [s for s in sources if Path(s).name == "gemm_unpacked.cu" or "<cublas" in Path(s).read_text()]
    blas = works(cuda(GGML_CUDA_FORCE_CUBLAS="ON"))
    assert "-DDYNO_CUDA_FORCE_CUBLAS=1" in macros(blas)
    assert blas.of("gemm_unpacked.cu")


def test_a_quick_check_spares_no_optimisation_of_the_instructions_of_one_chip(cuda: Configure) -> None:
    built = cuda(DYNO_CUDA_QUICK="ON", CMAKE_CUDA_ARCHITECTURES="75;90a")
    if "has no --Ofast-compile" in built.output:
        assert not built.ok
        pytest.skip("this nvcc has no --Ofast-compile")
    for name in (EXACT, "quick_gemm_instances_0.cu", "quick_flash_head_0.cu"):
        assert all(QUICK in command for command in works(built).of(name))
    for name in ("quick_gemm_instances_chip_0.cu", "quick_flash_wgmma_head_chip_0.cu"):
        assert all(QUICK not in command for command in built.of(name))


def test_a_quick_check_optimises_no_kernel_of_a_cpu(cuda: Configure) -> None:
    built = cuda(DYNO_CUDA_QUICK="ON")
    if "has no --Ofast-compile" in built.output:
        pytest.skip("this nvcc has no --Ofast-compile")
    for build, levels in ((works(built), {"-O0"}), (works(cuda()), {"-O3"})):
        for command in build.of("dyno_kernels_"):
            assert {[word for word in command if re.fullmatch(r"-O\w", word)][-1]} == levels
            assert not [word for word in command if "CUDA" in word and word.startswith("-D")]


def test_a_quick_check_compiles_every_instance_once(cuda: Configure) -> None:
    """Its units include the very sources that another build compiles one by one."""
    built = cuda(DYNO_CUDA_QUICK="ON")
    if "has no --Ofast-compile" in built.output:
        pytest.skip("this nvcc has no --Ofast-compile")
    alone = Counter(source.name for source in sources(works(cuda())))
    found: Counter[str] = Counter()
    for unit in sources(works(built)):
        lines = unit.read_text().splitlines()
        grouped = [Path(line.split('"')[1]) for line in lines] if unit.name.startswith("quick_") else [unit]
        assert all(source.is_file() for source in grouped)
        found.update(source.name for source in grouped)
    assert found == alone
    assert len(units(built)) < len(units(cuda())) / 2


LTO = {"GGML_CUDA_LTO": "ON", "DYNO_LIBNVVM": "/any/libnvvm.so"}  # configuring does not open the library


def test_link_time_optimisation(cuda: Configure) -> None:
    built = works(cuda(**LTO, CMAKE_CUDA_ARCHITECTURES="80;90a"))
    for name in (FAST, "type_kernels_q4_0.cu", "flash_head_128.cu"):
        for command in built.of(name):
            assert {"-gencode=arch=compute_80,code=lto_80", "-gencode=arch=compute_90a,code=lto_90a"} <= set(
                command
            )
            assert "-rdc=true" in command
    # nvlink forgets that 90a is no 90, and drops kernels of internal linkage, so these are whole programs.
    for name in (EXACT, CHIP):
        for command in built.of(name):
            assert "-rdc=true" not in command
            assert any("sm_90a" in word for word in command)
    (link,) = {line for line in built.link_commands().splitlines() if " -dlink " in line}
    for part in ("-dlto", "--split-compile-extended=0", "code=sm_80", "code=sm_90a", "--step device_link"):
        assert part in link
    assert FAST in link
    assert CHIP not in link
    # No intermediate code remains, so the module must not claim later chips of the generation.
    assert any("80-real,90a-real" in word for word in macros(built))


def test_link_time_optimisation_of_one_arithmetic(cuda: Configure) -> None:
    """nvlink refuses units that treat subnormal numbers differently."""
    built = works(cuda(**LTO, GGML_CUDA_FAST_MATH="ON"))
    optimised = [c for c in units(built) if any("code=lto_90a" in word for word in c)]
    assert optimised
    assert all("-use_fast_math" in command for command in optimised)


def test_a_device_link_that_would_lose_kernels_is_refused(tmp_path: Path) -> None:
    lost, kept = tmp_path / "lost.o", tmp_path / "kept.o"
    lost.write_bytes(b"..__nv_static_25__dfa63896_4_p_cu_43c30941__Z5probev\0..")
    kept.write_bytes(b".._Z5probev..")
    output, report = tmp_path / "linked", tmp_path / "report.json"

    def link(*objects: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "csrc" / "cmake" / "link_report.py"), "--step", "device_link"]
        linker = [sys.executable, "-c", "import sys; open(sys.argv[1], 'w').write('linked')", str(output)]
        return subprocess.run(
            [*command, "--output", str(output), "--report", str(report), "--", *linker, *map(str, objects)],
            capture_output=True,
            text=True,
            check=False,
        )

    refused = link(kept, lost)
    assert refused.returncode == 1
    assert "lost.o" in refused.stderr
    assert not output.exists()
    assert link(kept).returncode == 0
    cost = json.loads(report.read_text())["device_link"]
    assert cost["bytes"] == 6
    assert cost["peak_process_mib"] > 0


# ---- kernel instances ----


def left_out(built: Any) -> str:
    text: str = (built.folder / "generated" / "ops" / "left_out.inc").read_text()
    return "\n".join(line for line in text.splitlines() if not line.startswith("//"))


def test_all_instances(cuda: Configure) -> None:
    built = works(cuda(CMAKE_CUDA_ARCHITECTURES="75;90a"))
    assert left_out(built) == ""
    assert re.search(r"0 of [1-9]\d* optional kernel instances left out", built.output)
    for name in ("gemm_mma_q4_0.cu", "gemm_mma_f16.cu", "flash_head_128.cu"):
        assert built.of(name)


def older_units(built: Any) -> set[str]:
    return {path.stem for path in sources(built) if re.match(r"gemm_mma_|flash_head_", path.name)}


def test_a_build_for_hopper_alone_has_few_kernels_of_older_chips(cuda: Configure) -> None:
    built = works(cuda())
    assert older_units(built) == {"gemm_mma_f16", "gemm_mma_bf16"}
    newer = {path.stem for path in sources(built)}
    assert {"gemm_wgmma_f16", "gemm_wide_q4_0", "flash_wgmma_head_256", "flash_pairs_head_64"} <= newer
    assert '{"mma", {64, 8}, type_bit(DType::bf16) | type_bit(DType::f16)},' in left_out(built)
    assert '"half_mma"' not in left_out(built)
    least = works(cuda(GGML_CUDA_INSTANCES="minimal"))
    assert older_units(least) == set()
    assert '{"half_mma", {64, 8}, 0},' in left_out(least)


def test_a_build_for_hopper_alone_keeps_what_a_profile_names(cuda: Configure, tmp_path: Path) -> None:
    kernels = {
        "matmul q4_k n=4096 k=4096 layout=gpu": {"m65-128": {"variant": "mma", "tokens": 64, "warps": 4}},
        "attention heads=32 kv_heads=8 dk=128 dv=128 k=f16 v=f16": {
            "m65-128": {"variant": "flash", "rows": 64}
        },
    }
    path = tmp_path / "profile.yaml"
    path.write_text(json.dumps({"schema": 1, "match": {"device": {"kind": "cuda"}}, "kernels": kernels}))
    built = works(cuda(GGML_CUDA_PROFILE=str(path)))
    assert older_units(built) == {"gemm_mma_q4_k", *(f"flash_head_{size}" for size in (64, 128, 192, 256))}


def test_minimal_instances(together: Any) -> None:
    optional = {
        (m[1], *m[2].replace(" ", "").split(","))
        for path in (ROOT / "csrc" / "ops").glob("*/variants.def")
        for m in re.finditer(r"^DYNO_OPTIONAL\((\w+), (.*)\)", path.read_text(), re.MULTILINE)
    }
    rows = re.findall(r'\{"(\w+)", \{([\d, ]*)\}, 0\},', left_out(together))
    assert {(name, *values.replace(" ", "").split(",")) for name, values in rows} == optional
    assert optional


KERNELS = {
    "matmul q4_k n=4096 k=4096 layout=gpu": {
        "m65-128": {"variant": "wgmma", "tokens": 32, "warps": 8, "ratio": 1.06, "ci95": [1.04, 1.08]},
        "m1": "default",
    },
    "moe_up_gate mxfp4 n=2880 k=2880 experts=32 used=4 activation=silu layout=gpu": {
        "m513-1024": {"variant": "wgmma", "tokens": 32, "warps": 8},
    },
    "norm n=4096": "default",
    "default": ["m1 moe_route experts=64 used=6 gating=softmax"],
    "attention heads=32 kv_heads=8 dk=128 dv=128 k=f16 v=f16": {
        "m1": {"variant": "direct", "rows": 8, "splits": 8}
    },
    "sample n_vocab=151936": {"m1": {"variant": "blocks", "blocks": 64}},
}


def write_profile(folder: Path) -> str:
    path = folder / "profile.yaml"
    path.write_text(json.dumps({"schema": 1, "match": {"device": {"kind": "cuda"}}, "kernels": KERNELS}))
    return str(path)


def test_a_profile_keeps_what_it_names(cuda: Configure, tmp_path: Path) -> None:
    built = works(cuda(GGML_CUDA_PROFILE=write_profile(tmp_path)))
    text = left_out(built)
    assert '{"wgmma", {32, 8}, type_bit(DType::mxfp4) | type_bit(DType::q4_k)},' in text
    assert '{"mma", {128, 8}, 0},' in text
    # The build depends on the profile: another one configures again.
    assert str(tmp_path / "profile.yaml") in (built.folder / "build.ninja").read_text()
    # It names no model, so every type of weights stays.
    assert built_types(built) == ALL_TYPES
    assert built.of("gemm_wgmma_q4_0.cu")


def single_sources(built: Any) -> list[Path]:
    """The sources of a build, also of units that include several."""
    found: list[Path] = []
    for path in sources(built):
        included = [
            Path(name) for name in re.findall(r'^#include "(/.*\.cu)"$', path.read_text(), re.MULTILINE)
        ]
        found += included if path.name.startswith("together_") else [path]
    return found


@pytest.mark.parametrize(
    "switches", [{"CMAKE_UNITY_BUILD": "ON"}, {"SKBUILD_STATE": "wheel"}], ids=["unity", "wheel"]
)
def test_sources_are_compiled_together(cuda: Configure, switches: dict[str, str]) -> None:
    apart, together = works(cuda()), works(cuda(**switches))
    assert Counter(p.name for p in single_sources(together)) == Counter(p.name for p in sources(apart))
    assert len(sources(together)) < 0.5 * len(sources(apart))
    assert works(cuda(SKBUILD_STATE="editable")).commands.keys() == apart.commands.keys()


def test_sources_that_are_compiled_together_have_the_same_options(cuda: Configure) -> None:
    fast = works(cuda(GGML_CUDA_FAST_MATH="ON", CMAKE_UNITY_BUILD="ON"))
    for name in ("together_q4_0_exact.cu", "together_columns_exact.cu"):
        assert all("-use_fast_math" not in command for command in fast.of(name))
    for name in ("together_q4_0.cu", "together_q4_0_chip.cu", "together_direct_64.cu"):
        assert all("-use_fast_math" in command for command in fast.of(name))
    linked = works(cuda(**LTO, CMAKE_UNITY_BUILD="ON"))
    for command in linked.of("together_lto_q4_0.cu"):
        assert "-rdc=true" in command
    for name in ("together_q4_0_chip.cu", "together_columns.cu"):
        assert all("-rdc=true" not in command for command in linked.of(name))


# ---- weight types ----

ALL_TYPES = set(
    re.findall(
        r"^DYNO_(?:FLOAT|QUANT|GPU)_TYPE\((\w+)",
        (ROOT / "csrc" / "core" / "weight_types.def").read_text(),
        re.MULTILINE,
    )
)


def built_types(built: Any) -> set[str]:
    text = (built.folder / "generated" / "ops" / "built_types.inc").read_text()
    return set(re.findall(r"^DYNO_BUILT_(?:FLOAT|QUANT|GPU)\((\w+)\)", text, re.MULTILINE))


# Sources that a llama with heads of 128 and without experts does not need.
OTHER_GROUPS = {
    *(f"flash_wgmma_head_{size}" for size in (64, 192, 256)),
    *(f"flash_pairs_head_{size}" for size in (64, 192)),
    *(f"flash_wgmma_pairs_head_{size}" for size in (64, 192)),
    *(f"direct_head_{size}_{fused}" for size in (64, 256) for fused in ("false", "true")),
    *("direct_head_512_false", "attention_flash_wide"),
    *("attention_latent", "attention_latent_cluster", "select_blocks"),
    *("expand_pairs", "expand_products", "expand_weights", "expand_wgmma"),
    *("moe_route_warps", "moe_split_ids", "moe_sum_columns", "norm_route", "norm_route_cluster"),
    *("gemm_unpacked", "tokens", "chunks", "conv_threads"),
}


def test_a_profile_keeps_what_its_model_needs(cuda: Configure) -> None:
    shipped = ROOT / "profiles" / "h200-llama-8b-q4_k.yaml"
    built = works(cuda(GGML_CUDA_PROFILE=str(shipped)))
    kept = {"f32", "q4_k", "q6_k"}
    assert built_types(built) == kept
    assert "kernels for weights of type f32, q4_k, q6_k alone" in built.output
    names = {Path(name).name for name in built.commands}
    of_types = {m[1] for name in names if (m := re.search(r"^type_kernels_(\w+)\.cu\.o$", name))}
    assert of_types == kept
    tensor_cores = {
        name for name in names if re.match(r"(gemm|ring)_(mma_|wgmma_|split_|wide_)?\w+\.cu", name)
    }
    for gone in ALL_TYPES - kept:
        left = {name for name in tensor_cores if name.endswith(f"_{gone}.cu.o")}
        assert left == set()
    whole = works(cuda())
    assert len(units(built)) < 0.5 * len(units(whole))
    assert built_types(whole) == ALL_TYPES
    # Of the units without weights, the ones for other heads and other kinds of layers are left out.
    assert "no kernels for heads_64, heads_192, heads_256, heads_512, latent, experts" in built.output
    gone = {path.stem for path in sources(whole)} - {path.stem for path in sources(built)}
    of_types = re.compile(rf"_({'|'.join(ALL_TYPES)})$")
    assert {name for name in gone if not of_types.search(name)} == OTHER_GROUPS
    assert {name for name in gone if name.endswith(("_q4_k", "_q6_k"))} == {
        "walk_q4_k",
        "walk_q6_k",
    }


def test_no_build_has_intermediate_code_that_no_chip_runs(cuda: Configure) -> None:
    for architectures in ("90a", "80;90a"):
        built = works(cuda(CMAKE_CUDA_ARCHITECTURES=architectures))
        for command in units(built):
            text = " ".join(command)
            assert "sm_90a" in text
            assert "code=[compute_90a" not in text
            assert ("compute_80,sm_80" in text) == ("80" in architectures.split(";"))  # newer chips run this
        assert f"architectures {architectures}" in built.output  # the module still names the chip


def test_a_wrong_profile_stops_the_configure_step(cuda: Configure, tmp_path: Path) -> None:
    built = cuda(GGML_CUDA_PROFILE=str(tmp_path / "missing.yaml"))
    assert not built.ok
    assert "missing.yaml cannot be read" in built.output


# ---- records ----


def test_the_module_records_every_switch(together: Any) -> None:
    header = (together.folder / "csrc" / "bindings" / "build_info.h").read_text()
    defaults = {"GGML_CUDA": "ON", "GGML_CUDA_LTO": "OFF", "GGML_CUDA_PROFILE": ""}
    for name, value in {**defaults, **TOGETHER}.items():
        assert f'{{"{name}", "{value}"}}' in header
    for name in ("GGML_CUDA_FORCE_MMQ", "GGML_CUDA_FORCE_CUBLAS"):
        assert f'{{"{name}", "OFF"}}' in header
    assert "link_report.py --step module_link" in together.link_commands()
    # An installed module still finds cuBLAS, wherever the toolkit lies.
    installed = (together.folder / "csrc" / "bindings" / "cmake_install.cmake").read_text()
    assert re.search(r'RPATH "[^"]*/lib', installed)


def test_every_cuda_switch_is_tried_and_described() -> None:
    text = (ROOT / "csrc" / "cmake" / "Cuda.cmake").read_text()
    (listed,) = re.findall(r"set\(_cuda_switches ([^)]*)\)", text)
    tried = Path(__file__).read_text()
    page = (ROOT / "docs" / "user" / "cuda-build.md").read_text()
    for switch in [*listed.split(), "GGML_CUDA", "CMAKE_CUDA_ARCHITECTURES"]:
        assert f'"{switch}"' in tried or f"{switch}=" in tried, switch
        assert f"`{switch}`" in page, switch
