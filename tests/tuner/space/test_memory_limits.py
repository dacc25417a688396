from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dyno_tuner.cli.commands import app
from dyno_tuner.core.errors import TuneError
from dyno_tuner.core.protocol import Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.record.journal import load
from dyno_tuner.run.session import Request, limit_memory, run, space_for, target_of
from dyno_tuner.run.tune import Options
from dyno_tuner.space.knobs import Knob
from dyno_tuner.space.memory_limits import MemoryLimit, NearMiss, gib, parse_bytes, told_apart
from dyno_tuner.targets.dyno.target import DynoTarget
from dyno_tuner.targets.simulated.target import SimulatedTarget
from typer.testing import CliRunner

MODEL = Path(__file__).parents[2] / "data" / "tiny" / "qwen3moe-tiny.gguf"
GIB = 1 << 30
DEFAULTS = {"ctx": 32768, "ubatch": 512, "kv_type_k": "f16", "kv_type_v": "f16", "threads": 8}
KNOBS = (
    Knob("ubatch", (128, 512, 1024, 2048, 4096, 8192), 512),
    Knob("threads", (4, 8), 8),
)


def _plan(settings: Any) -> int | None:
    """12 GiB of weights, 3 GiB of f16 cache at 32768, half a MiB of arena for each token of the u-batch."""
    cache = 3.0 * settings["ctx"] / 32768
    cache *= (2 if settings["kv_type_k"] == "f16" else 1.0625) / 2
    return int((12 + cache) * GIB + settings["ubatch"] * (GIB >> 11))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 16 * GIB),
        ("16G", 16 * GIB),
        ("16GB", 16 * 10**9),
        ("0.5 gib", GIB // 2),
        ("800MiB", 800 << 20),
        ("4096", 4096),
        ("1t", 1 << 40),
    ],
)
def test_amounts(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "much", "-4GiB", "0GiB", "1e9", "16 GiB GiB", "4i", "inf"])
def test_no_amounts(text: str) -> None:
    with pytest.raises(TuneError, match=r"16GiB or 800MiB"):
        parse_bytes(text)


def test_a_near_miss_says_what_it_would_take() -> None:
    limit = MemoryLimit(16 * GIB, _plan, ("ctx", "ubatch", "kv_type_k", "kv_type_v"))
    misses = limit.near_misses(KNOBS, DEFAULTS, 4096)
    assert [str(m) for m in misses] == [
        "u-batch 4096 needs 1.0 GiB more; a q8_0 KV cache or a context of 16384 makes it fit"
    ]
    assert limit.allows({**DEFAULTS, "ubatch": 2048})
    assert not limit.allows({**DEFAULTS, "ubatch": 4096})
    assert limit.allows({**DEFAULTS, "ubatch": 4096, "kv_type_k": "q8_0", "kv_type_v": "q8_0"})


def test_a_context_is_not_cut_below_the_workload() -> None:
    limit = MemoryLimit(16 * GIB, lambda s: _plan({**s, "kv_type_k": "q8_0"}), ("ctx", "ubatch"))
    (miss,) = limit.near_misses(KNOBS, DEFAULTS, 30000)
    assert miss.value == 8192
    assert miss.cures == ()
    assert "no searched setting makes it fit" in str(miss)
    whole = NearMiss("n_gpu_layers", -1, 3 << 20, ())
    assert str(whole) == (
        "the whole model needs 3.0 MiB more on the device, so a part stays on the CPU; "
        "no searched setting makes it fit"
    )


def test_what_the_engine_refuses_is_left_to_the_engine() -> None:
    assert MemoryLimit(1, lambda settings: None, ("ctx",)).allows({"ctx": 1})


def test_a_default_that_does_not_fit_is_an_error_with_a_way_out() -> None:
    limit = MemoryLimit(15 * GIB, _plan, ("ctx", "ubatch", "kv_type_k", "kv_type_v"))
    with pytest.raises(TuneError, match=r"need 15\.2 GiB, 0\.2 GiB more .* a q8_0 KV cache .* makes it fit"):
        limit.check_default(DEFAULTS, 4096)


def test_sizes_for_people() -> None:
    assert [gib(x) for x in (0.7 * GIB, 12 << 20, 3 << 19, 5)] == ["0.7 GiB", "12 MiB", "1.5 MiB", "0.1 MiB"]


