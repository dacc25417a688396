"""The plan of window caches: whether they are the default, their bytes, and the advice to take them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from dyno import _core
from dyno.errors import OutOfMemoryError, ProfileError
from random_models import random_model
from window_shapes import GPT_OSS, SLACK, STEP, WIDE

if TYPE_CHECKING:
    from pathlib import Path

GPU = {
    "kind": "cuda",
    "name": "a GPU",
    "compute_capability": 90,
    "sm_count": 132,
    "memory_bytes": 80 << 30,
}


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("model") / "m.gguf", GPT_OSS)


@pytest.mark.parametrize(
    ("context", "mode"),
    [
        ({"ctx": 4096}, "full"),  # windows would take more than half of it
        ({"ctx": 8192}, "window"),
        ({"ctx": 2048, "sequences": 8}, "full"),
        ({"ctx": 8192, "sequences": 8}, "window"),
        ({"ctx": 8192, "sequences": 8, "cache_tokens": 8192}, "full"),
        ({"ctx": 4096, "cache_tokens": 65536}, "full"),  # more tokens than the context has
    ],
    ids=str,
)
def test_the_default_keeps_windows_if_they_are_half_of_a_cpu_s_rows(
    tmp_path: Path, context: dict[str, int], mode: str
) -> None:
    shape = replace(GPT_OSS, window=128, metadata={**GPT_OSS.metadata, "context_length": 16384})
    path = random_model(tmp_path / "m.gguf", shape)

    def plan(window_cache: str, device: dict[str, Any] | None = None) -> dict[str, Any]:
        more = {"device": device} if device else {}
        s = _core.Session(
            path,
            context={**context, "window_cache": window_cache},
            session={"ubatch": 64},
            plan_only=True,
            **more,
        )
        return dict(s.plan)

    found = plan("auto")
    assert found["settings"]["window_cache"] == mode
    assert found["kv_bytes"] == plan(mode)["kv_bytes"]
    # A GPU maps pieces of 2 MiB, in each of which such small rows would find room for a window.
    assert plan("auto", GPU)["settings"]["window_cache"] == "full"


def test_the_default_is_for_the_devices_of_the_layers(tmp_path: Path) -> None:
    """It was decided for the plan with all layers on the GPU, before their placement was chosen."""
    shape = replace(GPT_OSS, window=128, metadata={**GPT_OSS.metadata, "context_length": 16384})
    path = random_model(tmp_path / "m.gguf", shape)
    rate = {"memory_gbps": 10.0, "gflops_one": 2.0, "gflops_many": 40.0, "launch_us": 3.0}
    s = _core.Session(
        path,
        context={"ctx": 8192},
        session={"ubatch": 64},
        plan_only=True,
        device={**GPU, "memory_bytes": 520 << 20},
        placement={"automatic": True, "rates": {"cpu": rate, "cuda:0": rate}},
    )
    attention = [node for node in s.nodes() if node["key"].startswith("attention")]
    assert {node["device"] for node in attention} == {"cpu"}
    assert s.plan["settings"]["window_cache"] == "window"


@pytest.mark.parametrize(
    ("context", "mode"),
    [
        ({"ctx": 32768}, "full"),
        ({"ctx": 131072}, "window"),
        ({"ctx": 32768, "sequences": 8}, "full"),
        ({"ctx": 131072, "sequences": 8}, "window"),
        ({"ctx": 131072, "sequences": 8, "cache_tokens": 131072}, "full"),
    ],
    ids=str,
)
def test_the_default_keeps_windows_if_they_are_half_of_a_gpu_s_memory(
    tmp_path: Path, context: dict[str, int], mode: str
) -> None:
    """With the rows of gpt-oss: a piece holds 2048 of them."""
    path = random_model(tmp_path / "m.gguf", replace(WIDE, metadata={"context_length": 131072}))

    def plan(window_cache: str) -> dict[str, Any]:
        chosen = {**context, "window_cache": window_cache}
        s = _core.Session(path, context=chosen, session={"ubatch": 64}, plan_only=True, device=GPU)
        return dict(s.plan)

    found = plan("auto")
    assert found["settings"]["window_cache"] == mode
    assert found["kv_bytes"] == plan(mode)["kv_bytes"]
    assert found["window_stride"] == (8 * 2048 if mode == "window" else 0)


def test_the_default_keeps_all_rows_on_a_gpu_that_maps_no_memory(tmp_path: Path) -> None:
    """`window` would be refused there, and the user has asked for nothing."""
    path = random_model(tmp_path / "m.gguf", replace(WIDE, metadata={"context_length": 131072}))

    def plan(window_cache: str = "auto", maps_memory: bool = False) -> dict[str, Any]:
        context = {"ctx": 131072, "window_cache": window_cache}
        gpu = {**GPU, "maps_memory": maps_memory}
        s = _core.Session(path, context=context, session={"ubatch": 64}, plan_only=True, device=gpu)
        return dict(s.plan)

    assert plan(maps_memory=True)["settings"]["window_cache"] == "window"
    found = plan()
    assert found["settings"]["window_cache"] == "full"
    assert found["window_stride"] == 0
    assert found["kv_bytes"] == plan("full")["kv_bytes"] == found["kv_address_bytes"]
    # An explicit choice stays: no GPU is asked before memory is taken.
    assert plan("window")["settings"]["window_cache"] == "window"


def test_memory_by_need_is_no_remedy_on_a_gpu_that_maps_none(tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", replace(WIDE, metadata={"context_length": 131072}))
    context = {"ctx": 65536, "sequences": 2, "window_cache": "full"}
    for maps in (True, False):
        gpu = {**GPU, "maps_memory": maps}
        s = _core.Session(path, context=context, session={"ubatch": 64}, plan_only=True, device=gpu)
        with pytest.raises(OutOfMemoryError) as told:
            s.check_memory(1 << 20)
        for word in ("window_cache=window", "cache_tokens="):
            assert (word in str(told.value)) == maps, told.value


def test_maps_memory_is_true_or_false() -> None:
    with pytest.raises(ProfileError, match="maps_memory is not True or False"):
        _core.device_problem({**GPU, "maps_memory": 1})


def test_the_plan_counts_windows(gpt_oss: Path) -> None:
    def planned(mode: str, device: dict[str, Any] | None = None, **context: int) -> dict[str, Any]:
        made = {"ctx": 4096, "kv_type_k": "f16", "kv_type_v": "f16", "window_cache": mode, **context}
        s = _core.Session(
            gpt_oss,
            context=made,
            session={"ubatch": 64},
            plan_only=True,
            **({"device": device} if device else {}),
        )
        return dict(s.plan)

    row = GPT_OSS.kv_heads * GPT_OSS.head_dim * 2
    full, windowed = planned("full"), planned("window")
    assert full["kv_bytes"] == full["kv_address_bytes"] == windowed["kv_address_bytes"] == 3 * 2 * 4096 * row
    # Two of three layers; where the sequence is, where its decode began, and two checkpoints.
    # Four stops.
    kept = 4 * (9 + SLACK) + STEP + 64 + 4 * 9
    assert windowed["kv_bytes"] == 2 * (4096 + 2 * kept) * row + 2 * 2 * (5 + 4) * 2 * 4096
    few = planned("window", sequences=4, cache_tokens=4096)
    assert few["kv_bytes"] <= planned("full", sequences=4, cache_tokens=4096)["kv_bytes"]
    on_gpu = planned("window", GPU, sequences=1)
    assert on_gpu["kv_bytes"] <= on_gpu["kv_address_bytes"]
    s = _core.Session(
        gpt_oss, context={"ctx": 4096, "window_cache": "full"}, session={"ubatch": 64}, plan_only=True
    )
    with pytest.raises(OutOfMemoryError, match="window_cache=window"):
        s.check_memory(1000)


@pytest.mark.parametrize("device", [None, GPU], ids=["cpu", "gpu"])
def test_windows_are_a_remedy_where_memory_is_short(tmp_path: Path, device: dict[str, Any] | None) -> None:
    path = random_model(tmp_path / "m.gguf", replace(WIDE, metadata={"context_length": 131072}))

    def planned(**context: Any) -> _core.Session:
        made = {"ctx": 131072, **context}
        more = {"device": device} if device else {}
        return _core.Session(path, context=made, session={"ubatch": 64}, plan_only=True, **more)

    full, windowed = planned(window_cache="full"), planned(window_cache="window")
    less = full.plan["kv_bytes"] - windowed.plan["kv_bytes"]
    assert less > 16 << 20
    with pytest.raises(OutOfMemoryError) as told:
        full.check_memory(1 << 20)
    frees = re.search(r"(?<!with )window_cache=window \(frees ([\d.]+) MiB\)", str(told.value))
    assert frees is not None, told.value
    assert abs(float(frees[1]) - less / (1 << 20)) < 1
    with pytest.raises(OutOfMemoryError) as told:
        windowed.check_memory(1 << 20)
    assert re.search(r"(?<!with )window_cache=window", str(told.value)) is None
