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
PERMUTED = {"bf16_r16"}  # values as they are, in another order: see tests/e2e/test_interleaved.py


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
    assert decoded - PERMUTED == set(names_of(excerpt))


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
        "iq3_s": (3.4375, "kernels for CPU and GPU, re-coded at load, on a GPU as q4_16"),
        "iq4_ks": (4.375, "kernels for CPU and GPU, re-coded at load, on a GPU as q4_16"),
        "iq4_k_r4": (4.5, "kernels for CPU and GPU, de-interleaved at load"),
        "iq6_k": (6.625, "multiplied in float32, on a GPU as f32"),
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


@pytest.mark.parametrize("number", [500, 501, 502, 503, 504, 505])
def test_types_that_no_file_may_have(tmp_path: Path, number: int) -> None:
    bad = build_gguf({}, [TensorSpec("w", (16, 256), number, bytes(16 * 258))])
    (tmp_path / "x.gguf").write_bytes(bad.data)
    with pytest.raises(GgufError, match=rf"tensor 'w' has type {number}\b"):
        _core.Gguf(tmp_path / "x.gguf")


GPU = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}
# Types that a GPU reads as another one, which holds all of their values.
RECODED = {
    "q1_0": "q4_0", "q2_0": "q4_0", "tq1_0": "q4_0", "tq2_0": "q4_0", "iq1_bn": "q4_0",
    "q6_0": "q8_0", "q8_k_row": "q8_0", "nvfp4": "f16", "iq6_k": "f32",
    "iq1_s": "q4_16", "iq1_m": "q4_16", "iq2_xxs": "q4_16", "iq2_xs": "q4_16", "iq2_s": "q4_16",
    "iq3_xxs": "q4_16", "iq3_k": "q4_16", "iq3_ks": "q4_16", "iq2_kl": "q4_16", "iq4_k": "q4_16",
    "iq4_ks": "q4_16", "iq4_kss": "q4_16", "iq3_s": "q4_16", "iq2_k": "q4_16", "iq2_ks": "q4_16",
}  # fmt: skip
BYTES = "q8_16"  # of all others


def form_of(name: str) -> str:
    return RECODED.get(TYPES[name]["plain"], BYTES)


def recoded(path: Path, raw: np.ndarray, name: str, k: int = 256) -> tuple[str, np.ndarray]:
    """The form on a GPU and its rows as plain bytes."""
    tensor = TensorSpec("w", (raw.shape[0], k), TYPES[name]["id"], raw.tobytes())
    path.write_bytes(build_gguf({}, [tensor]).data)
    other, rows = _core.Gguf(path).recode("w")
    return other, np.frombuffer(rows, np.uint8)


def in_float32(form: str, rows: np.ndarray, n: int, k: int) -> list[np.ndarray]:
    """Values of plain rows, and of the same in the layout that the kernels of a GPU read."""
    if form == "f32":
        return [rows.view(np.float32).reshape(n, k)]
    packed = _core.ops.repack(form, rows, n, k, layout="gpu")
    there = _core.ops.unpack(form, "gpu", packed, n, k)
    if form == "f16":
        return [rows.view(np.float16).astype(np.float32).reshape(n, k), there]
    return [_core.ops.unpack(form, "plain", rows, n, k), there]


def read_in_place(name: str) -> bool:
    return bool(TYPES[TYPES[name]["plain"]]["kernels"].endswith("repacked at load"))


def recoded_types() -> list[str]:
    return sorted(
        name
        for name, t in TYPES.items()
        if t["block"] > 1 and t["kernels"] != "no kernels" and t["plain"] in TYPES and not read_in_place(name)
        if name not in PERMUTED
    )


