"""Every quantised type against blocks and values that the reference implementations wrote.

The excerpt in `tests/data` has one block of 256 values in a few rows of each type. With `--models DIR`, the
whole set in `DIR/../types` is compared as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import _core
from dyno.errors import GgufError, UnsupportedError
from dyno.testing import TensorSpec, build_gguf, tiny_model

if TYPE_CHECKING:
    from pathlib import Path

TYPES: dict[str, dict[str, Any]] = {t["name"]: t for t in _core.tensor_types()}
# Values of the reference carry a factor that its products apply to the scale: one more rounding.
SCALED_LATER = {"iq2_kt", "iq3_kt"}
# Made by run-time repacking of ik_llama.cpp alone; files with them are refused.
REFUSED = {"q8_k_r8": 399, "q8_k_r16": 397, "q8_kv_r8": 398}


@pytest.fixture(scope="module")
def excerpt(request: pytest.FixtureRequest) -> dict[str, np.ndarray]:
    with np.load(request.config.rootpath / "tests" / "data" / "weight_types.npz") as data:
        return dict(data)


def dequantized(path: Path, name: str, raw: np.ndarray, k: int) -> np.ndarray:
    tensor = TensorSpec("w", (raw.shape[0], k), TYPES[name]["id"], raw.tobytes())
    path.write_bytes(build_gguf({}, [tensor]).data)
    values: np.ndarray = _core.Gguf(path).dequantize("w")
    return values


def compare(name: str, got: np.ndarray, wanted: np.ndarray) -> None:
    if name in SCALED_LATER:
        np.testing.assert_allclose(got, wanted, rtol=3e-7, atol=0)
    else:
        np.testing.assert_array_equal(got, wanted)


def names_of(folder_or_list: Any) -> list[str]:
    return sorted({key.split("/")[0] for key in folder_or_list})


def test_the_excerpt_has_every_type_that_the_engine_decodes(excerpt: dict[str, np.ndarray]) -> None:
    decoded = {
        name
        for name, t in TYPES.items()
        if t["kernels"] != "no kernels" and "repacked" not in t["kernels"] and t["block"] > 1
    }
    assert decoded == set(names_of(excerpt))


@pytest.mark.parametrize("name", sorted(n for n, t in TYPES.items() if t["block"] > 1))
def test_blocks_of_the_reference(tmp_path: Path, excerpt: dict[str, np.ndarray], name: str) -> None:
    if f"{name}/raw" not in excerpt:
        pytest.skip("compared with the gguf package in test_dequantize.py")
    raw, wanted = excerpt[f"{name}/raw"], excerpt[f"{name}/values"]
    assert raw.shape[1] * len(raw) == len(raw) * (
        TYPES[name]["row_meta_bytes"] + wanted.shape[1] // TYPES[name]["block"] * TYPES[name]["block_bytes"]
    )
    compare(name, dequantized(tmp_path / "x.gguf", name, raw, wanted.shape[1]), wanted)


def test_the_whole_set(tmp_path: Path, models_dir: Path) -> None:
    folder = models_dir.parent / "types"
    files = sorted(path for path in folder.glob("*.npz") if not path.stem.startswith("_"))
    if not files:
        pytest.skip(f"{folder} has no blocks")
    for file in files:
        name = file.stem.lower()
        if name in REFUSED:
            continue
        with np.load(file) as data:
            t = TYPES[name]
            assert (t["id"], t["block"], t["block_bytes"], t["row_meta_bytes"], t["rows"]) == tuple(
                int(data[key])
                for key in ("type_id", "block_size", "block_bytes", "row_meta_bytes", "rows_interleaved")
            )
            compare(
                name,
                dequantized(tmp_path / "x.gguf", name, data["raw"], data["values"].shape[1]),
                data["values"],
            )


def test_bits_per_weight_and_kernels_are_named_before_anything_is_loaded(
    tmp_path: Path, excerpt: dict[str, np.ndarray]
) -> None:
    tensors = [
        TensorSpec(
            f"{name}.weight",
            (len(excerpt[f"{name}/raw"]), 256),
            TYPES[name]["id"],
            excerpt[f"{name}/raw"].tobytes(),
        )
        for name in ("iq3_s", "iq4_ks", "iq4_k_r4", "iq6_k")
    ]
    (tmp_path / "x.gguf").write_bytes(build_gguf({}, tensors).data)
    file = _core.Gguf(tmp_path / "x.gguf")
    found = {t["dtype"]: (t["bits_per_weight"], t["kernels"]) for t in file.tensors()}
    assert found == {
        "iq3_s": (3.4375, "kernels for CPU and GPU, re-coded at load, on a GPU as q6_k"),
        "iq4_ks": (4.375, "kernels for the CPU, re-coded at load"),
        "iq4_k_r4": (4.5, "kernels for the CPU, taken apart at load"),
        "iq6_k": (6.625, "CPU, multiplied in float32"),
    }
    for dtype, (_, kernels) in found.items():
        assert any(dtype in line and kernels in line for line in file.describe().splitlines())
    assert "3.438 bits" in file.describe()


def test_rows_of_an_interleaved_tensor_come_in_whole_units(
    tmp_path: Path, excerpt: dict[str, np.ndarray]
) -> None:
    raw = excerpt["iq4_k_r4/raw"][:3]
    with pytest.raises(GgufError, match=r"'w' of type iq4_k_r4 has 3 rows, which is not a multiple of the 4"):
        dequantized(tmp_path / "x.gguf", "iq4_k_r4", raw, 256)


@pytest.mark.parametrize("number", [*REFUSED.values(), 500, 501])
def test_types_that_no_file_may_have(tmp_path: Path, number: int) -> None:
    bad = build_gguf({}, [TensorSpec("w", (16, 256), number, bytes(16 * 258))])
    (tmp_path / "x.gguf").write_bytes(bad.data)
    with pytest.raises(GgufError, match=rf"tensor 'w' has type {number}\b"):
        _core.Gguf(tmp_path / "x.gguf")


GPU = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}
# Types that a GPU reads as another one, whose codes hold all of their integers.
RECODED = {
    "q1_0": "q4_0", "q2_0": "q4_0", "tq1_0": "q4_0", "tq2_0": "q4_0", "iq1_bn": "q4_0",
    "q6_0": "q8_0", "q6_0_r4": "q8_0", "iq3_s": "q6_k", "iq3_s_r4": "q6_k", "iq2_k": "q6_k",
    "iq2_k_r4": "q6_k", "iq2_ks": "q6_k",
}  # fmt: skip


def test_which_types_a_gpu_reads_as_another_one(tmp_path: Path, excerpt: dict[str, np.ndarray]) -> None:
    found = {}
    for name in names_of(excerpt):
        raw = excerpt[f"{name}/raw"]
        rows = raw.shape[0] // TYPES[name]["rows"] * TYPES[name]["rows"]
        tensor = TensorSpec("w", (rows, 256), TYPES[name]["id"], raw[:rows].tobytes())
        (tmp_path / "x.gguf").write_bytes(build_gguf({}, [tensor]).data)
        file = _core.Gguf(tmp_path / "x.gguf")
        if name in RECODED:
            found[name] = file.recode("w")[0]
            continue
        with pytest.raises(UnsupportedError, match=f"type {name}, which a GPU does not read as another type"):
            file.recode("w")
    assert found == RECODED


@pytest.mark.parametrize("name", sorted(RECODED))
@pytest.mark.parametrize("source", ["reference", "random"])
def test_the_type_of_a_gpu_holds_the_same_values(
    tmp_path: Path, excerpt: dict[str, np.ndarray], name: str, source: str
) -> None:
    raw = excerpt[f"{name}/raw"]
    if source == "random":  # every bit pattern of codes and scales, also those that no quantiser writes
        rng = np.random.default_rng(7)
        raw = rng.integers(0, 256, (64, raw.shape[1]), dtype=np.uint8)
    values = dequantized(tmp_path / "x.gguf", name, raw, 256)
    other, rows = _core.Gguf(tmp_path / "x.gguf").recode("w")
    assert other == RECODED[name]
    got = dequantized(tmp_path / "y.gguf", other, np.frombuffer(rows, np.uint8).reshape(len(raw), -1), 256)
    np.testing.assert_array_equal(got, values)
    assert np.isfinite(values).any()
    assert len(np.unique(values)) > 2


def gpu_tensors(path: Path, **options: Any) -> dict[str, tuple[str, str, str]]:
    session = _core.Session(path, plan_only=True, device=GPU, **options)
    return {t["name"]: (t["device"], t["dtype"], t["layout"]) for t in session.plan["tensors"]}


def test_a_gpu_plan_recodes_the_weights_that_lie_there(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m.gguf", "qwen3", n_embd=256, n_ff=256, dtype="iq3_s")
    tensors = gpu_tensors(path)
    assert tensors["token_embd.weight"][1:] == ("q6_k", "plain")
    assert tensors["blk.0.ffn_up.weight"][1:] == ("q6_k", "gpu")
    plan = _core.Session(path, plan_only=True, device=GPU).describe_plan()
    assert " weights iq3_s as q6_k gpu, owned copy" in plan


def test_a_weight_on_the_cpu_beside_a_gpu_keeps_its_type(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m.gguf", "qwen3", n_embd=256, n_ff=256, dtype="iq3_s")
    beside = {"beside_gpu": [_core.cpu_info()], "rules": [r"blk\.0\.ffn_gate=cpu"]}
    tensors = gpu_tensors(path, placement=beside)
    assert tensors["blk.0.ffn_gate.weight"][:2] == ("cpu", "iq3_s")
    assert tensors["blk.0.ffn_up.weight"][1:] == ("q6_k", "gpu")


def test_a_gpu_plan_names_the_tensor_and_its_type(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m.gguf", "qwen3", n_embd=256, n_ff=256, dtype="iq3_xxs")
    with pytest.raises(
        UnsupportedError, match=r"tensor token_embd\.weight is iq3_xxs, a type without kernels for a GPU"
    ):
        _core.Session(path, plan_only=True, device=GPU)
