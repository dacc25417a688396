"""Writes the seeds of both fuzz targets.

FOLDER/gguf: well-formed files of every kind and each hostile case once, whole and in shards.
FOLDER/session: small models of every architecture, whole and in shards, each with settings of its own.

Usage: make_corpus.py FOLDER
"""

from __future__ import annotations

import struct
import sys
import tempfile
from pathlib import Path

import numpy as np
from dyno import _core
from dyno.testing import (
    BLOCK_GEOMETRY,
    TENSOR_TYPE_IDS,
    Array,
    TensorSpec,
    Typed,
    build_gguf,
    tiny_gguf_split,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "e2e"))
from random_models import Shape, random_model, random_parts

HUGE = (2**32, 2**61, 2**63 - 1, 2**63, 2**64 - 33, 2**64 - 1)
SCALARS = {
    "uint8": 1, "int8": -1, "uint16": 2, "int16": -2, "uint32": 3, "int32": -3, "float32": 0.5, "bool": True,
    "uint64": 4, "int64": -4, "float64": 0.25, "string": "text",
}  # fmt: skip


def well_formed() -> dict[str, bytes]:
    """Every value type, tensor type, version and alignment."""
    rng = np.random.default_rng(0)
    values: dict[str, object] = {f"scalar.{kind}": Typed(kind, value) for kind, value in SCALARS.items()}
    values |= {f"array.{kind}": Array(kind, [value] * 3) for kind, value in SCALARS.items()}
    nested = Array("array", [Array("array", [Array("string", ["a", ""])]), Array("bool", [])])
    files = {
        "empty": build_gguf().data,
        "values": build_gguf(values).data,
        "values-v2": build_gguf(values, version=2).data,
        "nested": build_gguf({"k": nested, "after": 1}).data,
        "split": build_gguf({"split.no": Typed("uint16", 0), "split.count": Typed("uint16", 1)}).data,
    }
    for dtype, (block, size) in BLOCK_GEOMETRY.items():
        data = rng.integers(0, 256, 4 * size, dtype=np.uint8).tobytes()
        files[f"tensor-{dtype}"] = build_gguf({"n": 1}, [TensorSpec("w", (2, 2 * block), dtype, data)]).data
    for t in _core.tensor_types():  # the others: rows that begin with a scale, several rows in a unit
        if t["name"] not in BLOCK_GEOMETRY:
            size = t["rows"] * (t["row_meta_bytes"] + 2 * t["block_bytes"])
            tensor = TensorSpec("w", (t["rows"], 2 * t["block"]), t["id"], rng.bytes(size))
            files[f"tensor-{t['name']}"] = build_gguf({"n": 1}, [tensor]).data
    pair = [TensorSpec.of(name, np.ones((2, 2, 2, 8), np.float32)) for name in ("a.weight", "b.weight")]
    for alignment in (8, 64):
        files[f"alignment-{alignment}"] = build_gguf({"n": 1}, pair, alignment=alignment).data
    return files


def hostile() -> dict[str, bytes]:
    """Counts, lengths, shapes, types and offsets that no file should have."""
    tensor = TensorSpec.of("w", np.zeros((2, 32), np.float32))
    image = build_gguf({"u": 7, "s": "text", "a": ["x", "y"]}, [tensor])
    files = {"big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0)}
    for number in HUGE:
        raw = struct.pack("<Q", number)
        for mark in ("tensor_count", "metadata_count", "key:u", "value:s", "tensor:w", "dims:w", "offset:w"):
            files[f"{mark.replace(':', '-')}-{number}"] = image.patched(mark, raw)
        for element in ("uint8", "bool", "string", "array"):
            lie = build_gguf({"k": Array(element, [], count=number)})
            files[f"array-{element}-{number}"] = lie.data
    for kind in (13, 9999):
        files[f"value-type-{kind}"] = image.patched("type:u", struct.pack("<I", kind))
        files[f"tensor-type-{kind}"] = image.patched("dtype:w", struct.pack("<I", kind))
    for n_dims in (0, 5):
        files[f"dims-{n_dims}"] = image.patched("n_dims:w", struct.pack("<I", n_dims))
    for alignment in (0, 3, 2**31):
        files[f"alignment-{alignment}"] = build_gguf({"general.alignment": alignment}, [tensor]).data
    files["duplicate-keys"] = build_gguf([("k", 1), ("k", 2)]).data
    files["duplicate-tensors"] = build_gguf({}, [tensor, tensor]).data
    files["overlap"] = build_gguf({}, [tensor, TensorSpec("v", (64,), "f32", bytes(256), offset=128)]).data
    files["not-utf8"] = build_gguf([(b"\xff\xc3", Typed("string", b"\xff"))]).data
    inner = struct.pack("<IQ", 9, 1) * 64 + struct.pack("<IQ", 0, 0)
    files["deep"] = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 9) + inner
    for name, at in image.marks[:-1]:
        files[f"truncated-{name.replace(':', '-')}"] = image.data[:at]
    return files