def test_a_gpu_reads_every_type_in_place_or_as_another_one(
    tmp_path: Path, excerpt: dict[str, np.ndarray]
) -> None:
    tried = 0
    for name in names_of(excerpt):
        raw = excerpt[f"{name}/raw"]
        raw = raw[: len(raw) // TYPES[name]["rows"] * TYPES[name]["rows"]]
        if TYPES[name]["plain"] in TYPES and read_in_place(name):
            with pytest.raises(UnsupportedError, match=f"type {name}, which a GPU reads unchanged"):
                recoded(tmp_path / "x.gguf", raw, name)
            continue
        form, rows = recoded(tmp_path / "x.gguf", raw, name)
        assert form == form_of(name)
        tried += 1
        if form == "q4_16":  # kernels take the sign of a value for the half of the table that it is in
            table = rows.reshape(-1, 168)[:, 20:36].view(np.int8)
            assert (table[:, :8] < 0).all()
            assert ((table[:, 8:] >= 0) & (table[:, 8:] < 127)).all()
        # The reference's own values, not only those of the engine's dequantisation.
        for found in in_float32(form, rows, len(raw), 256):
            compare(TYPES[name]["plain"], found, excerpt[f"{name}/values"][: len(raw)])
    assert tried > 40


@pytest.mark.parametrize("name", recoded_types())
@pytest.mark.parametrize("source", ["reference", "random"])
def test_the_type_of_a_gpu_holds_the_same_values(
    tmp_path: Path, excerpt: dict[str, np.ndarray], name: str, source: str
) -> None:
    raw = excerpt[f"{name}/raw"]
    if source == "random":  # every bit pattern of codes and scales, also those that no quantiser writes
        rng = np.random.default_rng(7)
        raw = rng.integers(0, 256, (64, raw.shape[1]), dtype=np.uint8)
    values = dequantized(tmp_path / "x.gguf", name, raw, 256)
    form, rows = recoded(tmp_path / "x.gguf", raw, name)
    assert form == form_of(name)
    for found in in_float32(form, rows, len(raw), 256):
        np.testing.assert_array_equal(found, values)
    assert np.isfinite(values).any()
    assert len(np.unique(values)) > 2


@pytest.mark.parametrize(("name", "k"), [("iq2_bn", 192), ("q8_kv", 64), ("q8_kv", 320), ("iq1_bn", 192)])
def test_rows_that_are_no_multiple_of_256(tmp_path: Path, name: str, k: int) -> None:
    t = TYPES[name]
    size = t["row_meta_bytes"] + k // t["block"] * t["block_bytes"]
    raw = np.random.default_rng(k).integers(0, 256, (21, size), dtype=np.uint8)
    values = dequantized(tmp_path / "x.gguf", name, raw, k)
    form, rows = recoded(tmp_path / "x.gguf", raw, name, k)
    for found in in_float32(form, rows, 21, k):
        np.testing.assert_array_equal(found, values)


def test_rows_that_do_not_fit_the_blocks_of_a_gpu(tmp_path: Path) -> None:
    raw = np.zeros((2, 8 + 96), np.uint8)
    with pytest.raises(
        UnsupportedError, match=r"rows of 96 values of q8_kv have no form for a GPU, .* of 64"
    ):
        recoded(tmp_path / "x.gguf", raw, "q8_kv", 96)


def test_the_whole_set_on_a_gpu(tmp_path: Path, models_dir: Path) -> None:
    folder = models_dir.parent / "types"
    files = sorted(path for path in folder.glob("*.npz") if not path.stem.startswith("_"))
    if not files:
        pytest.skip(f"{folder} has no blocks")
    tried = 0
    for file in files:
        name = file.stem.lower()
        if TYPES[name]["plain"] in TYPES and read_in_place(name):
            continue
        with np.load(file) as data:
            values = data["values"]
            form, rows = recoded(tmp_path / "x.gguf", data["raw"], name, values.shape[1])
            for found in in_float32(form, rows, *values.shape):
                compare(TYPES[name]["plain"], found, values)
        tried += 1
    assert tried > 40


def gpu_tensors(path: Path, **options: Any) -> dict[str, tuple[str, str, str]]:
    session = _core.Session(path, plan_only=True, device=GPU, **options)
    return {t["name"]: (t["device"], t["dtype"], t["layout"]) for t in session.plan["tensors"]}


def test_a_gpu_plan_recodes_the_weights_that_lie_there(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m.gguf", "qwen3", n_embd=256, n_ff=256, dtype="iq3_s")
    tensors = gpu_tensors(path)
    assert tensors["token_embd.weight"][1:] == ("q4_16", "plain")
    assert tensors["blk.0.ffn_up.weight"][1:] == ("q4_16", "gpu")
    plan = _core.Session(path, plan_only=True, device=GPU).describe_plan()
    assert " weights iq3_s as q4_16 gpu, owned copy" in plan


def test_a_weight_on_the_cpu_beside_a_gpu_keeps_its_type(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m.gguf", "qwen3", n_embd=256, n_ff=256, dtype="iq3_s")
    beside = {"beside_gpu": [_core.cpu_info()], "rules": [r"blk\.0\.ffn_gate=cpu"]}
    tensors = gpu_tensors(path, placement=beside)
    assert tensors["blk.0.ffn_gate.weight"][:2] == ("cpu", "iq3_s")
    assert tensors["blk.0.ffn_up.weight"][1:] == ("q4_16", "gpu")


def test_a_gpu_plan_names_the_tensor_whose_rows_do_not_fit(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m.gguf", "qwen3", n_embd=128, n_ff=96, dtypes={"ffn_down.weight": "q8_kv"})
    with pytest.raises(
        UnsupportedError,
        match=r"blk\.0\.ffn_down\.weight has rows of 96 values of q8_kv, .* q8_16 in blocks of 64",
    ):
        _core.Session(path, plan_only=True, device=GPU)
