"""Typed access to metadata: what the engine gets when it asks for a key, and how it is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from dyno import _core
from dyno.errors import DynoError, GgufError, ModelError
from dyno.testing import Array, Typed, hand_written_gguf, tiny_gguf

if TYPE_CHECKING:
    from pathlib import Path

INTEGERS = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
BOUNDS = {
    "u32": (0, 2**32 - 1),
    "i32": (-(2**31), 2**31 - 1),
    "u64": (0, 2**64 - 1),
    "i64": (-(2**63), 2**63 - 1),
}
KINDS = [*BOUNDS, "f32", "bool", "string", "i64[]", "f32[]", "bool[]", "string[]"]


def opened(tmp_path: Path, value: object) -> _core.Gguf:
    by_hand = isinstance(value, Array) and (not value.values or value.element == "array")
    write = hand_written_gguf if by_hand else tiny_gguf
    return _core.Gguf(write(tmp_path / "x.gguf", {"before": "x", "k": value}))


@pytest.mark.parametrize("stored", INTEGERS)
def test_integers_widen_and_narrow_when_the_value_fits(tmp_path: Path, stored: str) -> None:
    info = np.iinfo(stored)
    for value in {info.min, 0, 7, info.max}:
        file = opened(tmp_path, Typed(stored, value))
        for kind, (low, high) in BOUNDS.items():
            if low <= value <= high:
                assert file.get_as("k", kind) == value
            else:
                with pytest.raises(
                    GgufError, match=rf"'k' at byte \d+ has type {stored} and value {value};.*integer"
                ):
                    file.get_as("k", kind)


def test_floats_are_read_from_any_number(tmp_path: Path) -> None:
    for value in (Typed("float32", 1e-6), Typed("float64", 1e-6)):
        assert opened(tmp_path, value).get_as("k", "f32") == np.float32(1e-6)
    for stored in INTEGERS:
        assert opened(tmp_path, Typed(stored, 100)).get_as("k", "f32") == 100.0
    with pytest.raises(GgufError, match=r"'k'.* type float64 and value 1e\+300; expected a number"):
        opened(tmp_path, Typed("float64", 1e300)).get_as("k", "f32")
    for kind in BOUNDS:
        with pytest.raises(GgufError, match=r"'k'.* type float32 and value 2;.*integer"):
            opened(tmp_path, Typed("float32", 2.0)).get_as("k", kind)


def test_bools_and_strings_are_nothing_else(tmp_path: Path) -> None:
    assert opened(tmp_path, True).get_as("k", "bool") is True
    assert opened(tmp_path, "text").get_as("k", "string") == "text"
    for value, taken in ((True, {"bool"}), ("1", {"string"}), (1, {*BOUNDS, "f32"}), (0.5, {"f32"})):
        for kind in set(KINDS) - taken:
            with pytest.raises(GgufError, match=r"'k' at byte \d+ has type \w+ and value .*; expected "):
                opened(tmp_path, value).get_as("k", kind)


@pytest.mark.parametrize("stored", INTEGERS)
def test_integer_arrays_widen(tmp_path: Path, stored: str) -> None:
    info = np.iinfo(stored)
    values = [0, 1, min(info.max, 2**63 - 1), max(info.min, -(2**63))]
    file = opened(tmp_path, Array(stored, values))
    assert file.get_as("k", "i64[]").tolist() == values
    np.testing.assert_array_equal(file.get_as("k", "f32[]"), np.array(values, np.float32))


def test_arrays_of_other_types(tmp_path: Path) -> None:
    assert opened(tmp_path, ["a", "", "漢"]).get_as("k", "string[]") == ["a", "", "漢"]
    assert opened(tmp_path, [True, False]).get_as("k", "bool[]") == [True, False]
    assert opened(tmp_path, Array("float64", [0.5, np.inf])).get_as("k", "f32[]").tolist() == [0.5, np.inf]
    with pytest.raises(
        GgufError, match=r"uint64\[1\]\{18446744073709551615\}; expected an array of integers"
    ):
        opened(tmp_path, Array("uint64", [2**64 - 1])).get_as("k", "i64[]")
    for value, taken in (
        (["a"], {"string[]"}),
        ([True], {"bool[]"}),
        ([1], {"i64[]", "f32[]"}),
        ([0.5], {"f32[]"}),
        (Array("array", [Array("int32", [1])]), set()),
    ):
        for kind in set(KINDS) - taken:
            with pytest.raises(GgufError, match=r"'k' at byte \d+ has type array"):
                opened(tmp_path, value).get_as("k", kind)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_keys(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ModelError, match=r"x\.gguf: key 'absent' is missing"):
        opened(tmp_path, 1).get_as("absent", kind)


def test_one_value_per_layer(tmp_path: Path) -> None:
    assert opened(tmp_path, 4).get_per_layer("k", 3).tolist() == [4, 4, 4]
    assert opened(tmp_path, [8, 0, 2]).get_per_layer("k", 3).tolist() == [8, 0, 2]
    assert opened(tmp_path, Array("uint8", [8, 0, 2])).get_per_layer("k", 3).tolist() == [8, 0, 2]
    for bad in (
        [8, 0],
        [8, 0, 2, 2],
        [8, 0, -1],
        [0.5, 1.0, 2.0],
        ["1", "2", "3"],
        -1,
        "4",
        Array("uint8", []),
    ):
        with pytest.raises(GgufError, match=r"'k' at byte \d+ has type \w+ and value"):
            opened(tmp_path, bad).get_per_layer("k", 3)
    with pytest.raises(ModelError, match="'absent' is missing"):
        opened(tmp_path, 4).get_per_layer("absent", 3)


def test_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(DynoError, match=r"'u7'.*expected u32"):
        opened(tmp_path, 1).get_as("k", "u7")