def _space(limit: int | None) -> tuple[Any, Any]:
    workload = Workload(pp=64, tg=4)
    executor = InlineExecutor(DynoTarget(str(MODEL), ctx=256))
    request = Request(str(MODEL), Options(workload), ctx=256, memory_limit=limit)
    description = executor.describe()
    space, misses = limit_memory(description, request, executor, space_for(description, request))
    executor.close()
    return space, misses


def test_the_plan_of_the_engine_bounds_the_search() -> None:
    """What it takes is what the engine's own plan says, to the byte."""
    target = DynoTarget(str(MODEL), ctx=256)
    whole, _ = _space(None)
    needs = {p: target.memory(whole.settings(p)) for p in whole.points()}
    sizes = sorted({n for n in needs.values() if n is not None})
    default = needs[whole.default]
    assert len(sizes) > 1
    assert default is not None
    limit = default if default < sizes[-1] else sizes[-1] - 1
    if limit < default:
        with pytest.raises(TuneError, match="the default settings need"):
            _space(limit)
    else:
        space, misses = _space(limit)
        assert {needs[p] for p in space.points()} == {n for n in sizes if n <= limit}
        assert misses
    with pytest.raises(TuneError, match="more than the limit"):
        _space(sizes[0] - 1)


def test_a_limit_reaches_profile_and_journal(tmp_path: Path) -> None:
    class Planned(SimulatedTarget):
        def memory(self, settings: Any) -> int:
            return int(settings["ubatch"]) << 20

    target = Planned("saturating", 1)
    request = Request(
        "simulated", Options(Workload(pp=64, tg=8), seed=1, max_trials=28), out=tmp_path / "p.yaml",
        quiet=True, memory_limit=1 << 30,
    )  # fmt: skip
    result = run(request, InlineExecutor(target), target.surface.space())
    assert result.outcome.settings["ubatch"] == 1024  # 2048 is faster
    records = load(result.journal).records
    assert any("u-batch 2048 needs 1.0 GiB more" in r.get("message", "") for r in records)
    tried = {r["config"]["settings"]["ubatch"] for r in records if r.get("op") == "visit"}
    assert max(tried) == 1024


def test_the_command_refuses_nonsense() -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["--model", str(MODEL), "--vram", "lots"])
    assert done.exit_code == 2
    assert "not an amount of memory" in done.output
    done = runner.invoke(
        app, ["--engine", "llama.cpp", "--bin", "/", "--model", str(MODEL), "--vram", "1GiB"]
    )
    assert done.exit_code != 0


@pytest.mark.parametrize(
    ("ctx", "depth", "held", "said"),
    [
        (10**6, 0, {}, r"--ctx 1000000: the model's limit is a context of \d+ tokens"),
        (None, 10**6, {}, r"needs a context of 1000016 tokens, and the model's limit is \d+"),
        (64, 100, {}, "needs a context of 116 tokens, but the given context holds 64"),
        (None, 100, {"ctx": 64}, "needs a context of 116 tokens, but the given context holds 64"),
    ],
)
def test_a_context_that_cannot_be_had_is_told_before_anything_is_touched(
    ctx: int | None, depth: int, held: dict[str, Any], said: str, tmp_path: Path
) -> None:
    out = tmp_path / "p.yaml"
    book = out.with_name("p.yaml.journal.jsonl")
    book.write_text("of an earlier run\n")
    options = Options(Workload(pp=16, tg=8, depth=depth))
    request = Request(str(MODEL), options, ctx=ctx, out=out, held=held, quiet=True)
    wanted = target_of(request, "cpu", None)[1]["ctx"]
    assert wanted == (ctx if ctx is not None else max(4096, 16 + depth))
    with pytest.raises(TuneError, match=said):
        run(request, InlineExecutor(DynoTarget(str(MODEL), held, ctx=wanted)))
    assert [p.name for p in tmp_path.iterdir()] == [book.name]


def test_amounts_that_differ_are_shown_so() -> None:
    assert told_apart(3 * GIB, GIB) == ("3.0 GiB", "1.0 GiB")
    assert told_apart(119 << 20, 100 << 20) == ("119 MiB", "100 MiB")
    assert told_apart((100 << 20) + 5, 100 << 20) == ("104,857,605 bytes", "104,857,600 bytes")
    limit = MemoryLimit(100 << 20, lambda settings: 119 << 20, ["ubatch"])
    with pytest.raises(TuneError, match="need 119 MiB, 19 MiB more than the limit of 100 MiB"):
        limit.check_default({"ubatch": 512}, 64)