_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


def with_files(files: list[bytes]) -> bytes:
    """The files of an input (input_files.h): their number less one, their sizes, all of them."""
    return (
        bytes([len(files) - 1]) + b"".join(struct.pack("<I", len(data)) for data in files) + b"".join(files)
    )


def splits() -> dict[str, list[bytes]]:
    """Shards that open."""
    tensors = [TensorSpec(f"blk.{i}.weight", (32,), "q8_0", bytes(34)) for i in range(5)]
    files = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in (2, 3):
            prefix = Path(folder) / f"of{count}"
            paths = tiny_gguf_split(prefix, {"general.architecture": "llama"}, tensors, count)
            files[f"of{count}"] = [path.read_bytes() for path in paths]
    return files


def hostile_splits() -> dict[str, list[bytes]]:
    """Shards that must be refused: keys that are missing or wrong, tensors twice, shards of another file."""
    tensor = TensorSpec("w", (8,), "f32", bytes(32))
    wrong = {"other": Typed("uint16", 7), "text": "two", "huge": Typed("uint64", 2**63), "missing": None}
    files = {}
    with tempfile.TemporaryDirectory() as folder:
        for key in _SPLIT_KEYS:
            for kind, value in wrong.items():
                if key == "split.tensors.count" and kind == "missing":
                    continue  # opens: not every tool writes it
                prefix = Path(folder) / f"{key}-{kind}"
                paths = tiny_gguf_split(prefix, {}, [tensor], 2, overrides={2: {key: value}, 1: {key: value}})
                files[f"{key}-{kind}"] = [path.read_bytes() for path in paths]
        paths = tiny_gguf_split(Path(folder) / "twice", {}, [tensor, tensor], 2)
        files["twice"] = [path.read_bytes() for path in paths]
    good = splits()
    files["first-twice"] = [good["of2"][0]] * 2
    files["of-another"] = [good["of2"][0], good["of3"][1]]
    files["swapped"] = good["of2"][::-1]
    files["empty"] = [good["of2"][0], b""]
    return files


def split_inputs() -> dict[str, bytes]:
    """Inputs of the reader's target: mapped (SM) if they open, and copied (SC)."""
    opens = {f"split-{name}": with_files(files) for name, files in splits().items()}
    fails = {f"hostile-split-{name}": with_files(files) for name, files in hostile_splits().items()}
    mapped = {f"{name}-mapped": b"SM" + data for name, data in opens.items()}
    return mapped | {name: b"SC" + data for name, data in (opens | fails).items()}


_SETTINGS_BYTES = 64
_EXPERTS = {"experts": 4, "used": 2, "n_ff_expert": 32}
_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
_MLA = {"rotary": 16, "nope": 32, "v_head": 32, "kv_lora": 32}

