"""The most used experts of the CPU also lie on the main device; answers stay the same bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import Engine, _core, _expert_use, _progress, _rates, cli
from dyno.errors import OutOfMemoryError, PlanError, ProfileError
from dyno.testing import tiny_model
from random_models import Shape, random_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny"
TEXT = TINY.parent / "eval.txt"
MOE = TINY / "qwen3moe-tiny.gguf"
# An expert takes 162 KiB in q4_0, and 16 of them in 4 layers 10 MiB.
LARGE = Shape(
    "qwen3moe", ("q4_0", "q4_0"), 384, 3, 1, 32, 0, 100, n_layers=4, experts=16, used=2, n_ff_expert=256
)
CONTEXT = {"ctx": 96, "sequences": 3}


def experts_of(path: Path) -> tuple[int, int, int]:
    """Layers with experts, experts, experts that a token uses."""
    model = _core.describe_model(str(path))
    return tuple(int(model[name]) for name in ("moe_layers", "experts", "experts_used"))  # type: ignore[return-value]


WITH_EXPERTS = sorted(path for path in TINY.glob("*-tiny.gguf") if experts_of(path)[1] > 0)


def opened(
    path: Path, mib: int = 1, uses: Any = None, *, streams: bool = False, load: Any = None, **given: Any
) -> _core.Session:
    placement = {"virtual_devices": [{"streams": streams}], "cpu_moe": True, **given.pop("placement", {})}
    if uses is not None:
        placement["expert_uses"] = uses
    return _core.Session(
        path,
        load={"device": "cpu:1", "expert_cache_mib": mib, **(load or {})},
        context=CONTEXT,
        session={"ubatch": 8, "threads": 2, "offload_min_tokens": 1},
        placement=placement,
        **given,
    )


def cached(session: _core.Session) -> dict[str, int]:
    """Bytes of the cached experts' weights by name."""
    return {t["name"]: t["bytes"] for t in session.plan["tensors"] if t["name"].endswith("(cached)")}


def tokens(session: _core.Session, count: int, seed: int = 0) -> NDArray[np.int32]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, session.model["n_vocab"], count).astype(np.int32)


def answers(session: _core.Session) -> list[NDArray[np.float32]]:
    """Prompts of several u-batches, of several sequences at once, and single tokens behind them."""
    session.reset()
    found = [session.decode([(0, tokens(session, 21))], "all")[0]]
    batch = [(slot, tokens(session, count, slot)) for slot, count in enumerate((3, 9, 6))]
    found.append(session.decode(batch, "last")[0])
    found.append(session.decode([(slot, tokens(session, 1, slot)) for slot in range(3)], "last")[0])
    return [*found, session.decode([(1, tokens(session, 2))], "all")[0]]


def same(got: list[NDArray[np.float32]], want: list[NDArray[np.float32]], what: str) -> None:
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=what)


@pytest.mark.parametrize("numerics", ["default", "exact"])
@pytest.mark.parametrize("path", WITH_EXPERTS, ids=lambda path: path.stem)
def test_every_architecture(path: Path, numerics: str) -> None:
    load = {"numerics": numerics}
    want = answers(_core.Session(path, load=load, context=CONTEXT, session={"ubatch": 8, "threads": 2}))
    layers, experts, _ = experts_of(path)
    rng = np.random.default_rng(5)
    some = rng.integers(0, 3, (layers, experts))
    some[-1] = 0  # no expert of the last layer is cached
    some[0, 0] = 1
    for uses in (some, np.ones((layers, experts), int), np.eye(layers, experts, dtype=int)):
        for streams in (False, True):
            session = opened(path, uses=uses.tolist(), streams=streams, load=load)
            assert cached(session)
            same(answers(session), want, f"{uses} {streams}")


def test_hits_are_counted() -> None:
    """By the routing itself: of one token at a time and of several sequences."""
    layers, experts, used = experts_of(MOE)
    uses = np.zeros((layers, experts), int)
    uses[:, ::3] = 1  # few enough for the cache
    session = opened(MOE, uses=uses.tolist())
    assert session.experts == {"chosen": 0, "cached": 0, "swapped": 0}
    chosen = hits = 0
    for batch in ([(0, tokens(session, 7))], [(0, tokens(session, 1)), (2, tokens(session, 4, 2))]):
        routing = session.decode(batch, "last", capture_routing=True)[1]
        chosen += routing.size
        hits += int((routing % 3 == 0).sum())
        assert session.experts == {"chosen": chosen, "cached": hits, "swapped": 0}
    assert 0 < hits < chosen == 12 * layers * used


