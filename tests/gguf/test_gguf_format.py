"""Well-formed files: every value type, tensor type, version and split comes back as it was written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dyno import _core
from dyno.errors import ModelError
from dyno.testing import (
    BLOCK_GEOMETRY,
    TENSOR_TYPE_IDS,
    Array,
    TensorSpec,
    Typed,
    build_gguf,
    hand_written_gguf,
    tiny_gguf,
    tiny_gguf_split,
    tiny_model,
)

SCALARS = {
    "uint8": 255, "int8": -128, "uint16": 65535, "int16": -32768, "uint32": 2**32 - 1, "int32": -(2**31),
    "float32": 1.5, "bool": True, "uint64": 2**64 - 1, "int64": -(2**63), "float64": 1e300,
}  # fmt: skip


def opened(tmp_path: Path, metadata: object = None, tensors: object = (), **options: object) -> _core.Gguf:
    """A file of the gguf package."""
    return _core.Gguf(tiny_gguf(tmp_path / "x.gguf", metadata, tensors, **options))


def by_hand(tmp_path: Path, metadata: object = (), tensors: object = (), **options: object) -> _core.Gguf:
    """A file that the package does not write."""
    return _core.Gguf(hand_written_gguf(tmp_path / "x.gguf", metadata, tensors, **options))


@pytest.mark.parametrize("kind", sorted(SCALARS))
def test_scalars(tmp_path: Path, kind: str) -> None:
    value = opened(tmp_path, {"k": Typed(kind, SCALARS[kind])}).get("k")
    assert value == SCALARS[kind]
    assert type(value) is type(SCALARS[kind])


@pytest.mark.parametrize("kind", sorted(SCALARS))
@pytest.mark.parametrize("count", [0, 1, 3])
def test_arrays_of_numbers_keep_their_type(tmp_path: Path, kind: str, count: int) -> None:
    write = opened if count else by_hand
    value = write(tmp_path, {"k": Array(kind, [SCALARS[kind]] * count)}).get("k")
    assert isinstance(value, np.ndarray)
    assert value.dtype.name == kind
    assert value.tolist() == [SCALARS[kind]] * count


@pytest.mark.parametrize("text", ["", "plain", "naïve 漢字 🙂", "nul\0inside", "line\nbreak"])
def test_strings(tmp_path: Path, text: str) -> None:
    file = opened(tmp_path, {"k": text, "a": Array("string", [text, "x", text])})
    assert file.get("k") == text
    assert file.get("a") == [text, "x", text]
    assert file.describe()


def test_strings_that_are_not_utf8_keep_their_bytes(tmp_path: Path) -> None:
    file = opened(tmp_path, {"k": Typed("string", b"\xff\x00a"), "a": Array("string", [b"\xc3"])})
    assert file.get("k").encode("utf-8", "surrogateescape") == b"\xff\x00a"
    assert file.get("a")[0].encode("utf-8", "surrogateescape") == b"\xc3"


def test_nested_arrays(tmp_path: Path) -> None:
    value = Array(
        "array", [Array("int16", [1, 2]), Array("array", [Array("string", ["a", ""])]), Array("bool", [])]
    )
    file = by_hand(tmp_path, {"k": value, "after": 7})
    numbers, strings, empty = file.get("k")
    assert numbers.tolist() == [1, 2]
    assert strings == [["a", ""]]
    assert empty.dtype == np.bool_
    assert file.get("after") == 7


def test_nesting_to_the_limit(tmp_path: Path) -> None:
    value = Array("uint8", [1])
    for _ in range(15):
        value = Array("array", [value])
    assert by_hand(tmp_path, {"k": value, "after": 7}).get("after") == 7


def test_keys_keep_their_order_and_an_absent_one_is_none(tmp_path: Path) -> None:
    file = opened(tmp_path, {"z": 1, "a": 2, "m.ä": 3})
    assert file.keys() == ["z", "a", "m.ä"]
    assert file.metadata() == {"z": 1, "a": 2, "m.ä": 3}
    assert file.get("nothing") is None


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [None, 8, 32, 64, 4096])
def test_versions_and_alignments(tmp_path: Path, version: int, alignment: int | None) -> None:
    tensors = [TensorSpec.of(f"t{i}", np.full((i + 1, 3), i, np.float32)) for i in range(4)]
    if version == 3:
        file = opened(tmp_path, {"k": "v"}, tensors, alignment=alignment)
    else:
        file = by_hand(tmp_path, {"k": "v"}, tensors, version=version, alignment=alignment)
    assert file.version == version
    assert file.alignment == (alignment or 32)
    for i, info in enumerate(file.tensors()):
        assert info["offset"] % file.alignment == 0
        np.testing.assert_array_equal(file.dequantize(info["name"]), np.full((i + 1, 3), i, np.float32))


@pytest.mark.parametrize("dtype", sorted(TENSOR_TYPE_IDS))
def test_every_tensor_type(tmp_path: Path, dtype: str) -> None:
    (info,) = opened(tmp_path, {}, [TensorSpec.zeros("w", (3, 256), dtype)]).tensors()
    block, size = BLOCK_GEOMETRY[dtype]
    assert info["dtype"] == dtype
    assert info["shape"] == (3, 256)
    assert info["nbytes"] == 3 * 256 // block * size
    assert info["file"] == 0


def test_raw_bytes(tmp_path: Path) -> None:
    data = bytes(range(34)) * 2
    file = opened(tmp_path, {}, [TensorSpec("w", (2, 32), "q8_0", data)])
    assert file.raw("w").tobytes() == data


def test_no_metadata_and_no_tensors(tmp_path: Path) -> None:
    file = by_hand(tmp_path)
    assert (file.keys(), file.tensors(), file.metadata()) == ([], [], {})
    assert file.file_bytes == len(build_gguf().data)


def test_a_file_without_tensors_may_end_before_the_padding(tmp_path: Path) -> None:
    image = build_gguf({"k": 1})
    (tmp_path / "x.gguf").write_bytes(image.data[: image.offset("padding")])
    assert _core.Gguf(tmp_path / "x.gguf").get("k") == 1


def test_bytes_behind_the_last_tensor_are_allowed(tmp_path: Path) -> None:
    image = build_gguf({}, [TensorSpec.of("w", np.ones(8, np.float32))])
    (tmp_path / "x.gguf").write_bytes(image.data + b"more")
    assert _core.Gguf(tmp_path / "x.gguf").dequantize("w").tolist() == [1.0] * 8


def test_tensor_data_in_any_order(tmp_path: Path) -> None:
    a, b = np.full(8, 1, np.float32), np.full(8, 2, np.float32)
    specs = [TensorSpec("a", (8,), "f32", b.tobytes(), 32), TensorSpec("b", (8,), "f32", a.tobytes(), 0)]
    file = by_hand(tmp_path, {}, specs)
    assert file.dequantize("a").tolist() == a.tolist()
    assert file.dequantize("b").tolist() == b.tolist()


def test_values_outlive_the_file(tmp_path: Path) -> None:
    file = opened(
        tmp_path, {"a": Array("int32", [1, 2]), "s": ["x"]}, [TensorSpec.of("w", np.ones(4, np.float32))]
    )
    numbers, strings, weights, raw = file.get("a"), file.get("s"), file.dequantize("w"), file.raw("w")
    del file
    assert (numbers.tolist(), strings, weights.tolist(), raw.size) == ([1, 2], ["x"], [1.0] * 4, 16)


def resident_kib(path: Path) -> int:
    """Memory of the mappings of `path` in this process."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    total = 0
    for line in lines:
        if line.endswith(str(path)):
            total += next(int(row.split()[1]) for row in lines if row.startswith("Rss:"))
    return total