SHAPES = [
    Shape("llama", ("q8_0",), 64, 2, 1, 32, 96, 61),
    Shape("llama", ("f32", "f16", "bf16"), 48, 3, 1, 16, 40, 37, tied=True),
    Shape("llama", ("q4_0", "q5_1"), 64, 2, 2, 32, 0, 40, n_layers=1, **_EXPERTS),
    Shape("llama", ("q4_k", "q6_k", "q3_k"), 256, 4, 1, 64, 256, 33, n_layers=1),
    Shape("qwen2", ("q4_1", "q5_0"), 64, 2, 1, 32, 64, 45),
    Shape("qwen2", ("q2_k", "q5_k"), 256, 2, 1, 32, 256, 33, n_layers=1),
    Shape("qwen3", ("iq4_nl", "q8_0"), 64, 2, 1, 32, 64, 51, metadata=_YARN),
    Shape("qwen3", ("iq4_xs",), 256, 2, 1, 128, 256, 33, n_layers=1),
    Shape("qwen3moe", ("q4_0", "q8_0"), 64, 2, 1, 32, 0, 49, **_EXPERTS),
    Shape("qwen3moe", ("q6_k",), 256, 2, 1, 64, 0, 33, n_layers=1, experts=2, used=1, n_ff_expert=256),
    Shape("deepseek2", ("q8_0",), 64, 2, 1, 0, 64, 53, shared=1, q_lora=32, **_EXPERTS, **_MLA),
    Shape(
        "deepseek32", ("q8_0",), 64, 2, 1, 0, 64, 58, shared=1, q_lora=32,
        metadata={"attention.indexer.top_k": 64}, **_EXPERTS, **_MLA,
    ),
    Shape(
        "glm-dsa", ("q8_0",), 64, 2, 1, 0, 64, 59, shared=1, q_lora=32,
        metadata={"attention.indexer.top_k": 64}, **_EXPERTS, **_MLA,
    ),
    Shape("deepseek2", ("q5_0",), 64, 2, 1, 0, 64, 43, shared=1, split_kv_b=False, **_EXPERTS, **_MLA),
    Shape("gemma3", ("q4_0", "q8_0"), 64, 2, 1, 32, 64, 47, n_layers=6, window=5),
    Shape("gpt-oss", ("mxfp4", "q8_0"), 64, 2, 1, 32, 0, 39, window=6, **_EXPERTS),
    Shape("glm4moe", ("q8_0", "q5_1"), 64, 2, 1, 32, 64, 41, rotary=16, shared=1, **_EXPERTS),
    Shape("granitemoe", ("q4_0", "q5_0"), 64, 2, 1, 32, 0, 35, shared=1, **_EXPERTS),
    Shape(
        "bailingmoe2", ("q8_0", "q4_0"), 64, 2, 1, 32, 64, 36, rotary=16,
        shared=1, groups=2, groups_used=1, **_EXPERTS,
    ),
    Shape("ernie4_5-moe", ("q8_0",), 64, 2, 1, 32, 64, 34, shared=2, **_EXPERTS),
    Shape("hunyuan-moe", ("q4_0",), 64, 2, 1, 32, 0, 35, n_layers=1, shared=1, **_EXPERTS),
    Shape("minimax-m2", ("q5_0",), 64, 2, 1, 32, 0, 37, n_layers=1, rotary=16, **_EXPERTS),
    Shape(
        "mistral3", ("q8_0",), 64, 2, 1, 32, 64, 38,
        metadata={**_YARN, "attention.temperature_scale": 0.1},
    ),
    Shape("muse-glimmer", ("q4_1",), 64, 2, 1, 32, 64, 39, n_layers=4, window=5),
    Shape("olmo2", ("q5_1",), 64, 2, 1, 32, 64, 41, n_layers=4, window=6),
    Shape("qwen2moe", ("q4_0",), 64, 2, 1, 32, 0, 43, n_layers=1, shared=1, **_EXPERTS),
    Shape("seed_oss", ("iq4_nl",), 64, 2, 1, 32, 64, 45, n_layers=1),
    Shape(
        "qwen35", ("q4_0", "q8_0"), 64, 2, 1, 32, 64, 47, n_layers=3, rotary=8,
        linear_keys=1, linear_values=2, linear_dim=16,
    ),
    Shape(
        "qwen35moe", ("q8_0",), 64, 2, 1, 32, 0, 48, rotary=8, shared=1,
        linear_keys=1, linear_values=2, linear_dim=16, **_EXPERTS,
    ),
    Shape(
        "qwen3next", ("q8_0",), 64, 2, 1, 32, 0, 49, rotary=8, shared=1,
        linear_keys=1, linear_values=2, linear_dim=16, **_EXPERTS,
    ),
    Shape("lfm2", ("q5_0",), 64, 2, 1, 32, 64, 50, n_layers=3, taps=3, tied=True),
    Shape("lfm2moe", ("q8_0",), 64, 2, 1, 32, 64, 51, n_layers=3, taps=3, tied=True, **_EXPERTS),
    Shape("gemma4", ("q8_0",), 64, 2, 1, 32, 64, 52, window=5, tied=True, full_head_dim=64, **_EXPERTS),
    Shape(
        "gemma4", ("q4_0",), 64, 2, 1, 32, 64, 53, n_layers=4, window=5, tied=True, full_head_dim=64,
        shared_kv=2, layer_input=32,
    ),
    Shape(
        "granitehybrid", ("q8_0",), 64, 2, 1, 32, 32, 54, tied=True, shared=1,
        linear_keys=1, linear_values=2, linear_dim=16, linear_state=16, **_EXPERTS,
    ),
    Shape(
        "nemotron_h", ("q8_0",), 64, 2, 1, 32, 64, 56, n_layers=4,
        linear_keys=1, linear_values=2, linear_dim=16, linear_state=16,
    ),
    Shape(
        "nemotron_h_moe", ("q8_0",), 64, 2, 1, 32, 0, 57, n_layers=4, shared=1,
        linear_keys=1, linear_values=2, linear_dim=16, linear_state=16, **_EXPERTS,
    ),
    Shape("kimi-linear", ("q8_0",), 64, 2, 1, 0, 64, 55, shared=1, linear_dim=32, **_EXPERTS, **_MLA),
    Shape("smollm3", ("q8_0",), 64, 2, 1, 32, 64, 46, n_layers=4, tied=True),
]  # fmt: skip
"""Every architecture and every weight type, as small as they go."""


