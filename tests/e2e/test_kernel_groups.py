"""A build for one model (GGML_CUDA_PROFILE) keeps the groups of GPU kernels that its model needs.

csrc/cmake/cuda_groups.py decides from the profile; the engine knows the groups of each op.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from dyno import _core
from dyno.errors import UnsupportedError
from dyno.profiles.identity import model_from_description
from random_models import SHAPES, Shape, random_model

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
HOPPER = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}

sys.path.insert(0, str(CSRC / "cmake"))
import cuda_groups  # noqa: E402

HEADS = {group for group in cuda_groups.read_groups(CSRC) if group.startswith("heads_")}
EVERY = set(cuda_groups.read_groups(CSRC))
BUILD = _core.build_info()
BUILT = set(BUILD["cuda_groups"]) or EVERY


def kept(profile: dict[str, Any]) -> set[str]:
    return set(cuda_groups.groups_of_model(profile, CSRC))


def profile_of(model: dict[str, Any] | None, *keys: str) -> dict[str, Any]:
    return {"match": {"model": model}, "kernels": {"default": [f"m1 {key}" for key in keys]}}


def attention(dk: int, dv: int, *words: str) -> str:
    return " ".join((f"attention heads=4 kv_heads=1 dk={dk} dv={dv} k=f16 v=f16", *words))


@pytest.mark.skipif(BUILT < EVERY, reason="a build for one model plans no others")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("cache", ["f16", "f32"])
def test_a_build_keeps_what_its_model_needs(tmp_path: Path, shape: Shape, cache: str) -> None:
    """A profile names the heads of its model. All other groups follow from the architecture."""
    path = random_model(tmp_path / "m.gguf", shape)
    context = {"kv_type_k": cache, "kv_type_v": cache}
    session = _core.Session(path, plan_only=True, device=HOPPER, context=context)
    keys = {str(op["key"]) for tokens in (1, 4, 16, 512) for op in session.ops(tokens)}
    needed = {group for key in keys for group in _core.ops.groups(key)}
    heads = [key for key in keys if key.split()[0] in cuda_groups.ATTENTION]
    found = kept(
        profile_of(model_from_description(_core.describe_model(path)).model_dump(mode="json"), *heads)
    )
    assert needed <= found
    several = "several_heads" in cuda_groups.read_architectures(CSRC)[shape.architecture]
    # Shorter contexts of sparse attention have heads of other sizes.
    sparse = any("selected=" in key for key in heads)
    assert found - needed <= (HEADS if several or sparse else set())


WORDS = dict(
    re.findall(r'DYNO_KERNEL_GROUP\((\w+), "([^"]+)"\)', (CSRC / "ops/kernel_groups.def").read_text("utf-8"))
)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_build_refuses_models_without_kernels(tmp_path: Path, shape: Shape) -> None:
    """Before anything runs. On the CPU nothing is left out, and exact attention has kernels for all heads."""
    path = random_model(tmp_path / "m.gguf", dataclasses.replace(shape, types=("f32",)))
    on_cpu = _core.Session(path, plan_only=True, load={"device": "cpu"})
    needed = {
        group for tokens in (1, 16, 64) for op in on_cpu.ops(tokens) for group in _core.ops.groups(op["key"])
    }
    if needed <= BUILT:
        _core.Session(path, plan_only=True, device=HOPPER)
        return
    with pytest.raises(UnsupportedError) as refused:
        _core.Session(path, plan_only=True, device=HOPPER)
    message = str(refused.value)
    (names,) = re.findall(r"this build has no GPU kernels for ([^:]+): GGML_CUDA_PROFILE=", message)
    assert set(names.split(", ")) <= {WORDS[group] for group in needed - BUILT}
    assert f"GGML_CUDA_PROFILE={BUILD['cuda_groups_of']} left such groups out, and kept " in message
    assert "Build without GGML_CUDA_PROFILE, or with a profile of this model; run with device=cpu" in message


def test_every_architecture_is_tried_and_listed() -> None:
    listed = cuda_groups.read_architectures(CSRC)
    assert list(listed) == _core.architectures()
    assert {shape.architecture for shape in SHAPES} == set(listed)
    assert set().union(*listed.values()) <= (EVERY - HEADS) | {"several_heads"}


PROFILES = [
    path
    for path in sorted((ROOT / "profiles").glob("*.yaml"))
    if yaml.safe_load(path.read_text(encoding="utf-8"))["match"]["device"]["kind"] == "cuda"
]


# Their tunes ended before they came to attention.
WITHOUT_ATTENTION = {"h200-qwen3-8b-q8_0", "h200-deepseek2-lite-q4_0"}


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_a_shipped_profile_keeps_what_it_names(path: Path) -> None:
    profile = yaml.safe_load(path.read_text(encoding="utf-8"))
    found = kept(profile)
    keys = list(cuda_groups.keys_of(profile))
    for key in keys:
        assert set(_core.ops.groups(key)) <= found, key
    names_attention = any(key.startswith("attention ") for key in keys)
    assert names_attention == (path.stem not in WITHOUT_ATTENTION)
    if names_attention:
        assert found < EVERY
    else:
        assert found >= HEADS


def test_a_shipped_profile_of_a_llama_keeps_one_size_of_heads() -> None:
    path = ROOT / "profiles" / "h200-llama-8b-q4_k.yaml"
    assert kept(yaml.safe_load(path.read_text(encoding="utf-8"))) == {"heads_128"}


@pytest.mark.parametrize(
    "heads",
    list(
        itertools.product(
            (8, 64, 72, 128, 136, 192, 200, 256, 264, 512, 576, 1024), (64, 128, 256, 512, 1024)
        )
    ),
    ids=str,
)
def test_heads_have_the_groups_of_the_engine(heads: tuple[int, int]) -> None:
    dk, dv = heads
    for words in ((), ("v_in_k",)):
        if words and dv > dk:
            continue
        expected = set(_core.ops.groups(attention(dk, dv, *words)))
        assert cuda_groups.Heads(dk, dv, bool(words)).groups == expected, words


@pytest.mark.parametrize(
    ("model", "keys", "expected"),
    [
        (None, (attention(128, 128),), EVERY),
        ({"architecture": "lama", "experts": 0}, (attention(128, 128),), EVERY),
        ({"architecture": "llama", "experts": 0}, (), HEADS),
        ({"architecture": "llama", "experts": 0}, ("norm n=4096",), HEADS),
        ({"architecture": "llama"}, (attention(64, 64),), {"heads_64", "experts"}),
        ({"architecture": "llama", "experts": 8}, (attention(64, 64),), {"heads_64", "experts"}),
        ({"architecture": "gemma4", "experts": 0}, (attention(256, 256),), HEADS),
        # Prompts of latent attention have heads whose size only their key names.
        ({"architecture": "deepseek2"}, (attention(576, 512, "v_in_k"),), HEADS | {"latent", "experts"}),
        ({"architecture": "deepseek2"}, (attention(192, 128),), HEADS | {"latent", "experts"}),
        (
            {"architecture": "deepseek2"},
            (attention(576, 512, "v_in_k"), attention(192, 128)),
            {"heads_192", "heads_256", "latent", "experts"},
        ),
        # Kernels that a profile names stay, whatever its model.
        (
            {"architecture": "llama", "experts": 0},
            (attention(128, 128), "moe_sum n=64 used=2", "rope_attention heads=4 kv_heads=1 dk=64 dv=64"),
            {"heads_64", "heads_128", "experts"},
        ),
    ],
    # A set prints its members in another order in each process of a parallel run.
    ids=lambda value: " ".join(sorted(value)) if isinstance(value, set) else str(value),
)
def test_a_group_goes_only_with_proof(model: Any, keys: tuple[str, ...], expected: set[str]) -> None:
    assert kept(profile_of(model, *keys)) == expected


def test_kernels_with_configurations_keep_their_groups() -> None:
    profile = profile_of({"architecture": "llama", "experts": 0}, attention(128, 128))
    profile["kernels"][attention(64, 64)] = {"m1": {"variant": "rows", "splits": 1}}
    assert kept(profile) == {"heads_64", "heads_128"}