def test_dropped_pages_leave_the_process_and_come_back(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((4, 1 << 18)).astype(np.float32)
    tensors = [TensorSpec.of(name, values) for name in ("a", "b")]
    path = tiny_gguf(tmp_path / "x.gguf", {}, tensors)
    file = _core.Gguf(path)
    np.testing.assert_array_equal(file.dequantize("a"), values)
    np.testing.assert_array_equal(file.dequantize("b"), values)
    before = resident_kib(path)
    assert before >= 8192
    assert file.advise_drop("a")
    assert 4096 - 8 <= before - resident_kib(path) <= 4096  # whole pages of a; b stays
    assert file.advise_willneed("a")
    np.testing.assert_array_equal(file.dequantize("a"), values)
    np.testing.assert_array_equal(file.dequantize("b"), values)
    with pytest.raises(ModelError, match="no tensor 'c'"):
        file.advise_drop("c")


def test_path_names_and_objects(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "naïve 漢字.gguf", {"k": 1})
    assert _core.Gguf(str(path)).path == _core.Gguf(path).path == str(path)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 32)


@pytest.mark.parametrize("alignment", [None, 64])
def test_our_hand_writes_what_the_gguf_package_writes(tmp_path: Path, alignment: int | None) -> None:
    """So that the lies of a file by our own hand are the only ones in it."""
    metadata = {
        "general.architecture": "llama",
        **{f"one.{kind}": Typed(kind, value) for kind, value in SCALARS.items()},
        **{f"some.{kind}": Array(kind, [value, 0]) for kind, value in SCALARS.items()},
        **{"text": "naïve 漢字", "bytes": Typed("string", b"\xff"), "texts": ["a", ""], "empty": "", "-": -1},
    }
    tensors = [TensorSpec.zeros(f"t.{kind}", (3, 256), kind) for kind in sorted(TENSOR_TYPE_IDS)]
    tensors.append(TensorSpec.of("w", np.arange(30, dtype=np.float32).reshape(2, 3, 5)))
    path = tiny_gguf(tmp_path / "x.gguf", metadata, tensors, alignment=alignment)
    assert padded(path.read_bytes()) == padded(build_gguf(metadata, tensors, alignment=alignment).data)


