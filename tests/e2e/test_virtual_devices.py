"""Virtual devices behave as devices behind a link: transfers wait, memory ends, and a device can be lost."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dyno
import numpy as np
import pytest
import typer
from dyno._cli.groups import EngineOptions
from dyno.cli import app
from dyno.errors import DeviceLostError, OutOfMemoryError, PlanError
from random_models import Shape, random_model
from typer.testing import CliRunner

if TYPE_CHECKING:
    from collections.abc import Mapping

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny"
MOE = Shape("qwen3moe", ("q8_0",), 256, 4, 2, 64, 0, 300, experts=16, used=2, n_ff_expert=256, n_layers=4)
OPENED: dict[str, Any] = {"profile": None, "ctx": 512, "ubatch": 64, "threads": 1, "device": "cpu"}


def opened(path: Path, limits: Mapping[str, float], **given: Any) -> dyno.Engine:
    return dyno.Engine(path, **{**OPENED, "virtual_devices": {"cpu:1": limits}, **given})


def crossing(engine: dyno.Engine, tokens: int) -> tuple[int, int]:
    """Transfers of one u-batch to and from cpu:1, and their bytes."""
    ops = [op for op in engine.describe_ops(tokens) if op["family"] == "transfer"]
    return sum(op["count"] for op in ops), sum(op["count"] * op["bytes"] // 2 for op in ops)


def test_transfers_wait_for_the_link() -> None:
    """No upper bound: a busy machine may take any time longer."""
    path = TINY / "llama-tiny.gguf"
    slow = {"link_gbps": 0.002, "latency_us": 500}
    with opened(path, slow, placement=["ffn_=cpu:1"]) as engine:
        count, total = crossing(engine, 64)
        assert count >= 4
        started = time.perf_counter()
        engine.logits([1 + i % 90 for i in range(64)], rows="none")
        # The last layer's rows stop at its attention, where no logits are wanted.
        least = (count - 1) * slow["latency_us"] * 1e-6 + total * (count - 2) / count / (
            slow["link_gbps"] * 1e9
        )
        assert time.perf_counter() - started >= 0.8 * least
        times = engine.diagnostics.time_ops([1, 2, 3])
        transfers = [t for t in times if t["family"] == "transfer"]
        assert transfers
        assert all(t["seconds"] >= 500e-6 * t["count"] for t in transfers)


def test_logits_of_a_device_cross_to_the_machine() -> None:
    with opened(TINY / "llama-tiny.gguf", {"latency_us": 20_000}, device="cpu:1") as engine:
        started = time.perf_counter()
        for _ in range(3):
            engine.logits([1, 2, 3], rows="last")
        assert time.perf_counter() - started >= 0.06


def test_a_link_changes_no_answer(tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", MOE)
    tokens = [i % 300 for i in range(100)]
    with dyno.Engine(path, **OPENED) as engine:
        want = engine.logits(tokens)
    limits = {"link_gbps": 4, "latency_us": 20, "memory_mib": 64}
    with opened(path, limits, device="cpu:1", cpu_moe=True) as engine:
        np.testing.assert_array_equal(engine.logits(tokens), want)


def test_a_plan_beyond_the_limit_is_refused_with_a_way_out(tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", MOE)
    with opened(path, {}, device="cpu:1", plan_only=True) as engine:
        whole = next(d for d in engine.plan["devices"] if d["name"] == "cpu:1")
    needed = sum(whole[part] for part in ("weights_bytes", "kv_bytes", "arena_bytes"))
    limits = {"memory_mib": -(-needed // (1 << 20)) - 3}
    with pytest.raises(OutOfMemoryError, match=r"virtual device cpu:1 is .* short") as caught:
        opened(path, limits, device="cpu:1", placement=())
    advised = re.search(r"n_cpu_moe=(\d+)", str(caught.value))
    assert advised, str(caught.value)
    layers = int(advised[1])
    assert 1 <= layers <= 4
    with opened(path, limits, device="cpu:1", n_cpu_moe=layers) as engine:
        held = next(d for d in engine.plan["devices"] if d["name"] == "cpu:1")
        assert (
            sum(held[part] for part in ("weights_bytes", "kv_bytes", "arena_bytes")) <= held["memory_limit"]
        )
        # A larger context is refused, and the engine is what it was.
        before = engine.logits([1, 2, 3])
        with pytest.raises(OutOfMemoryError, match=r"KV cache .* Use"):
            engine.set_context(ctx=4096, sequences=64)
        engine.reset()
        np.testing.assert_array_equal(engine.logits([1, 2, 3]), before)


def test_a_dense_model_beyond_the_limit_is_told_of_layers() -> None:
    path = TINY / "llama-tiny.gguf"
    with pytest.raises(OutOfMemoryError, match=r"n_gpu_layers=\d+ \(frees"):
        opened(path, {"memory_mib": 1}, device="cpu:1", ctx=64, placement=())


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_lost_device_is_a_typed_error(after: int) -> None:
    """Also in the midst of a prompt, of which no token counts then."""
    path = TINY / "qwen3moe-tiny.gguf"
    with opened(path, {}, placement=["exps=cpu:1"], ubatch=8) as engine:
        engine.logits([1, 2, 3, 4])
        engine.diagnostics.lose_device("cpu:1", after)
        with pytest.raises(DeviceLostError, match="virtual device cpu:1 is lost"):
            engine.logits(list(range(1, 30)), reset=False)
        for use in (
            lambda: engine.logits([1]),
            lambda: engine.set(ubatch=4),
            lambda: engine.set_context(ctx=32),
            lambda: engine.position(),
            lambda: next(engine.generate([1, 2], 4)),
        ):
            with pytest.raises(DeviceLostError, match="open the engine again"):
                use()
        for name in ("cpu", "cpu:2"):
            with pytest.raises(PlanError):
                engine.diagnostics.lose_device(name)
    with opened(path, {}, placement=["exps=cpu:1"]) as engine:
        assert len(engine.logits([1, 2, 3])) == 3


def test_options_of_the_command_line(tmp_path: Path) -> None:
    def explain(*words: str) -> tuple[int, str]:
        words = ("explain", "plan", str(TINY / "llama-tiny.gguf"), "--no-profile", "--device", "cpu", *words)
        done = CliRunner().invoke(app, list(words))
        return done.exit_code, done.output

    code, text = explain(
        "--virtual-device", "cpu:1,link_gbps=8,latency_us=10,memory_mib=4096", "-ot", "ffn=cpu:1"
    )
    assert (code, "limit 4096.0 MiB; link 8 GB/s; latency 10 us" in text) == (0, True)
    code, text = explain("--virtual-devices", "cpu:1,link_gbps")
    assert (code, "is not NAME=NUMBER" in text) == (2, True)

    def devices(*texts: str) -> Any:
        return EngineOptions(virtual_devices=list(texts)).placement()["virtual_devices"]

    assert devices("2") == 2
    assert devices("cpu:2,link_gbps=0.5", "cpu:1") == {"cpu:2": {"link_gbps": 0.5}, "cpu:1": {}}
    for wrong in (("2", "cpu:1"), ("cpu:1", "cpu:1"), ("cpu:1,link_gbps=fast",)):
        with pytest.raises(typer.BadParameter):
            devices(*wrong)


def test_what_does_not_fit_is_placed_by_itself(tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", MOE)
    tokens = [i % 300 for i in range(100)]
    limits = {"memory_mib": 2, "link_gbps": 8}
    with dyno.Engine(path, **OPENED) as one, opened(path, limits, device="cpu:1") as engine:
        assert engine.plan["placement"]["note"].startswith("auto: the model takes")
        held = next(d for d in engine.plan["devices"] if d["name"] == "cpu:1")
        assert sum(held[p] for p in ("weights_bytes", "kv_bytes", "arena_bytes")) <= held["memory_limit"]
        np.testing.assert_array_equal(engine.logits(tokens), one.logits(tokens))
        before = engine.plan["tensors"]
        engine.set_context(ctx=256)
        assert engine.plan["tensors"] == before
    with opened(path, {"memory_mib": 512}, device="cpu:1", plan_only=True) as engine:
        assert engine.plan["placement"]["note"] == ""
        assert {t["device"] for t in engine.plan["tensors"]} == {"cpu:1"}
    # All layers is what -ngl all asks for, so nothing is moved.
    chosen = EngineOptions(n_gpu_layers="all", cpu_moe=False, n_cpu_moe=0).placement()
    chosen["virtual_devices"] = {"cpu:1": limits}
    with pytest.raises(OutOfMemoryError):
        dyno.Engine(path, **{**OPENED, **chosen, "device": "cpu:1"})