def session_input(settings: bytes, files: list[bytes]) -> bytes:
    """An input of the session target (gguf_tree.h): settings, then the files."""
    return settings.ljust(_SETTINGS_BYTES, b"\0")[:_SETTINGS_BYTES] + with_files(files)


def sessions() -> dict[str, bytes]:
    """Every shape whole, with settings of zeros and random ones, and every third in shards as well."""
    inputs: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        for index, shape in enumerate(SHAPES):
            rng = np.random.default_rng(index)
            name = f"{index:02}-{shape.name}"
            whole = random_model(Path(folder) / "model.gguf", shape).read_bytes()
            inputs[name] = session_input(b"", [whole])
            inputs[f"{name}-settings"] = session_input(rng.bytes(_SETTINGS_BYTES), [whole])
            if index % 3 == 0:
                keys, tensors = random_parts(shape)
                shards = [
                    path.read_bytes()
                    for path in tiny_gguf_split(Path(folder) / f"s{index}", keys, tensors, 2 + index % 2)
                ]
                inputs[f"{name}-split"] = session_input(rng.bytes(_SETTINGS_BYTES), shards)
    return inputs


def main() -> None:
    folder = Path(sys.argv[1])
    readers = well_formed() | {f"hostile-{name}": data for name, data in hostile().items()} | split_inputs()
    models = sessions()
    for kind, files in (("gguf", readers), ("session", models)):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / kind / name).write_bytes(data)
    size = sum(map(len, models.values()))
    print(f"{folder}: {len(readers)} files, {len(TENSOR_TYPE_IDS)} tensor types")
    print(f"{folder}: {len(models)} models, {size >> 10} KiB")


if __name__ == "__main__":
    main()