@pytest.mark.parametrize(
    ("metadata", "tensors"),
    [
        ({"k": Array("int32", [])}, []),
        ({"k": Array("int32", [1], count=2)}, []),
        ({"k": Array("array", [Array("int32", [1])])}, []),
        ({}, [TensorSpec("w", (8,), "f32", bytes(31))]),
        ({}, [TensorSpec("w", (8,), 999, bytes(32))]),
        ({}, [TensorSpec("w", (8,), "q8_0", bytes(34))]),
        ({}, [TensorSpec("w", (8,), "f32", bytes(32), offset=32)]),
        ({}, [TensorSpec("w", (8,), "f32", bytes(32), n_dims=2)]),
        ({}, [TensorSpec("w", (8,), "f32", bytes(32))] * 2),
    ],
)
def test_only_our_hand_lies(tmp_path: Path, metadata: dict[str, object], tensors: list[TensorSpec]) -> None:
    with pytest.raises(ValueError, match=r"hand_written_gguf|Duplicated"):
        tiny_gguf(tmp_path / "x.gguf", metadata, tensors)
    assert not (tmp_path / "x.gguf").exists()
    assert hand_written_gguf(tmp_path / "x.gguf", metadata, tensors).stat().st_size


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "qwen3moe"])
def test_the_gguf_package_reads_what_the_builder_writes(tmp_path: Path, architecture: str) -> None:
    gguf = pytest.importorskip("gguf")
    path = tiny_model(tmp_path / "m.gguf", architecture, dtype="q4_0")
    theirs, mine = gguf.GGUFReader(path), _core.Gguf(path)
    fields = {key: f for key, f in theirs.fields.items() if not key.startswith("GGUF.")}
    assert list(fields) == mine.keys()
    for key, value in mine.metadata().items():
        assert fields[key].contents() == (value.tolist() if isinstance(value, np.ndarray) else value)
    for info, tensor in zip(mine.tensors(), theirs.tensors, strict=True):
        assert info["name"] == tensor.name
        assert info["shape"] == tuple(reversed(tensor.shape.tolist()))
        assert info["dtype"] == tensor.tensor_type.name.lower()
        assert (info["offset"], info["nbytes"]) == (tensor.data_offset, tensor.n_bytes)


@pytest.mark.parametrize("version", [2, 3])
def test_files_written_by_the_gguf_package(tmp_path: Path, version: int) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_array("tokenizer.ggml.tokens", ["a", "ä", "漢"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 0.0])
    writer.add_float64("f64", 0.1)
    values = np.arange(96, dtype=np.float32).reshape(3, 32)
    writer.add_tensor("w", values)
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("q", gguf.quants.quantize(values, q8_0), raw_dtype=q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    raw = bytearray(path.read_bytes())
    raw[4] = version  # the layouts of versions 2 and 3 are the same
    path.write_bytes(raw)
    file = _core.Gguf(path)
    assert file.version == version
    assert file.get("tokenizer.ggml.tokens") == ["a", "ä", "漢"]
    assert file.get("tokenizer.ggml.scores").tolist() == [0.5, -1.0, 0.0]
    assert file.get("f64") == 0.1
    np.testing.assert_array_equal(file.dequantize("w"), values)
    assert np.abs(file.dequantize("q") - values).max() < 0.5


# ---- Split files -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("given", [1, -1])
def test_any_shard_opens_all(tmp_path: Path, count: int, given: int) -> None:
    tensors = [TensorSpec.of(f"t{i}", np.full(8, i, np.float32)) for i in range(5)]
    paths = tiny_gguf_split(tmp_path / "m", {"general.name": "n"}, tensors, count)
    file = _core.Gguf(paths[0] if given == 1 else paths[-1])
    assert file.paths == [str(path) for path in paths]
    assert file.path == str(paths[0])
    assert file.file_bytes == sum(path.stat().st_size for path in paths)
    assert file.get("general.name") == "n"
    assert [info["name"] for info in file.tensors()] == [tensor.name for tensor in tensors]
    assert {info["file"] for info in file.tensors()} == set(range(count))
    for i in range(5):
        assert file.dequantize(f"t{i}").tolist() == [i] * 8
    assert paths[-1].name in file.describe()


def test_shards_may_be_empty_and_may_omit_the_tensor_total(tmp_path: Path) -> None:
    tensors = [TensorSpec.of("t", np.zeros(8, np.float32))]
    omit = {number: {"split.tensors.count": None} for number in (1, 2, 3)}
    paths = tiny_gguf_split(tmp_path / "m", {}, tensors, 3, overrides=omit)
    assert [info["file"] for info in _core.Gguf(paths[1]).tensors()] == [2]


def test_a_plain_file_may_be_called_shard_one_of_one(tmp_path: Path) -> None:
    assert _core.Gguf(tiny_gguf(tmp_path / "m-00001-of-00001.gguf", {"k": 1})).get("k") == 1


def test_describe_shows_everything(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m.gguf", "qwen3moe", dtype="q8_0")
    text = _core.Gguf(path).describe()
    for key in _core.Gguf(path).keys():  # noqa: SIM118 (not a dict)
        assert key in text
    for info in _core.Gguf(path).tensors():
        assert info["name"] in text
    assert "q8_0" in text
    assert str(path) in text
