"""Which value a setting has and why; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from dyno._effective import check_arguments, resolve, usable_cores
from dyno.errors import PlanError


def test_precedence_and_origins() -> None:
    settings = resolve(
        {"ubatch": 64}, {"ubatch": (128, "p.yaml:3"), "threads": (7, "p.yaml:4")}, "cpu", 100_000
    )
    assert settings["ubatch"] == 64
    assert settings["threads"] == 7
    assert settings["ctx"] == 4096
    assert {name: settings.origins[name] for name in ("ubatch", "threads", "ctx")} == {
        "ubatch": "argument",
        "threads": "p.yaml:4",
        "ctx": "default",
    }


def test_defaults() -> None:
    settings = resolve({}, {}, "cpu", 2048)
    assert settings["ctx"] == 2048
    assert settings["threads"] == settings["threads_batch"] == usable_cores()
    assert settings["kv_type_k"] == settings["kv_type_v"] == "f16"


def test_defaults_that_follow_arguments() -> None:
    assert resolve({"threads": 3}, {}, "cpu", 64)["threads_batch"] == 3
    assert resolve({"threads": 3, "threads_batch": 5}, {}, "cpu", 64)["threads_batch"] == 5
    assert resolve({"numerics": "exact"}, {}, "cpu", 64)["kv_type_v"] == "f32"


def test_kinds() -> None:
    settings = resolve({}, {}, "cpu", 64)
    some = {
        "load": {"numerics", "cpu_isa", "cpu_repack", "mmap", "placement"},
        "context": {"ctx", "sequences", "cache_tokens", "window_cache", "kv_type_k", "kv_type_v"},
        "session": {"ubatch", "threads", "threads_batch"},
        "scheduler": {"step_tokens", "spec", "spec_max", "spec_min_p"},
    }
    found = {kind: set(settings.of_kind("cpu", kind)) for kind in some}
    for kind, names in some.items():
        assert names <= found[kind]
    assert sum(map(len, found.values())) == len(set().union(*found.values())) == len(settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"thread": 2}, "unknown setting 'thread'; did you mean 'threads'"),
        ({"ctx": 0}, "ctx: must be from 1"),
        ({"ubatch": "64"}, "ubatch: must be a whole number"),
        ({"threads": True}, "threads: must be a whole number"),
        ({"kv_type_k": "F16x"}, "kv_type_k: must be one of"),
        ({"cpu_repack": 1}, "cpu_repack: must be true or false"),
        ({"cuda_graphs": True}, "has no effect on a cpu"),
        ({"batch": 512}, "setting of ik_llama.cpp, llama.cpp"),
    ],
)
def test_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_arguments(arguments, "cpu")


def test_kinds_that_need_the_engine_opened_again() -> None:
    assert check_arguments({"ubatch": 32}, "cpu", kinds=("session",)) == {"ubatch": 32}
    with pytest.raises(PlanError, match=r"'cpu_repack' is a load setting.*open the engine"):
        check_arguments({"cpu_repack": False}, "cpu", kinds=("session",))
    with pytest.raises(PlanError, match=r"'ctx' is a context setting: call set_context\(ctx=32\)"):
        check_arguments({"ctx": 32}, "cpu", kinds=("session",))
