"""Any placement over virtual devices gives the logits of one device bit for bit."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dyno
import numpy as np
import pytest
from dyno._cli.groups import EngineOptions
from dyno.cli import app
from dyno.errors import DeviceError, PlanError
from random_models import Shape, random_model
from typer.testing import CliRunner

if TYPE_CHECKING:
    from numpy.typing import NDArray

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny"
NAMES = sorted(p.name.removesuffix("-tiny.gguf") for p in TINY.glob("*-tiny.gguf"))
# Quantised weights meet int8 rows, which cross by themselves; types that differ, experts, latents.
SHAPES = [
    Shape("llama", ("q4_0", "q6_k"), 256, 4, 2, 64, 256, 100, tied=True),
    Shape("qwen3moe", ("q4_0", "q8_0"), 96, 3, 1, 32, 0, 100, experts=6, used=2, n_ff_expert=64),
    Shape(
        "deepseek2",
        ("q8_0", "q5_0"),
        96,
        3,
        3,
        0,
        64,
        100,
        rotary=32,
        nope=32,
        v_head=32,
        kv_lora=64,
        q_lora=64,
        experts=6,
        used=2,
        n_ff_expert=32,
        shared=1,
        groups=2,
        groups_used=1,
    ),
    # The selection of layer 0 crosses to layer 1.
    Shape(
        "glm-dsa", ("q8_0", "q5_0"), 96, 3, 1, 0, 64, 100, rotary=32, nope=32, v_head=32, kv_lora=64,
        metadata={"attention.indexer.top_k": 6, "attention.indexer.types": [True, False]},
        q_lora=64, experts=6, used=2, n_ff_expert=32, shared=1,
    ),
]  # fmt: skip
SPLITS: dict[str, dict[str, Any]] = {
    "layer": {"placement": [r"blk\.1\.=cpu:1"]},
    "ffn": {"placement": ["ffn_=cpu:1"]},
    "products": {"placement": [r"(attn_q|ffn_(up|down)).*weight=cpu:1", "attn_k=cpu:2", "output=cpu:2"]},
    "norms": {"placement": ["norm=cpu:2", "token_embd=cpu:1"]},
    "ngl": {"device": "cpu:1", "n_gpu_layers": 2},
}
OPENED: dict[str, Any] = {
    "device": "cpu",
    "profile": None,
    "ctx": 96,
    "ubatch": 8,
    "sequences": 3,
    "threads": 2,
}


def answers(engine: dyno.Engine) -> list[NDArray[Any]]:
    """Prompts of several u-batches, of several sequences at once, and single tokens behind them."""
    rng = np.random.default_rng(0)
    n_vocab = int(engine.model["n_vocab"])

    def tokens(count: int) -> list[int]:
        return [int(t) for t in rng.integers(0, n_vocab, count)]

    found = [engine.logits(tokens(21)), engine.logits(tokens(13), reset=False, rows="last")]
    for lengths in ((19, 3, 6), (1, 1, 1), (1, 10, 1)):
        batch = {slot: tokens(count) for slot, count in enumerate(lengths)}
        found += engine.logits_batch(batch, reset=lengths[0] > 1, rows="last").values()
    engine.logits(tokens(5), reset=False, rows="none", slot=1)
    return [*found, engine.logits(tokens(2), reset=False, slot=1)]


def check(path: Path, splits: list[str]) -> None:
    with dyno.Engine(path, **OPENED) as engine:
        want = answers(engine)
    for split in splits:
        with dyno.Engine(path, **{**OPENED, "virtual_devices": 2, **SPLITS[split]}) as engine:
            devices = {node["device"] for node in engine.describe_nodes()}
            assert len(devices) > 1, split
            for got, one in zip(answers(engine), want, strict=True):
                np.testing.assert_array_equal(got, one, err_msg=f"{split} on {sorted(devices)}")


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture(name: str) -> None:
    check(TINY / f"{name}-tiny.gguf", ["products", "layer"] if name == "deepseek2-lite" else list(SPLITS))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.architecture)
def test_quantised_weights(shape: Shape, tmp_path: Path) -> None:
    check(random_model(tmp_path / "m.gguf", shape), list(SPLITS))


@pytest.mark.parametrize(
    "placement", [{"cpu_moe": True}, {"n_cpu_moe": 1}, {"placement": ["_(up|down)_exps=CPU"]}]
)
def test_experts_on_the_cpu(placement: dict[str, Any], tmp_path: Path) -> None:
    """Routing that was captured and pinned sends all rows through the last layer."""
    path = random_model(tmp_path / "m.gguf", SHAPES[1])
    tokens = [3, 50, 7, 9, 11, 13, 2, 1, 99, 4, 8]
    found = []
    for where in ({}, {"device": "cpu:1", "virtual_devices": 1, **placement}):
        with dyno.Engine(path, **{**OPENED, **where}) as engine:
            logits, routing = engine.diagnostics.logits_with_routing(tokens, rows="last")
            found.append((logits, routing, engine.diagnostics.logits(tokens, pinned_routing=routing)))
    for one, several in zip(*found, strict=True):
        np.testing.assert_array_equal(one, several)


def test_generated_text_and_settings() -> None:
    path = TINY / "qwen3moe-tiny.gguf"
    texts = []
    for split in ({}, {"virtual_devices": 2, **SPLITS["products"]}):
        with dyno.Engine(path, **{**OPENED, **split}) as engine:
            engine.set(ubatch=5)
            engine.set_context(ctx=64)
            texts.append("".join(engine.generate([1, 2, 3, 4, 5, 6, 7], 12, temperature=1.0, seed=7)))
    assert texts[0] == texts[1] != ""


def test_errors_reach_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    path = TINY / "llama-tiny.gguf"

    def opened(**given: Any) -> None:
        dyno.Engine(path, profile=None, plan_only=True, **{"device": "cpu", **given}).close()

    for given, message in (
        ({"placement": "no_such=CPU"}, "'no_such=CPU' matches no tensor"),
        ({"placement": ["attn_q=cpu:1"]}, "names device 'cpu:1'; this plan has cpu; .*virtual_devices"),
        ({"placement": [3]}, "3 is not a rule"),
        ({"virtual_devices": "2"}, "virtual_devices is '2'"),
        ({"virtual_devices": 17}, "virtual_devices is 17; expected 0 to 16"),
        ({"virtual_devices": {"gpu": {}}}, "'gpu' is not a virtual device"),
        ({"virtual_devices": {"cpu:1": 8}}, "the properties of cpu:1 are 8"),
        ({"virtual_devices": {"cpu:1": {"link_gbs": 8}}}, "'link_gbs'; did you mean 'link_gbps'"),
        ({"virtual_devices": {"cpu:1": {"link_gbps": 0}}}, "link_gbps of cpu:1 is 0; expected GB/s above 0"),
        ({"virtual_devices": {"cpu:1": {"memory_mib": 1.5}}}, "memory_mib of cpu:1 is 1.5"),
        ({"n_gpu_layers": True}, "n_gpu_layers is True"),
        ({"cpu_moe": 1}, "cpu_moe is 1"),
        ({"cpu_moe": True}, "has no experts"),
    ):
        with pytest.raises(PlanError, match=message):
            opened(**given)
    with pytest.raises(
        DeviceError, match=r"'cpu:2' is a virtual device that does not exist; .*virtual_devices=2"
    ):
        opened(device="cpu:2", virtual_devices=1)
    with caplog.at_level(logging.WARNING, "dyno"):
        opened(n_gpu_layers=99)
    assert "n_gpu_layers=99 has no effect with device cpu" in caplog.text
    idle = "virtual devices have no effect: they hold no weights"
    assert idle not in caplog.text
    with caplog.at_level(logging.WARNING, "dyno"):
        opened(device="cpu:1", virtual_devices=1)
        opened(virtual_devices=2, split="layer")
        opened(virtual_devices=1, placement=["output=cpu:1"])
        assert idle not in caplog.text
        opened(virtual_devices=1)
    assert idle in caplog.text


def test_options_of_the_command_line() -> None:
    def dyno_explain(*words: str) -> tuple[int, str]:
        path = str(TINY / "qwen3moe-tiny.gguf")
        done = CliRunner().invoke(app, ["explain", "plan", path, "--no-profile", *words])
        return done.exit_code, done.output + str(done.exception)

    code, text = dyno_explain(
        "-ot", r"ffn_.*_exps=cpu:1,attn_q=CPU", "--virtual-device", "1", "--nodes", "--device", "cpu"
    )
    assert code == 0
    assert "general [cpu:1] blk.0.moe_up_gate: moe_up_gate " in text
    assert "general [cpu:1] blk.0.expert_ids to cpu:1: transfer row=" in text
    assert "segments of one device" in text
    where = ["--device", "cpu:1", "--virtual-devices", "1", "--json"]
    for words, moved in ((["-ncmoe", "1"], 3), (["-cmoe"], 9), (["-ngl", "all"], 0), (["-ngl", "0"], None)):
        code, text = dyno_explain(*where, *words)
        assert code == 0, text
        tensors = json.loads(text[text.index("{") : text.rindex("}") + 1])["tensors"]
        count = sum(tensor["device"] == "cpu" for tensor in tensors)
        assert count == (len(tensors) if moved is None else moved)
    assert dyno_explain("-ngl", "many")[0] == 2


def test_rules_between_commas() -> None:
    def rules(*texts: str) -> list[str]:
        return list(EngineOptions(override_tensor=list(texts)).placement()["placement"])

    assert rules("a=CPU,b=cpu:1", "c=cuda:0") == ["a=CPU", "b=cpu:1", "c=cuda:0"]
    assert rules(r"blk\.\d{1,2}\.ffn=CPU,x=CUDA0") == [r"blk\.\d{1,2}\.ffn=CPU", "x=CUDA0"]
    assert rules("a,b") == ["a,b"]  # no device: the plan says so
