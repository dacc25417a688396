"""Files that lie: each is turned down with the field, the value and the byte offset in the message."""

from __future__ import annotations

import contextlib
import os
import re
import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
from dyno import _core
from dyno.errors import DynoError, GgufError, ModelError
from dyno.testing import (
    Array,
    GgufImage,
    TensorSpec,
    Typed,
    build_gguf,
    split_path,
    tiny_gguf,
    tiny_gguf_split,
)

if TYPE_CHECKING:
    from pathlib import Path

HUGE = [2**63 - 1, 2**63, 2**64 - 33, 2**64 - 1]
F32 = TensorSpec.of("w", np.zeros((2, 32), np.float32))
OTHER = TensorSpec.of("v", np.zeros(8, np.float32))


def image(**options: object) -> GgufImage:
    """A small file with a scalar, a string, arrays and two tensors."""
    metadata = {
        "general.architecture": "llama",
        "u": 7,
        "b": True,
        "names": ["a", "bc"],
        "numbers": Array("int16", [1, 2, 3]),
        "nested": Array("array", [Array("uint8", [1]), Array("string", ["x"])]),
    }
    return build_gguf(metadata, [F32, OTHER], **options)


def rejected(tmp_path: Path, data: bytes, *patterns: str, offset: int | None = None) -> str:
    """Asserts that opening `data` raises GgufError with a message that matches every pattern; returns it."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(GgufError) as caught:
        _core.Gguf(path)
    message = str(caught.value)
    assert message.startswith(f"[gguf] {path}")
    for pattern in patterns:
        assert re.search(pattern, message), message
    if offset is not None:
        assert f"at byte {offset} of {len(data)}" in message
    return message


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


# ---- Truncation --------------------------------------------------------------------------------------------
def test_truncation_at_every_byte(tmp_path: Path) -> None:
    """No prefix opens: the last byte of the file belongs to a tensor."""
    data = image().data
    path = tmp_path / "x.gguf"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(GgufError, match=r"byte|empty"):
            _core.Gguf(path)
    path.write_bytes(data)
    assert len(_core.Gguf(path).tensors()) == 2


@pytest.mark.parametrize("mark", sorted({name for name, at in image().marks if 0 < at < len(image().data)}))
def test_truncation_at_every_section(tmp_path: Path, mark: str) -> None:
    rejected(tmp_path, image().data[: image().offset(mark)], r"at byte \d+ of \d+")


def test_every_single_byte_flip_is_an_error_or_a_readable_file(tmp_path: Path) -> None:
    """Nothing but DynoError, whatever one byte of the header says."""
    clean = image()
    path = tmp_path / "x.gguf"
    for at in range(clean.offset("data")):
        for flip in (0x01, 0x80, 0xFF):
            data = bytearray(clean.data)
            data[at] ^= flip
            path.write_bytes(data)
            with contextlib.suppress(DynoError):
                file = _core.Gguf(path)
                file.metadata()
                file.describe()
                for info in file.tensors():
                    file.dequantize(info["name"])


# ---- Header ------------------------------------------------------------------------------------------------
def test_no_gguf_file(tmp_path: Path) -> None:
    message = rejected(tmp_path, b"\x93NUMPY" + bytes(60), r"not a GGUF file", r"\\x93NUM", offset=0)
    assert message.endswith("instead of 'GGUF' (at byte 0 of 66)")


@pytest.mark.parametrize(
    ("data", "advice"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", r"pointer of Git LFS.*git lfs pull"),
        (b"<!DOCTYPE html><title>404</title>", "it is a web page"),
        (b"<html><title>404</title>", "it is a web page"),
        (b"PK\x03\x04" + bytes(30), r"PyTorch or safetensors.*convert_hf_to_gguf\.py"),
        (struct.pack("<Q", 40) + b'{"__metadata__":{}}', r"PyTorch or safetensors.*convert_hf_to_gguf\.py"),
    ],
    ids=["git-lfs", "doctype", "html", "pytorch", "safetensors"],
)
def test_files_of_other_formats_are_recognised(tmp_path: Path, data: bytes, advice: str) -> None:
    rejected(tmp_path, data, "not a GGUF file: it starts with", advice, offset=0)


def test_a_file_that_ends_early_is_to_be_downloaded_again(tmp_path: Path) -> None:
    """An interrupted download ends in the metadata or, far more often, in the data of a tensor."""
    data = image().data
    for length in (6, image().offset("data") // 2, image().offset("data") + 1, len(data) - 1):
        rejected(tmp_path, data[:length], "; the file may be incomplete: download or copy it again")


@pytest.mark.parametrize("version", [0, 1, 4, 2**31, 2**32 - 1])
def test_versions(tmp_path: Path, version: int) -> None:
    rejected(
        tmp_path,
        image(version=version).data,
        rf"version {version}\b" if version % 65536 else r"version",
        offset=4,
    )


@pytest.mark.parametrize("version", [2, 3])
def test_big_endian_files_are_named_as_such(tmp_path: Path, version: int) -> None:
    data = b"GGUF" + struct.pack(">IQQ", version, 0, 0) + bytes(64)
    rejected(tmp_path, data, r"big-endian", rf"version {version}\b", offset=4)


@pytest.mark.parametrize("count", [8, 1000, 2**32, *HUGE])
@pytest.mark.parametrize("which", ["tensor_count", "metadata_count"])
def test_counts(tmp_path: Path, which: str, count: int) -> None:
    data = image(**{which: count}).data
    message = rejected(tmp_path, data, r"at byte \d+ of")
    if count > 100:
        assert f"count {count} is too large" in message
        assert f"at byte {8 if which == 'tensor_count' else 16} of" in message


@pytest.mark.parametrize("alignment", [0, 1, 2, 4, 12, 24, 33, 2**31 + 1, 2**32 - 1])
def test_alignment_is_a_power_of_two_of_at_least_eight(tmp_path: Path, alignment: int) -> None:
    bad = build_gguf({"general.alignment": Typed("uint32", alignment)}, [F32])
    rejected(
        tmp_path,
        bad.data,
        rf"general\.alignment.* {alignment}\b",
        offset=bad.offset("value:general.alignment"),
    )


def test_alignment_past_the_end(tmp_path: Path) -> None:
    bad = build_gguf({"general.alignment": Typed("uint32", 2**31)}, [F32])
    rejected(tmp_path, bad.data, str(2**31), r"past the end")


@pytest.mark.parametrize("value", [Typed("uint64", 32), Typed("string", "32"), Array("uint32", [32])])
def test_alignment_has_one_type(tmp_path: Path, value: object) -> None:
    rejected(
        tmp_path,
        build_gguf({"general.alignment": value}, [F32]).data,
        r"general\.alignment",
        r"expected uint32",
    )


# ---- Metadata ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("length", [10**6, 2**32, *HUGE])
@pytest.mark.parametrize("where", ["key:u", "value:general.architecture", "tensor:w"])
def test_string_lengths(tmp_path: Path, where: str, length: int) -> None:
    clean = image()
    rejected(tmp_path, clean.patched(where, u64(length)), rf"length {length}\b", offset=clean.offset(where))


@pytest.mark.parametrize(
    "key", [b"", b"\xff\xfe", b"a\xc3", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80", b"a\0b"]
)
def test_names_are_utf8_and_not_empty(tmp_path: Path, key: bytes) -> None:
    rejected(tmp_path, build_gguf([(key, 1)]).data, r"metadata key", r"empty|UTF-8|NUL", offset=24)
    bad = build_gguf({}, [TensorSpec(key, (8,), "f32", bytes(32))])
    rejected(tmp_path, bad.data, r"tensor name", r"empty|UTF-8|NUL", offset=24)


def test_names_have_a_longest_length(tmp_path: Path) -> None:
    assert _core.Gguf(tiny_gguf(tmp_path / "x.gguf", {"k" * 65535: 1})).get("k" * 65535) == 1
    message = rejected(
        tmp_path, build_gguf({"k" * 65536: 1}).data, r"65536 bytes, more than 65535", offset=24
    )
    assert len(message) < 500


def test_duplicate_keys(tmp_path: Path) -> None:
    bad = build_gguf([("a", 1), ("k", 1), ("k", 2)])
    rejected(
        tmp_path, bad.data, r"'k' appears twice", offset=[at for name, at in bad.marks if name == "key:k"][1]
    )


@pytest.mark.parametrize("kind", [13, 255, 9999, 2**32 - 1])
def test_value_types(tmp_path: Path, kind: int) -> None:
    clean = image()
    rejected(
        tmp_path,
        clean.patched("type:u", u32(kind)),
        rf"'u' has value type {kind}\b",
        offset=clean.offset("type:u"),
    )
    elements = clean.patched("value:numbers", u32(kind))
    rejected(tmp_path, elements, rf"'numbers' has value type {kind}\b", offset=clean.offset("value:numbers"))


@pytest.mark.parametrize("value", [2, 255])
def test_bools_are_zero_or_one(tmp_path: Path, value: int) -> None:
    clean = image()
    rejected(
        tmp_path, clean.patched("value:b", bytes([value])), rf"'b'.* {value};", offset=clean.offset("value:b")
    )
    array = build_gguf({"k": Array("bool", [0, 1, value])})
    rejected(tmp_path, array.data, rf"'k'.* {value};", offset=array.offset("value:k") + 12 + 2)


@pytest.mark.parametrize("element", ["uint8", "int64", "bool", "string", "array"])
@pytest.mark.parametrize("count", [100, 2**32, 2**61, *HUGE])
def test_array_counts(tmp_path: Path, element: str, count: int) -> None:
    bad = build_gguf({"k": Array(element, [], count=count)})
    rejected(tmp_path, bad.data, rf"'k' is an array of {count} {element}", offset=bad.offset("value:k"))


def test_a_header_has_a_largest_size(tmp_path: Path) -> None:
    """A hole of many gigabytes costs nothing on the disk, and passes for an array of empty strings."""
    bad = build_gguf({"k": Array("string", [], count=2**28)})
    path = tmp_path / "hole.gguf"
    with path.open("wb") as file:
        file.write(bad.data)
        file.truncate(3 << 30)
    with pytest.raises(
        GgufError, match=rf"'k' is an array of {2**28} .* \d+ bytes of the {1 << 30} that a header may"
    ):
        _core.Gguf(path)


def test_string_lengths_inside_arrays(tmp_path: Path) -> None:
    clean = build_gguf({"k": ["ab", "cd"], "z": 1})
    at = clean.offset("value:k") + 12 + 10
    data = clean.data[:at] + u64(2**64 - 1) + clean.data[at + 8 :]
    rejected(tmp_path, data, r"'k' has length 18446744073709551615", offset=at)


@pytest.mark.parametrize("depth", [17, 1000, 200_000])
def test_deep_nesting(tmp_path: Path, depth: int) -> None:
    inner = struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 0, 0)
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + u64(1) + b"k" + u32(9) + inner
    rejected(tmp_path, data, r"'k' nests arrays deeper than 16")


# ---- Tensors -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [4, 5, 31, 33, 36, 43, 136, 500, 9999, 2**32 - 1])
def test_tensor_types(tmp_path: Path, kind: int) -> None:
    bad = build_gguf({}, [TensorSpec("w", (2, 32), kind, bytes(256))])
    message = rejected(tmp_path, bad.data, rf"tensor 'w' has type {kind}\b", offset=bad.offset("dtype:w"))
    assert ("removed" in message) == (kind < 40)
    assert ("ik_llama.cpp" in message) == (kind == 136)


@pytest.mark.parametrize("n_dims", [0, 5, 100, 2**32 - 1])
def test_dimension_counts(tmp_path: Path, n_dims: int) -> None:
    bad = build_gguf({}, [TensorSpec("w", (2, 32), "f32", bytes(256), n_dims=n_dims)])
    rejected(tmp_path, bad.data, rf"'w' has {n_dims} dimensions", offset=bad.offset("n_dims:w"))


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("dim", [0, 2**63, 2**64 - 1])
def test_dimensions(tmp_path: Path, axis: int, dim: int) -> None:
    shape = [1, 1, 1, 32]
    shape[axis] = dim
    bad = build_gguf({}, [TensorSpec("w", tuple(shape), "f32", bytes(256))])
    at = bad.offset("dims:w") + 8 * (3 - axis)
    rejected(tmp_path, bad.data, rf"'w': dimension {3 - axis} is {dim}\b", offset=at)


@pytest.mark.parametrize(
    "shape",
    [
        (2**32, 2**32),
        (2**31, 2**32),
        (2**62, 4),
        (2**21, 2**21, 2**21, 2**21),
        (2**63 - 1, 32),
        (3, 2**62 + 32),
    ],
)
def test_element_products(tmp_path: Path, shape: tuple[int, ...]) -> None:
    bad = build_gguf({}, [TensorSpec("w", shape, "f32", bytes(256))])
    rejected(tmp_path, bad.data, r"tensor 'w' of shape \[", r"more than 2\^63", offset=bad.offset("dtype:w"))


@pytest.mark.parametrize(("shape", "dtype"), [((2**62,), "f64"), ((2**61,), "i64"), ((2**40, 2**22), "f32")])
def test_byte_sizes(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    rejected(
        tmp_path, build_gguf({}, [TensorSpec("w", shape, dtype, bytes(256))]).data, r"tensor 'w'", r"bytes"
    )


@pytest.mark.parametrize(
    ("dtype", "row"), [("q4_0", 16), ("q8_0", 33), ("q4_k", 128), ("iq4_xs", 32), ("mxfp4", 1)]
)
def test_rows_are_whole_blocks(tmp_path: Path, dtype: str, row: int) -> None:
    bad = build_gguf({}, [TensorSpec("w", (256, row), dtype, bytes(2**16))])
    rejected(tmp_path, bad.data, rf"'w' of type {dtype} has rows of {row} ", offset=bad.offset("dtype:w"))


@pytest.mark.parametrize("offset", [1, 8, 16, 31, 2**64 - 1])
def test_misaligned_offsets(tmp_path: Path, offset: int) -> None:
    bad = build_gguf({}, [TensorSpec("w", (2, 32), "f32", bytes(512), offset=offset)])
    rejected(
        tmp_path,
        bad.data,
        rf"'w': offset {offset} is not a multiple",
        r"alignment 32",
        offset=bad.offset("offset:w"),
    )


@pytest.mark.parametrize("offset", [32, 256, 2**32, 2**63, 2**64 - 256, 2**64 - 32])
def test_offsets_past_the_end(tmp_path: Path, offset: int) -> None:
    bad = build_gguf({}, [TensorSpec("w", (2, 32), "f32", bytes(256), offset=offset)])
    rejected(tmp_path, bad.data, rf"'w' needs 256 bytes at offset {offset} ")


def test_overlapping_data(tmp_path: Path) -> None:
    for first, second in ((0, 0), (0, 32), (224, 0), (32, 0)):
        a = TensorSpec("a", (2, 32), "f32", bytes(256), offset=first)
        b = TensorSpec("b", (2, 32), "f32", bytes(256), offset=second)
        bad = build_gguf({}, [a, b])
        rejected(tmp_path, bad.data, r"'[ab]' overlaps that of tensor '[ab]'")


def test_duplicate_tensors(tmp_path: Path) -> None:
    bad = build_gguf({}, [F32, OTHER, F32])
    second = [at for name, at in bad.marks if name == "tensor:w"][1]
    rejected(tmp_path, bad.data, r"tensor 'w' appears twice", offset=second)


def test_messages_do_not_carry_control_characters(tmp_path: Path) -> None:
    message = rejected(
        tmp_path, build_gguf({}, [TensorSpec("w\n\x1b[31m", (0,), "f32", b"")]).data, r"w\\x0a\\x1b\[31m"
    )
    assert "\x1b" not in message


def test_unknown_tensor_names(tmp_path: Path) -> None:
    file = _core.Gguf(tiny_gguf(tmp_path / "x.gguf", {}, [F32]))
    with pytest.raises(ModelError, match=r"no tensor 'nope'"):
        file.dequantize("nope")
    with pytest.raises(ModelError, match=r"no tensor 'nope'"):
        file.raw("nope")


# ---- Paths -------------------------------------------------------------------------------------------------
def test_paths_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    os.mkfifo(tmp_path / "pipe.gguf")
    for path, reason in {
        tmp_path / "absent.gguf": "No such file",
        tmp_path: "is a folder; give the path of a .gguf file in it",
        tmp_path / "pipe.gguf": "not a regular file",
        tmp_path / "empty.gguf": "empty",
    }.items():
        with pytest.raises(GgufError, match=reason):
            _core.Gguf(path)


# ---- Split files -------------------------------------------------------------------------------------------
SPLIT_TENSORS = [TensorSpec.of(f"t{i}", np.zeros(8, np.float32)) for i in range(4)]


def split_rejected(tmp_path: Path, *patterns: str, overrides: dict[int, dict[str, object]]) -> None:
    paths = tiny_gguf_split(tmp_path / "m", {}, SPLIT_TENSORS, 3, overrides=overrides)
    for path in paths:
        with pytest.raises(GgufError) as caught:
            _core.Gguf(path)
        for pattern in patterns:
            assert re.search(pattern, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("shard", [1, 2, 3])
def test_split_metadata_must_agree_with_the_name(tmp_path: Path, shard: int) -> None:
    name = rf"m-0000{shard}-of-00003\.gguf"
    wrong_number = {shard: {"split.no": Typed("uint16", 7)}}
    split_rejected(tmp_path, name, r"'split\.no' at byte \d+ is 7", overrides=wrong_number)
    split_rejected(tmp_path, name, r"'split\.no' is missing", overrides={shard: {"split.no": None}})
    for count in (0, 2, 4, 65535):
        wrong_count = {shard: {"split.count": Typed("uint16", count)}}
        split_rejected(tmp_path, name, rf"'split\.count' at byte \d+ is {count}\b", overrides=wrong_count)
    split_rejected(tmp_path, name, r"'split\.count' is missing", overrides={shard: {"split.count": None}})
    split_rejected(tmp_path, name, r"'split\.count'.*type string", overrides={shard: {"split.count": "3"}})
    for total in (0, 3, -1, 2**31 - 1):
        wrong_total = {shard: {"split.tensors.count": Typed("int32", total)}}
        split_rejected(tmp_path, name, r"split\.tensors\.count", rf" {total}\b", overrides=wrong_total)


def test_cyclic_shards(tmp_path: Path) -> None:
    """A shard that is a link to another one has the wrong number."""
    paths = tiny_gguf_split(tmp_path / "m", {}, SPLIT_TENSORS, 2)
    paths[1].unlink()
    paths[1].symlink_to(paths[0].name)
    with pytest.raises(GgufError, match=r"00002-of-00002.*'split\.no' at byte \d+ is 0"):
        _core.Gguf(paths[0])
    paths[1].unlink()
    paths[1].symlink_to(paths[1].name)
    with pytest.raises(GgufError, match=r"cannot open .*00002-of-00002"):
        _core.Gguf(paths[0])


def test_missing_shards_are_named(tmp_path: Path) -> None:
    paths = tiny_gguf_split(tmp_path / "m", {}, SPLIT_TENSORS, 3)
    paths[1].unlink()
    for path in (paths[0], paths[2]):
        with pytest.raises(GgufError, match=r"cannot open .*m-00002-of-00003\.gguf: No such file") as e:
            _core.Gguf(path)
        assert "; the model is split into 3 files, which must all be in one folder" in str(e.value)


@pytest.mark.parametrize(("number", "count"), [(0, 2), (3, 2), (0, 0), (1, 0), (99999, 1)])
def test_impossible_shard_names(tmp_path: Path, number: int, count: int) -> None:
    path = split_path(tmp_path / "m", number, count)
    path.write_bytes(image().data)
    with pytest.raises(GgufError, match=rf"shard {number} of {count}"):
        _core.Gguf(path)


def test_a_renamed_shard_says_how_it_must_be_called(tmp_path: Path) -> None:
    paths = tiny_gguf_split(tmp_path / "m", {}, SPLIT_TENSORS, 2)
    renamed = paths[0].rename(tmp_path / "model.gguf")
    with pytest.raises(
        GgufError, match=r"'split\.count' at byte \d+ is 2.*not that of a shard.*-00001-of-0000N"
    ):
        _core.Gguf(renamed)


def test_a_plain_file_is_no_shard_of_many(tmp_path: Path) -> None:
    path = split_path(tmp_path / "m", 1, 2)
    path.write_bytes(image().data)
    with pytest.raises(GgufError, match=r"shard 1 of 2.*'split\.count' is missing"):
        _core.Gguf(path)


def test_the_same_tensor_in_two_shards(tmp_path: Path) -> None:
    paths = tiny_gguf_split(tmp_path / "m", {}, [F32, OTHER, F32], 3)
    with pytest.raises(GgufError, match=r"00003-of-00003.*'w' at byte \d+ is also in .*00001-of-00003"):
        _core.Gguf(paths[0])


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    paths = tiny_gguf_split(tmp_path / "m", {}, SPLIT_TENSORS, 2)
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    with pytest.raises(GgufError, match=r"00002-of-00002\.gguf: tensor 't3' needs 32 bytes"):
        _core.Gguf(paths[0])