def test_cached_experts_do_not_cross_for_prompts() -> None:
    layers, experts, _ = experts_of(MOE)
    uses = np.zeros((layers, experts), int)
    uses[:, 1::3] = 1
    with_cache, without = opened(MOE, uses=uses.tolist(), streams=True), opened(MOE, 0, streams=True)
    same(answers(with_cache), answers(without), "streamed")
    few, all_of_them = with_cache.streamed, without.streamed
    assert few["wanted"] == all_of_them["wanted"]
    assert few["matrices"] + few["cached"] == all_of_them["matrices"]
    assert all_of_them["cached"] == 0
    each = all_of_them["bytes"] // all_of_them["matrices"]  # gate, up and down are alike
    assert few["bytes"] == each * few["matrices"] < all_of_them["bytes"]
    # Of one u-batch in which each layer is used once, by its routing.
    session = opened(MOE, uses=uses.tolist(), streams=True)
    routing = session.decode([(0, tokens(session, 8))], "last", capture_routing=True)[1]
    hits = sum(len([e for e in np.unique(layer) if e % 3 == 1]) for layer in routing)
    assert session.streamed["cached"] == 3 * hits > 0


def test_the_most_used_experts_fill_the_cache(tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", LARGE)
    uses = np.arange(4 * 16).reshape(4, 16)
    np.random.default_rng(2).shuffle(uses.reshape(-1))
    session = opened(path, 2, uses.tolist())
    found = cached(session)
    each = sum(found.values()) / sum(count_of(session))
    assert 2 << 20 >= sum(found.values()) > (2 << 20) - each
    most = np.sort(uses.reshape(-1))[-sum(count_of(session)) :]
    assert count_of(session) == [int(np.isin(layer, most).sum()) for layer in uses]
    plain = _core.Session(path, context=CONTEXT, session={"ubatch": 8, "threads": 2})
    same(answers(session), answers(plain), "2 MiB")
    # Without a record each layer has as many, but for the rest of a division.
    even = count_of(opened(path, 2, plan_only=True))
    assert sum(even) == sum(count_of(session))
    assert max(even) - min(even) <= 1


def count_of(session: _core.Session) -> list[int]:
    """Cached experts by layer, from the keys of the ops that multiply by them."""
    found = [0, 0, 0, 0]
    for node in session.nodes():
        if node["list"] == "general" and node["name"].endswith("moe_down (cached)"):
            words = dict(word.split("=") for word in node["key"].split() if "=" in word)
            found[node["layer"]] = int(words["experts"])
    return found


def test_the_cache_counts_in_the_memory_of_the_device(tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", LARGE)
    without, full = (opened(path, mib, plan_only=True).plan["devices"][0] for mib in (0, 4))
    assert 3 << 20 < full["weights_bytes"] - without["weights_bytes"] <= 4 << 20
    limit = sum(without[name] for name in ("weights_bytes", "kv_bytes", "arena_bytes")) + (3 << 20)
    tight = {"virtual_devices": [{"memory_mib": limit / (1 << 20)}]}
    with pytest.raises(OutOfMemoryError, match="expert_cache_mib"):
        opened(path, 4, placement=tight)
    opened(path, 1, placement=tight)


def test_placement_by_itself_leaves_room_for_the_cache(tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", LARGE)
    whole = opened(path, 0, plan_only=True, placement={"cpu_moe": False}).plan["devices"][0]
    needs = sum(whole[name] for name in ("weights_bytes", "kv_bytes", "arena_bytes"))

    def placed(mib: int, memory: float) -> dict[str, Any]:
        limits = [{"memory_mib": memory / (1 << 20)}]
        rates = {"memory_gbps": 100, "gflops_one": 100, "gflops_many": 1000}
        slow = {name: rate / 10 for name, rate in rates.items()}
        auto = {
            "virtual_devices": limits, "cpu_moe": False, "automatic": True,
            "rates": {"cpu": slow, "cpu:1": rates},
        }  # fmt: skip
        return dict(opened(path, mib, placement=auto).plan)

    fits = placed(2, needs + 4096)
    assert fits["placement"]["n_cpu_moe"] == 0
    assert not [t for t in fits["tensors"] if "cached" in t["name"]]
    # Beside a cache there is room for fewer of the other weights.
    few, more = placed(0, needs - 4096), placed(3, needs - 4096)

    def on_the_cpu(plan: dict[str, Any]) -> int:
        return sum(one["weights_bytes"] for one in plan["devices"] if one["name"] == "cpu")

    assert on_the_cpu(more) >= on_the_cpu(few) + (2 << 20) > 2 << 20


def test_a_changed_context_keeps_the_cache() -> None:
    session = opened(MOE)
    before = answers(session)
    names = cached(session)
    session.set_context({"ctx": 64, "sequences": 3})
    session.set({"ubatch": 5, "op_offload.matmul_id": False})
    assert cached(session) == names
    session.set({"ubatch": 8})
    same(answers(session), before, "after set_context")


def test_where_nothing_is_to_cache() -> None:
    for placement in ({"cpu_moe": False}, {"cpu_moe": False, "rules": [r"blk\.1\.ffn_down_exps=CPU"]}):
        assert not cached(opened(MOE, placement=placement, plan_only=True))
    assert not cached(_core.Session(MOE, load={"expert_cache_mib": 8}, context=CONTEXT, plan_only=True))


def test_experts_that_a_gpu_cannot_read_stay_on_the_cpu(tmp_path: Path) -> None:
    """A GPU reads q8_kv as q8_16, of which rows of 96 values are no whole blocks."""
    machine = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}
    for dtypes, layers in (({"blk.0.ffn_down_exps.weight": "q8_kv"}, ["1"]), ({}, ["0", "1"])):
        path = tiny_model(
            tmp_path / "m.gguf", "qwen3moe", n_embd=256, n_ff_expert=96, dtype="q8_0", dtypes=dtypes
        )
        session = _core.Session(
            path,
            load={"expert_cache_mib": 8},
            placement={"cpu_moe": True},
            plan_only=True,
            device=machine,
        )
        assert sorted({name.split(".")[1] for name in cached(session)}) == layers


def test_wrong_records_are_refused(tmp_path: Path) -> None:
    layers, experts, _ = experts_of(MOE)
    with pytest.raises(PlanError, match=f"have {experts + 1} experts"):
        opened(MOE, uses=np.ones((layers, experts + 1), int).tolist())
    with pytest.raises(PlanError, match="have 1 layers"):
        opened(MOE, uses=np.ones((1, experts), int).tolist())
    more = np.ones((layers + 1, experts), int).tolist()
    with pytest.raises(
        PlanError, match=f"have {layers + 1} layers with experts, but this model has {layers}"
    ):
        opened(MOE, uses=more)
    # Also where nothing would be cached.
    with pytest.raises(PlanError, match=f"have {layers + 1} layers"):
        opened(MOE, uses=more, placement={"cpu_moe": False})
    assert cached(opened(MOE, uses=more[:layers], load={"layers": 1}))  # the first layers of the model
    with pytest.raises(PlanError, match="-3"):
        opened(MOE, uses=np.full((layers, experts), -3).tolist())
    with pytest.raises(PlanError, match="expert_cache_mib is -1"):
        opened(MOE, -1)
    fractions, wide, flags = ([[1.5, 2.0]], [[1 << 63]], [[True, False]])
    for content in (
        "[]", '{"model": "x", "tokens": 1, "counts": [1, 2]}', "{", '{"counts": [[1]]}',
        *(json.dumps({"model": "x", "tokens": 1, "counts": counts}) for counts in (fractions, wide, flags)),
    ):  # fmt: skip
        file = tmp_path / "use.json"
        file.write_text(content)
        with pytest.raises(PlanError, match=r"\[experts\]"):
            Engine(MOE, "cpu:1", virtual_devices=1, cpu_moe=True, expert_use=file)
    _expert_use.ExpertUse("another", 3, np.ones((layers, experts), np.int64)).write(file)
    with pytest.raises(PlanError, match="of the model another"):
        Engine(MOE, "cpu:1", virtual_devices=1, cpu_moe=True, expert_use=file, expert_cache_mib=1)


def test_a_record_is_a_file_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use = _expert_use.ExpertUse("some", 3, np.ones((2, 4), np.int64))
    assert use != _expert_use.ExpertUse("some", 3, np.ones((2, 4), np.int64))  # and no error of an array
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    use.write(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert _expert_use.ExpertUse.read(tmp_path / "real.json").tokens == 3
    mask = os.umask(0o027)
    try:
        use.write(tmp_path / "new" / "use.json")
    finally:
        os.umask(mask)
    assert (tmp_path / "new" / "use.json").stat().st_mode & 0o777 == 0o640
    with pytest.raises(ProfileError, match=r"\[experts\] .*cannot be written"):
        use.write(tmp_path / "real.json" / "below.json")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _expert_use.kept("abc") == tmp_path / "dyno" / "experts" / "abc.json"
    assert _expert_use.kept("") is None


def test_only_the_beginning_of_a_text_is_encoded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "long.txt"
    file.write_text(TEXT.read_text(encoding="utf-8") * 2, encoding="utf-8")
    with Engine(MOE, "cpu", profile=None) as engine:
        tokenizer = engine.tokenizer
        whole = tokenizer.encode(file.read_text(encoding="utf-8"))
        lengths: list[int] = []
        encode = tokenizer.encode
        monkeypatch.setattr(tokenizer, "encode", lambda text: lengths.append(len(text)) or encode(text))
        for most in (1, 300, 5000):
            with file.open(encoding="utf-8") as stream:
                assert _expert_use.first_tokens(tokenizer, stream, most) == whole[:most]
        assert max(lengths) < 0.2 * file.stat().st_size
        with file.open(encoding="utf-8") as stream:
            assert _expert_use.first_tokens(tokenizer, stream, len(whole) + 1) == whole


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of a command."""
    monkeypatch.setattr(sys, "argv", ["dyno", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_a_text_is_counted_kept_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments: dict[str, Any] = {
        "device": "cpu:1", "virtual_devices": 1, "cpu_moe": True, "profile": None, "expert_cache_mib": 3,
        "ctx": 64,
    }  # fmt: skip
    assert run(monkeypatch, "experts", str(MOE)) == 1
    assert "there are no recorded counts for" in capsys.readouterr().err
    text = ("--text", str(TEXT), "--tokens", "300", "--json")
    assert run(monkeypatch, "experts", str(MOE), "--device", "cpu", *text) == 0
    printed = json.loads(capsys.readouterr().out)
    layers, experts, used = experts_of(MOE)
    counts = np.array(printed["counts"])
    assert counts.shape == (layers, experts)
    assert (counts.sum(axis=1) == 300 * used).all()
    with Engine(MOE, "cpu", profile=None) as engine:
        ids = engine.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:300]
        routing = engine.diagnostics.logits_with_routing(ids[:300])[1]
        again = _expert_use.count(engine, ids, 512)
        np.testing.assert_array_equal(
            again, [np.bincount(layer.reshape(-1), minlength=experts) for layer in routing]
        )
        other = np.random.default_rng(3).integers(0, engine.model["n_vocab"], 40)
        routing = engine.diagnostics.logits_with_routing(other)[1]
    assert run(monkeypatch, "experts", str(MOE), "-o", str(tmp_path / "use.json")) == 0
    capsys.readouterr()
    kept = Engine(MOE, **arguments)
    given = Engine(MOE, **arguments, expert_use=tmp_path / "use.json")
    for engine in (kept, given):
        engine.logits(other)
        choices = engine.expert_choices
        assert choices["chosen"] == 40 * used * layers
        pairs = zip(routing, counts, strict=True)
        hits = sum(int(np.isin(layer, np.nonzero(count)[0]).sum()) for layer, count in pairs)
        assert choices["cached"] == hits
        engine.close()
    placed = ("--device", "cpu:1", "--virtual-devices", "1", "--cpu-moe", "--no-profile")
    short = ("-p", "8", "-n", "2", "-r", "1", "--no-warmup", "--set", "expert_cache_mib=1")
    assert run(monkeypatch, "bench", str(MOE), *placed, *short) == 0
    told = capsys.readouterr().err
    assert re.search(
        r"expert cache \(pp8\): [0-9.]+ % hits in [0-9]+ choices of experts(;.*)?$", told, re.MULTILINE
    )


def test_the_command_takes_the_options_of_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = (
        "--device", "cpu:1", "--virtual-devices", "1", "--cpu-moe", "--vram", "64MiB", "-ngl", "all",
        "-t", "1", "--no-profile",
    )  # fmt: skip
    text = ("--text", str(TEXT), "--tokens", "100")
    file = tmp_path / "use.json"
    steps: list[int] = []

    @contextlib.contextmanager
    def progress(label: str, total: int) -> Iterator[Callable[[int, str], None]]:
        steps.append(total)
        yield lambda done, note: steps.append(done)

    monkeypatch.setattr(_progress, "progress", progress)
    assert run(monkeypatch, "experts", str(MOE), *text, *options, "--set", "ctx=48", "-o", str(file)) == 0
    assert _expert_use.ExpertUse.read(file).tokens == 100
    assert steps == [100, 48, 48, 4]
    assert not (tmp_path / "dyno").exists()
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--tokens", "5"), "--text"),
        (("--device", "cpu"), "--text"),
        (("--set", "ctx=64"), "--text"),
        (("-t", "1"), "--text"),
        (("--text", str(TEXT), "--set", "layers=1"), "layers shortens the model"),
    ],
)
def test_options_that_would_do_nothing_or_harm_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...], told: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run(monkeypatch, "experts", str(MOE), *words) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "dyno").exists()


def test_a_model_without_experts_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = str(TINY / "llama-tiny.gguf")
    for words in ((), ("--text", "no-such-file")):
        assert run(monkeypatch, "experts", dense, *words) == 1
        assert "is not a mixture of experts" in capsys.readouterr().err


def test_a_use_without_a_cache_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layers, experts, _ = experts_of(MOE)
    model = _expert_use.fingerprint(_core.Gguf(str(MOE)))
    _expert_use.ExpertUse(model, 3, np.ones((layers, experts), np.int64)).write(tmp_path / "use.json")
    given: dict[str, Any] = {"virtual_devices": 1, "cpu_moe": True, "profile": None}
    with Engine(MOE, "cpu:1", **given, expert_use=tmp_path / "use.json"):
        assert "expert_use has no effect, because expert_cache_mib is 0" in caplog.text
    caplog.clear()
    with Engine(MOE, "cpu:1", **given, expert_use=tmp_path / "use.json", expert_cache_mib=1):
        assert caplog.text == ""


def test_an_unknown_use_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with Engine(MOE, "cpu:1", virtual_devices=1, cpu_moe=True, profile=None, expert_cache_mib=1):
        assert "dyno experts" in caplog.text


def test_a_cache_that_the_placement_chose_computes_the_same(tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", LARGE)
    whole = opened(path, 0, plan_only=True, placement={"cpu_moe": False}).plan["devices"][0]
    needs = sum(whole[name] for name in ("weights_bytes", "kv_bytes", "arena_bytes"))
    rates = {"memory_gbps": 100, "gflops_one": 100, "gflops_many": 1000}
    auto = {
        "virtual_devices": [{"memory_mib": (needs - (4 << 20)) / (1 << 20)}], "cpu_moe": False,
        "automatic": True, "choose_cache": True,
        "rates": {"cpu": {name: rate / 100 for name, rate in rates.items()}, "cpu:1": rates},
    }  # fmt: skip
    uses = [[1000, 500, 250, *[1] * 13]] * 4
    session = opened(path, 0, uses, placement=auto)
    assert session.plan["settings"]["expert_cache_mib"] > 0
    assert cached(session)
    same(answers(session), answers(opened(path, 0)), "as without a cache")
    assert session.experts["cached"] > 0


@pytest.mark.parametrize(("given", "chooses"), [({}, True), ({"expert_cache_mib": 0}, False)])
def test_an_engine_leaves_the_size_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, int], chooses: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = random_model(tmp_path / "m.gguf", LARGE)
    fast = {"memory_gbps": 100.0, "gflops_one": 100.0, "gflops_many": 1000.0}
    rates = {"cpu": {name: rate / 100 for name, rate in fast.items()}, "cpu:1": fast}
    monkeypatch.setattr(_rates, "known", lambda devices, threads, measure_missing: rates)
    file = _core.Gguf(str(path))
    uses = np.array([[1000, 500, 250, *[1] * 13]] * 4)
    use = tmp_path / "use.json"
    _expert_use.ExpertUse(_expert_use.fingerprint(file), 100, uses).write(use)
    size = sum(int(tensor["nbytes"]) for tensor in file.tensors()) / (1 << 20)
    virtual: dict[str, dict[str, float]] = {"cpu:1": {"memory_mib": round(size * 0.7)}}
    with Engine(
        path, "cpu:1", profile=None, virtual_devices=virtual, expert_use=use, ctx=32, **given
    ) as engine:
        assert ("expert_cache_mib=" in engine.plan["placement"]["note"]) == chooses


@pytest.mark.parametrize(
    ("device", "mib", "reason"),
    [
        ("cpu", 64, "no experts that cpu can cache are on the CPU"),
        ("cpu:1", 1, "the smallest one takes 1.3 MiB on cpu:1"),
    ],
)
def test_a_cache_without_experts_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, device: str, mib: int, reason: str
) -> None:
    path = random_model(tmp_path / "m.gguf", replace(LARGE, n_embd=1024, n_ff_expert=768, n_layers=1))
    beside: dict[str, Any] = {"virtual_devices": 1, "cpu_moe": True} if device != "cpu" else {}
    with Engine(path, device, **beside, profile=None, ctx=64, expert_cache_mib=mib) as engine:
        assert [record.getMessage() for record in caplog.records] == [
            f"[experts] expert_cache_mib={mib} caches no expert: {reason}"
        ]
        assert caplog.records[0].getMessage() in engine.describe_plan()
